"""`python -m minigen` is the ``minigen`` command."""

from minigen.cli import main

main()
