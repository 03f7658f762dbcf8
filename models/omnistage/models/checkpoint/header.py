"""Checks whether a model can compute with its weights: first by the headers of the files, later by the numbers of each weight.

The headers also give the number of weights. A config may ask for a hundred million layers, and a library then builds until memory or
patience ends. Here building ends with an error as soon as there are more modules than the files could fill.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from omnistage.models.checkpoint.files import MAX_CONFIG_NUMBER, BadCheckpoint, Config

log = logging.getLogger("omnistage.models.common.header")

SHOWN = 5
"""Number of names that a line of the log shows."""

COMPUTED = ("F64", "F32", "F16", "BF16")
PLAIN = (*COMPUTED, "I64", "BOOL")
"""Names of types in safetensors: COMPUTED: of weights; PLAIN: also of positions and masks, which libraries often store with weights."""

QUANTIZED = ("quantization_config", "compression_config")
"""Keys of a config under which libraries write how weights are packed."""

FP8, COMPRESSED = "fp8", "compressed-tensors"
"""Methods whose weights are unpacked when they are read: see `checkpoint.weights`."""

UNPACKED = "are not supported yet; give the checkpoint that they were made from"


@dataclass(frozen=True, slots=True)
class Stored:
    """The type and shape of a tensor, from the header of its file. dtype: the name in safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


def weights_in(file: safe_open) -> dict[str, Stored]:
    """Type and shape of all tensors of an open file, by name."""
    parts = {name: file.get_slice(name) for name in set(file.keys())}  # type: ignore[no-untyped-call]
    return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def tell_unread(folder: Path, read: Collection[Path]) -> None:
    """Log the files of weights in a folder that were not read and so have no effect, such as a LoRA. read: the files that were read."""
    if unread := sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors") if path not in read):
        log.warning("not read, and without effect: %s in %s", ", ".join(unread[:SHOWN]) + (", ..." if unread[SHOWN:] else ""), folder)


def check_unpacked(header: Mapping[str, Stored], place: object) -> None:
    """Raises BadCheckpoint if a weight is packed. header: without the weights that `packed` unpacks."""
    refuse_packed({name: stored for name, stored in header.items() if stored.dtype not in PLAIN}, place)


def refuse_packed(packed: Mapping[str, Stored], place: object) -> None:
    """Raises BadCheckpoint if `packed` is not empty. place: the file or folder, for the error."""
    if packed:
        dtypes = ", ".join(sorted({stored.dtype for stored in packed.values()}))
        raise BadCheckpoint(f"{place}: {len(packed)} weights are of {dtypes}, the first is {min(packed)}: quantized weights {UNPACKED}")


def check_says_unpacked(values: object, place: str) -> None:
    """Raises BadCheckpoint if a config has a key, at any depth, which says that weights are packed. values: the config as read from JSON.
    place: its file, for the error."""
    for prefix, key, value in _entries(values):
        if key in QUANTIZED and value:
            method = value.get("quant_method") or value.get("quant_type") if isinstance(value, dict) else value
            method_text = f"quantized by {str(method)[:80]}" if method else "quantized by an unknown method"
            raise BadCheckpoint(f"{place}: {prefix}{key!r} is there: weights {method_text} {UNPACKED}")


def check_plain(checkpoint_config: Config, *parts: Config) -> None:
    """Raises BadCheckpoint if a config says that weights are packed in an unknown way, or says so where libraries do not look.
    checkpoint_config: the config of the checkpoint. parts: its sections for the loaded parts of the model."""
    unknown_packing = {key: checkpoint_config.raw.get(key) for key in QUANTIZED if not is_unpacked(checkpoint_config.raw.get(key))}
    check_says_unpacked(unknown_packing, checkpoint_config.place)
    for part in parts:
        check_says_unpacked(part.raw, part.place)


def is_unpacked(packing: object) -> bool:
    """Whether this project can unpack weights that are packed in this way. packing: the value of a key of QUANTIZED."""
    return isinstance(packing, dict) and packing.get("quant_method") in (FP8, COMPRESSED)


