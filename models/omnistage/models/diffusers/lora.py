"""LoRA (Hu et al. 2021): small files that change the weights of a pipeline, chosen when it is loaded, by the loader of Diffusers.

A file may be anybody's. Only safetensors are read, and of what a file says of itself only sizes, scales and names: the loader would
pass on whatever stands there. Diffusers goes on without what fits nowhere, with a line in its log; here that is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.header import check_finite, check_unpacked, stored_in
from omnistage.models.diffusers.quiet import quiet
from omnistage.models.errors import LoadError

MOST = 16
PARTS = ("transformer", "transformer_2")
"""Of pipelines of two experts, the first for what is mostly noise."""
SECOND = "load_into_transformer_2"
"""Of Diffusers' loader."""
MOST_SCALE = 100.0
DOWN = re.compile(r"\.lora(_A|_down|\.down|_linear_layer\.down)\b")
"""In names of weights that lead from a layer to few numbers, as many as the rank; the first of their two sides in all ways to write it."""
MARK = re.compile(r"[._]lora[._]")
PLAIN = re.compile(r"[A-Za-z0-9_.]+")
METADATA = "lora_adapter_metadata"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Lora:
    """scale: how much of the change is made. part: which model of a pipeline of several it changes; empty: the only one."""

    path: Path
    scale: float = 1.0
    part: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __str__(self) -> str:
        return f"{self.path}{self.part and f' in {self.part}'} at {self.scale:g}"


def read_loras(text: str) -> tuple[Lora, ...]:
    """Of FILE[@PART][=SCALE], with commas between several. Raises LoadError."""
    loras = []
    for word in filter(None, text.split(",")):
        name, _, scale = word.rpartition("=") if "=" in word and not Path(word).is_file() else (word, "", "1")
        path, _, part = name.rpartition("@") if name.rpartition("@")[2] in PARTS and not Path(name).is_file() else (name, "", "")
        try:
            lora = Lora(Path(path), float(scale), part)
        except ValueError:
            lora = Lora(Path(path), math.nan)
        if not path or not abs(lora.scale) <= MOST_SCALE:
            raise LoadError(f"option lora {word}: give FILE or FILE=SCALE, a number from -{MOST_SCALE:g} to {MOST_SCALE:g}")
        loras.append(lora)
    if len(loras) > MOST or len({(lora.path.resolve(), lora.part) for lora in loras}) < len(loras):
        raise LoadError(f"option lora: give at most {MOST} files, each once")
    return tuple(loras)


