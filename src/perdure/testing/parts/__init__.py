"""The contracts, one subject a file."""
