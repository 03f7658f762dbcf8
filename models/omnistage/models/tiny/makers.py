"""Checkpoints with random weights: what can be ordered, and the function that makes it for each family."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from omnistage.models.fetch.disk import LOCK, OwnFolder, sweep
from omnistage.models.reports import LoadError, ShowProgress, show_nothing

TOKENIZERS = ("built", "qwen")
DTYPES = ("float32", "bfloat16")
SEEDS = 2**64


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
    """A family whose checkpoints can be made. make: "module:function" of a Make, imported when it is needed. sizes: names of sizes."""

    make: str
    sizes: tuple[str, ...]


Make = Callable[[Path, CheckpointOrder, ShowProgress], None]
"""Fills an empty folder with a checkpoint."""

MAKERS: Mapping[str, Maker] = {
    "qwen2.5-omni": Maker("omnistage.models.tiny.qwen2_5_omni.checkpoint:make", ("tiny", "small", "100m")),
    "qwen3-omni": Maker("omnistage.models.tiny.qwen3_omni.checkpoint:make", ("tiny", "small")),
    "qwen3-omni-thinking": Maker("omnistage.models.tiny.qwen3_omni.checkpoint:make_thinking", ("tiny", "small")),
    **{
        name: Maker(f"omnistage.models.tiny.diffusers.pictures:{name.replace('-', '_')}", ("tiny", "small"))
        for name in (
            *("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered"),
            *("z-image", "longcat-image", "longcat-image-edit"),
        )
    },
    **{
        name: Maker(f"omnistage.models.tiny.diffusers.moving:{function}", ("tiny", "small", "odd"))
        for name, function in (
            *(("wan2.2-t2v", "wan_t2v"), ("wan2.2-ti2v", "wan_ti2v"), ("wan2.2-i2v", "wan_i2v")),
            ("stable-audio", "stable_audio"),
        )
    },
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
        _import_maker(maker.make)(work, order, progress or show_nothing)
        umask = _umask()
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


def _import_maker(place: str) -> Make:
    module, _, name = place.partition(":")
    return cast(Make, getattr(importlib.import_module(module), name))


def _umask() -> int:
    """The umask of this process, which can only be read by setting it."""
    value = os.umask(0o077)
    os.umask(value)
    return value


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
