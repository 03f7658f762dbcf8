"""The command that installs a missing package, in the words of docs/client.md. Code that cannot import the client has a copy of these
words; a test compares them."""

from __future__ import annotations

ALL = ("cli", "convert", "models")
"""Extras that run models on this machine, the default ones too."""


def install(*extras: str) -> str:
    """The command that installs these extras."""
    return f"`make wheels` in a clone, then pip install --find-links dist 'omnistage[{','.join(extras)}]'"
