"""Errors that keep a server process from starting."""


class StartError(RuntimeError):
    """The server cannot start; the text says why and what to do."""
