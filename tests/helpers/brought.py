"""A family of models that an installed package brings: a folder with the package, for the path of commands and stacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def bring(folder: Path, family: str, code: str, monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Whatever is started from now on has it. family: its name. code: a module whose FAMILY it is. paths: further folders on their path."""
    site = folder / "site"
    info = site / "bringing-1.dist-info"
    info.mkdir(parents=True)
    (site / "bringing.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bringing\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[omnistage.families]\n{family} = bringing:FAMILY\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), *paths, os.environ.get("PYTHONPATH", "")])))
