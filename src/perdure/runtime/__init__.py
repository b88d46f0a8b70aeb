"""Layer 2: load, action, save. The runtime saves what it is given and knows no loop."""
