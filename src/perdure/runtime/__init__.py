"""The session runtime: load, action, save. It saves what it is given and knows no loop."""
