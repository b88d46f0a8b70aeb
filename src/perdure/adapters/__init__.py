"""Other frameworks' sessions kept by perdure: how their items become messages, and come back as they were."""
