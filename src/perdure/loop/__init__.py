"""Layer 2: the agent loop. It turns a state into the next ones, and never saves."""
