"""`python -m zloader` is the `zloader` command."""

from zloader.commands.cli import app

app()
