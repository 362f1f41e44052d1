"""The command line. Importing it does not load torch, so that `--help` answers at once."""

from postlude.cli.app import app, main

__all__ = ["app", "main"]
