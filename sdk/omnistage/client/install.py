"""What to type where a package is missing, in the words of docs/client.md. Code that does not know the client has the same words; a test
compares them."""

from __future__ import annotations

ALL = ("cli", "convert", "models")
"""Extras with which models run on this machine, the default ones too."""


def install(*extras: str) -> str:
    """What to type for these extras, and where."""
    return f"`make wheels` in a clone, then pip install --find-links dist 'omnistage[{','.join(extras)}]'"
