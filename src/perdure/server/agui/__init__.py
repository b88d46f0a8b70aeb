"""AG-UI, the protocol of front ends: a thread is a session, and what a run waits for is answered by the next."""
