"""Why a model cannot be had."""


class LoadError(ValueError):
    """A model cannot be loaded as it was asked for. The text says why and what to do."""
