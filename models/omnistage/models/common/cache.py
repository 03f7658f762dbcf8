"""The place of fetched models on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory: `OMNISTAGE_CACHE`, else `omnistage` in the XDG cache directory. It may not exist yet."""
    if path_text := os.environ.get("OMNISTAGE_CACHE"):
        return Path(path_text).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omnistage"
