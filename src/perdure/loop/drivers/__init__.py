"""Drivers: what asks a model, behind the port `perdure.protocols.Driver`."""
