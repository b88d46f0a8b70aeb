"""The forms of each framework's items. They work on JSON without the framework, so importers can use them too."""
