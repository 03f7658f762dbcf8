"""Errors of fetching and loading a model."""


class LoadError(ValueError):
    """A model cannot be loaded in the requested way. The text says why and what to do."""


class FetchError(LoadError):
    """A folder could not be fetched or built. The text says why and what to do."""
