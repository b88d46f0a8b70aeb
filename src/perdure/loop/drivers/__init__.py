"""Drivers, which ask models, behind the port `perdure.protocols.Driver`."""
