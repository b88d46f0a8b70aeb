"""The inspector: pages for people, rendered here, that work without JavaScript."""
