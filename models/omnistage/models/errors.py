"""Why a model cannot be had."""


class LoadError(ValueError):
    """A model cannot be loaded as it was asked for. The text says why and what to do."""


class FetchError(LoadError):
    """A folder could not be fetched or built. The text says why and what to do."""