def check_finite(
    tensor: torch.Tensor, name: str, place: object, computed: torch.dtype = torch.float32, *, may_be_infinite: bool = False
) -> None:
    """Raises BadCheckpoint if a number of a weight is not finite in the type `computed`. may_be_infinite: only NaN is an error. place: the
    file or folder, for the error."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    ends = torch.stack(torch.aminmax(tensor.detach())).to(computed)  # Both are NaN if any number is.
    if ends.isnan().any() or (ends.isinf().any() and not may_be_infinite):
        raise BadCheckpoint(f"{place}: {name} has numbers that are not finite: it is damaged, or was not saved as it was trained")


def whole_numbers(values: object) -> Iterator[tuple[str, int]]:
    """Yields every whole number in a config, at any depth, as (the keys that lead to it, number). values: the config as read from JSON."""
    for prefix, key, value in _entries(values):
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                yield f"{prefix}{key!r}", number


def _entries(values: object) -> Iterator[tuple[str, str, Any]]:
    """Yields (prefix, key, value) of each entry of each object in the values, at any depth. prefix: the keys that lead to the object, as
    text."""
    stack: list[tuple[str, object]] = [("", values)]
    while stack:
        prefix, inner = stack.pop()
        if isinstance(inner, dict):
            for key, value in inner.items():
                yield prefix, key, value
                stack.append((f"{prefix}{key}: ", value))
        elif isinstance(inner, list):
            stack += [(prefix, value) for value in inner if isinstance(value, dict | list)]


SPARE_WEIGHTS = 256
SPARE_NUMBERS = 1 << 24
TIMES = 4
"""A model may have this many times as many weights as the files, and the spare ones: some weights are tied, some are computed."""

DEPTH = 32
"""Largest number of dots in a weight's name at which names are compared."""

MODULES = 64
"""Number of modules that a model may have for each weight, because some modules have no weights of their own."""


def check_numbers(values: Mapping[str, Any], place: Path) -> None:
    """Raises BadCheckpoint for a whole number above MAX_CONFIG_NUMBER, because libraries make lists of such a length before they build a
    module. The base of rotary frequencies is no count, and may be larger. place: file of the values, for the error."""
    for field, number in whole_numbers(values):
        if abs(number) > MAX_CONFIG_NUMBER and not field.endswith("theta'"):
            raise BadCheckpoint(f"{place}: {field} is {str(number)[:80]}, and {MAX_CONFIG_NUMBER} is the most that anything has")


@contextmanager
def bound_building(header: Mapping[str, Stored], folder: Path) -> Iterator[None]:
    """While the context is open, raises BadCheckpoint as soon as the modules that this thread builds have many times more weights, numbers
    or modules than the files have weights for. header: the weights in the files."""
    thread = threading.get_ident()
    max_weights = TIMES * len(header) + SPARE_WEIGHTS
    max_numbers = TIMES * sum(math.prod(stored.shape) for stored in header.values()) + SPARE_NUMBERS
    weights = numbers = modules = 0

    def too_many(name: str) -> BadCheckpoint:
        problem = f"its files have {len(header)} weights, and by config.json the model has many times more"
        return BadCheckpoint(f"{folder}: {problem}: stopped at {name!r}, the {weights}th")

    def count_weight(module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        nonlocal weights, numbers
        if value is None or threading.get_ident() != thread:
            return
        weights, numbers = weights + 1, numbers + value.numel()
        if weights > max_weights or numbers > max_numbers:
            raise too_many(name)

    def count_module(module: torch.nn.Module, name: str, value: torch.nn.Module | None) -> None:
        nonlocal modules
        modules += threading.get_ident() == thread
        if modules > MODULES * max_weights:
            raise too_many(name)

    hooks = register_module_parameter_registration_hook(count_weight), register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_stored(header: Mapping[str, Stored], model: torch.nn.Module, report: Mapping[str, Any], folder: Path) -> None:
    """Raises BadCheckpoint if `header` has packed weights: tensors of whole numbers that are named like weights of the model, or of a type
    with few bits. Whole numbers that are named like positions and masks are allowed. If the model lacks no weight, tensors that it does
    not use are allowed too.

    report: what the library reports of its loading. Libraries name weights as in the whole model, or as in a part of it."""
    uncomputed = {name: stored for name, stored in header.items() if stored.dtype not in COMPUTED}
    whole_buffers = {name for name, value in model.named_buffers() if not value.is_floating_point()}
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unused = set() if report["missing_keys"] else set(map(str, report["unexpected_keys"]))
    allowed = unused | _named_alike(uncomputed, whole_buffers)
    suspects = _named_alike(uncomputed, weights) | {name for name, stored in uncomputed.items() if stored.dtype not in PLAIN}
    refuse_packed({name: uncomputed[name] for name in suspects - allowed}, folder)


def _named_alike(names: Iterable[str], model_names: Collection[str]) -> set[str]:
    """The names that equal a name of the model, or would equal it without leading parts of either name."""
    ends = {end for name in model_names for end in _ends(name)}
    return {name for name in names if name in ends or any(end in model_names for end in _ends(name))}


def _ends(name: str) -> Iterator[str]:
    """The name itself, and the rest of the name after each dot."""
    parts = name.rsplit(".", DEPTH)
    return (".".join(parts[at:]) for at in range(len(parts)))


def check_tensors(model: torch.nn.Module, folder: Path) -> None:
    """Raises BadCheckpoint for a weight with a number that is not finite in the type of computing. Weights that the loader packs at the
    user's wish are no plain tensors any more, and are not checked. Buffers may be infinite, because masks are."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if type(value) is torch.Tensor:
            check_finite(value, name, folder, value.dtype, may_be_infinite=name not in weights)
