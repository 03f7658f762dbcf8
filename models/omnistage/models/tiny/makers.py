"""Checkpoints with random weights: what can be ordered, and the function that makes it for each family."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omnistage.engine.types import SEEDS
from omnistage.models.fetch.own_files import LOCK, OwnFolder, sweep
from omnistage.models.reports import LoadError, ShowProgress, show_nothing

TOKENIZERS = ("built", "qwen")
DTYPES = ("float32", "bfloat16")


class MakeError(LoadError):
    """A checkpoint cannot be made as it was ordered. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A checkpoint to be made. size: see Maker.sizes. tokenizer: "built" (a small vocabulary) or "qwen". dtype: "" for the size's own."""

    size: str = "tiny"
    seed: int = 0
    tokenizer: str = "built"
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Maker:
    """A family whose checkpoints can be made. module: imported when it is needed; its function `make` fills an empty folder with a
    checkpoint, from the name in MAKERS, the folder, the order, and the function that shows progress. sizes: their names."""

    module: str
    sizes: tuple[str, ...]


_PLACE = "omnistage.models.tiny."
PICTURES = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "z-image", "longcat-image", "longcat-image-edit")
MOVING = ("wan2.2-t2v", "wan2.2-ti2v", "wan2.2-i2v", "stable-audio")
MAKERS: Mapping[str, Maker] = {
    "qwen2.5-omni": Maker(f"{_PLACE}qwen2_5_omni", ("tiny", "small", "100m")),
    **dict.fromkeys(("qwen3-omni", "qwen3-omni-thinking"), Maker(f"{_PLACE}qwen3_omni", ("tiny", "small"))),
    **dict.fromkeys(PICTURES, Maker(f"{_PLACE}diffusers.pipelines", ("tiny", "small"))),
    **dict.fromkeys(MOVING, Maker(f"{_PLACE}diffusers.pipelines", ("tiny", "small", "odd"))),
}


def make_tiny(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress | None = None) -> None:
    """Make a checkpoint of one of MAKERS in a folder, which must be empty or missing. Raises MakeError, FetchError, OSError."""
    maker = MAKERS.get(name)
    if maker is None:
        reason = f"no checkpoint of {name!r} can be made"
        similar = get_close_matches(name, MAKERS, 1)
        raise MakeError(f"{reason}; did you mean {similar[0]}?" if similar else f"{reason}, of these there can: {', '.join(MAKERS)}")
    for setting, value, choices in (
        ("size", order.size, maker.sizes),
        ("tokenizer", order.tokenizer, TOKENIZERS),
        ("dtype", order.dtype, ("", *DTYPES)),
    ):
        if value not in choices:
            raise MakeError(f"{setting} {value!r}: a checkpoint of {name} can have {', '.join(filter(None, choices))}")
    if not 0 <= order.seed < SEEDS:
        raise MakeError(f"seed {order.seed}: it must be from 0 to {SEEDS - 1}")
    exists = directory.exists()
    if exists and directory.is_dir():
        sweep(directory)  # Files that a killed process left do not make the folder full.
    if exists and (not directory.is_dir() or any(directory.iterdir())):
        raise MakeError(f"{directory} is there already and is no empty folder: name another one, or remove it")
    if not exists:
        directory.parent.mkdir(parents=True, exist_ok=True)
    own_folder = OwnFolder("partial", directory if exists else directory.parent)
    work = own_folder.path
    try:
        importlib.import_module(maker.module).make(name, work, order, progress or show_nothing)
        umask = os.umask(0o077)  # It can only be read by setting it.
        os.umask(umask)
        for path in work.rglob("*"):  # some libraries write files that only their user can read
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if exists:
            for path in work.iterdir():
                if path.name != LOCK:
                    path.rename(directory / path.name)
        else:
            work.chmod(0o777 & ~umask)
            own_folder.keep()
            work.rename(directory)
    except ModuleNotFoundError as error:
        raise MakeError(
            f"the package {error.name} is missing: `make wheels` in a clone, then pip install --find-links dist 'omnistage[models]'"
        ) from error
    finally:
        own_folder.remove()


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
