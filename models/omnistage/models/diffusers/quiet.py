"""Loading and saving without a word: Diffusers and Transformers write their reports to the terminal of the service."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers.utils.logging
import transformers.utils.logging

LIBRARIES: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)

_lock = threading.RLock()
"""`quiet` changes the state of the process. So do the libraries while they load: the default dtype, and how weights begin."""


def silence() -> None:
    """Silence both libraries for the life of a serving process: their warnings quote requests, whose words belong to the client alone."""
    for library in LIBRARIES:
        library.set_verbosity_error()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences both libraries in this context, which one thread at a time enters; afterwards all settings are as before."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in LIBRARIES]
        try:
            for library in LIBRARIES:
                library.set_verbosity(logging.CRITICAL)
                library.disable_progress_bar()
            yield
        finally:
            for library, (verbosity, shows_progress) in zip(LIBRARIES, before, strict=True):
                library.set_verbosity(verbosity)
                if shows_progress:
                    library.enable_progress_bar()
