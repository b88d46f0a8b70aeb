"""Bit rot: a store with a bit of everything, every question that can be asked of it, and damage to what it keeps."""
