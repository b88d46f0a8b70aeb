"""`python -m perdure.cli`: the same as the installed command."""

from perdure.cli.main import main

main()
