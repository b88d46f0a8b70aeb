"""AG-UI, the protocol of front ends. A thread is a session, and the next request answers what a run waits for."""
