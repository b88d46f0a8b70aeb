"""Bit rot: a store with a bit of everything, every question that it can be asked, and damage to its files or rows."""
