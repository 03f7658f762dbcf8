"""The `omnistage` command."""
