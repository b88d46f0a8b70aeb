"""`python -m perdure`: the command line."""

from perdure.cli.main import main

main()