def add_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Change a pipeline on the CPU. Raises BadCheckpoint, with the file and what of it does not fit."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise LoadError(f"option lora: {type(pipe).__name__} of diffusers takes none; leave it out")
    for lora in loras:
        _check_part(pipe, lora)
    names = [f"lora_{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        ranks = _check_file(lora.path)
        try:
            with quiet():
                _load(pipe, lora, name, ranks)
        except (BadCheckpoint, MemoryError):
            raise
        except Exception as error:  # the loader raises every kind of error of what stands in a file
            told = " ".join(str(error).split())[:300]
            raise BadCheckpoint(f"{lora.path} does not fit {type(pipe).__name__}; is it a LoRA of another model? {told}") from error
    pipe.set_adapters(names, [lora.scale for lora in loras])


def _check_part(pipe: Any, lora: Lora) -> None:
    """Raises LoadError where a pipeline of two models is not told which of them, and where it has not the one that is told."""
    parts = [part for part in PARTS if getattr(pipe, part, None) is not None]
    if lora.part and lora.part not in parts:
        raise LoadError(f"option lora {lora.path}@{lora.part}: {type(pipe).__name__} has no {lora.part}; leave it out")
    if not lora.part and len(parts) > 1:
        told = " or ".join(f"{lora.path}@{part}" for part in parts)
        raise LoadError(f"option lora {lora.path}: {type(pipe).__name__} has two models that draw; give {told}, or both")


def loras_beside(files: Collection[Path]) -> list[Path]:
    """Those of some files that are LoRA by the names in them."""
    return [path for path in sorted(files) if any(MARK.search(name) for name in _names(path))]


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except Exception:  # its errors have no base of their own but Exception; a damaged file that nobody reads is no LoRA
        return []


def _check_file(path: Path) -> frozenset[int]:
    """The ranks in a file. Raises BadCheckpoint for one that is missing, damaged or none."""
    if path.suffix != ".safetensors" or not path.is_file():
        raise BadCheckpoint(f"{path} is no file of safetensors: give a LoRA as FILE.safetensors, nothing else is read")
    try:
        with safe_open(path, "pt") as file:
            header, said = stored_in(file), file.metadata() or {}
    except Exception as error:  # its errors have no base of their own but Exception
        raise BadCheckpoint(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from None
    check_unpacked(header, path)
    ranks = frozenset(stored.shape[0] for name, stored in header.items() if DOWN.search(name) and stored.shape)
    if not ranks:
        raise BadCheckpoint(f"{path} is no LoRA: no weight in it is called so, the first is {min(header, default='missing')[:80]}")
    if METADATA in said:
        _check_said(path, said[METADATA], ranks)
    return ranks


def _check_said(path: Path, text: str, ranks: frozenset[int]) -> None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadCheckpoint(f"{path}: what it says of itself is no object of JSON")
    for name, value in said.items():
        check = SAID.get(name.rpartition(".")[2])
        if check is not None and not check(value, ranks):
            raise BadCheckpoint(f"{path}: {name[:80]!r} is {str(value)[:80]}, which fits none of its weights")


def _is_number(value: object, ranks: Collection[int]) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_rank(value: object, ranks: Collection[int]) -> bool:
    return isinstance(value, int) and value in ranks


def _are_names(value: object, ranks: Collection[int]) -> bool:
    """Of layers. One text would be a regular expression."""
    return isinstance(value, list) and all(isinstance(name, str) and PLAIN.fullmatch(name) for name in value)


SAID: Mapping[str, Any] = {
    "r": _is_rank,
    "lora_alpha": _is_number,
    "rank_pattern": lambda value, ranks: _by_layer(value, ranks, _is_rank),
    "alpha_pattern": lambda value, ranks: _by_layer(value, ranks, _is_number),
    "target_modules": _are_names,
    **dict.fromkeys(("lora_bias", "use_rslora", "use_dora"), lambda value, ranks: isinstance(value, bool)),
}
"""What a file can say of itself, as a LoraConfig of peft has it; all else is left out, for some of it changes other weights too."""


def _by_layer(value: object, ranks: Collection[int], is_fit: Any) -> bool:
    return isinstance(value, dict) and _are_names(list(value), ranks) and all(is_fit(one, ranks) for one in value.values())


def _load(pipe: Any, lora: Lora, name: str, ranks: frozenset[int]) -> None:
    path, second = lora.path, {SECOND: True} if lora.part == PARTS[1] else {}
    wanted = set[str]()
    published = pipe.lora_state_dict

    def confined(*arguments: Any, **named: Any) -> tuple[Any, ...]:
        *found, said = published(*arguments, **named)
        wanted.update(key[: mark.start()] for key in found[0] if (mark := MARK.search(key)) and not key.endswith(".alpha"))
        kept = {key: value for key, value in (said or {}).items() if key.rpartition(".")[2] in SAID}
        return (*found, kept or None)

    pipe.lora_state_dict = confined
    try:
        pipe.load_lora_weights(str(path), weight_name=path.name, adapter_name=name, local_files_only=True, use_safetensors=True, **second)
    finally:
        del pipe.lora_state_dict
    _check_loaded(pipe, path, name, wanted)


def _called(part: str) -> str:
    """As files call it: they know one model that draws."""
    return PARTS[0] if part == PARTS[1] else part


def _check_loaded(pipe: Any, path: Path, name: str, wanted: set[str]) -> None:
    """Raises BadCheckpoint for layers of the file that no part has, and for numbers that are none."""
    found = set[str]()
    for part, model in pipe.components.items():
        if not isinstance(model, torch.nn.Module):
            continue
        found |= {f"{_called(part)}.{layer}" for layer, module in model.named_modules() if name in getattr(module, "lora_A", {})}
        for weight, values in model.named_parameters():
            if f".{name}." in weight:
                check_finite(values, weight, path)
    if left := sorted(wanted - found):
        more = f", … ({len(left)} of {len(wanted)})" if len(left) > SHOWN else ""
        told = f"{', '.join(each[:200] for each in left[:SHOWN])}{more}"
        raise BadCheckpoint(f"{path} changes layers that {type(pipe).__name__} does not have: {told}; is it a LoRA of another model?")
