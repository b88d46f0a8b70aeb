"""The command line: one file for each group of commands, each imported when one of its commands is called."""
