"""How each framework's items become messages: pure JSON, without the framework, so that importers can use it too."""
