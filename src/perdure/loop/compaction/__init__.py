"""Showing a model less: what is cut or summed up, by which options, and when a run does it by itself."""
