"""Compaction, which shows a model less: what is cut or summarised, by which options, and when a run does it itself."""
