"""The command line. Importing it does not load torch, so that `--help` answers at once."""

from postlude.cli.commands import app
from postlude.cli.entry import main

__all__ = ["app", "main"]
