"""perdure beside the session stores that people use today: the same turn, machine and disk, in one run."""
