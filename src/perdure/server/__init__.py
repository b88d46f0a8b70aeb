"""perdure as a service: an HTTP API, the protocols that other clients speak, and an inspector for people."""
