"""Layer 0: frozen values. No I/O, no async; time and ids come from `ids` alone."""
