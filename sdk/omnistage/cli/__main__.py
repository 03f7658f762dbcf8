"""`python -m omnistage.cli` is the `omnistage` command."""

from omnistage.cli.main import app

app(prog_name="omnistage")
