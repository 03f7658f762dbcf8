"""Makes the folders of one user's data: the last conversation, typed lines, the stacks that serve, and logs of stacks."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(name: str = "") -> Path:
    """The folder of this user's state, or the folder `name` in it; it is made for this user alone if it is missing. It is
    `OMNISTAGE_STATE`, else `omnistage` in the XDG state directory, which outlives a login, unlike the XDG runtime directory. Raises
    OSError."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = os.environ.get("OMNISTAGE_STATE")
    path = Path(folder).expanduser() if folder else (Path(base) if base else Path.home() / ".local" / "state") / "omnistage"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path /= name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
