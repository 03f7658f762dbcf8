"""A family whose Thinker is loaded when a test lets it: until then it reads a named pipe, which tells the test that it has begun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnistage.models.family import Family, ModelEntry
from omnistage.models.options import LoadOptions, validate_options
from omnistage.models.toy.stages import ToyOptions, ToyThinker

FAMILY = Family(models={"thinker": ModelEntry("helpers.loading:load_thinker", options="helpers.loading:LoadingOptions")})


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """pipe: what is read to its end before there is a model."""

    pipe: str = ""

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> LoadingOptions:
        return cls(**validate_options(options, cls(), "the model that waits"))


def load_thinker(folder: Path | None, options: LoadOptions) -> ToyThinker:
    """The toy one, once the pipe has ended."""
    Path(LoadingOptions.from_settings(dict(options.family)).pipe).read_bytes()
    return ToyThinker(ToyOptions())


def loading_pipeline(folder: Path) -> tuple[Path, Path]:
    """The file of a pipeline of that Thinker alone, and the pipe that holds it up."""
    pipe, file = folder / "weights", folder / "loading.yaml"
    os.mkfifo(pipe)
    file.write_text(
        "name: loading\ndescription: It waits.\ninputs: [text]\noutputs: [text]\nstages:\n"
        f"  - {{kind: thinker, family: test-loading, options: {{pipe: '{pipe}'}}}}\ndefaults:\n  thinker: {{max_tokens: 256}}\n"
    )
    return file, pipe


@contextmanager
def reading(pipe: Path) -> Iterator[None]:
    """Entered when somebody has begun to read; who reads comes to its end when this is left."""
    with pipe.open("wb"):
        yield


def bring(folder: Path, family: str, code: str, monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Whatever is started from now on has it. family: its name. code: a module whose FAMILY it is. paths: further folders on their path."""
    site = folder / "site"
    info = site / "bringing-1.dist-info"
    info.mkdir(parents=True)
    (site / "bringing.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bringing\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[omnistage.families]\n{family} = bringing:FAMILY\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), *paths, os.environ.get("PYTHONPATH", "")])))
