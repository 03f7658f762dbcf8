"""The check whether a model can compute with its weights, by the files' headers before a weight is read, and by the numbers when it is
read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omnistage.models.common.checkpoint import BadCheckpoint, Config

log = logging.getLogger(__name__)

SHOWN = 5
"""Most names in a line of the log."""

COMPUTED = ("F64", "F32", "F16", "BF16")
PLAIN = (*COMPUTED, "I64", "BOOL")
"""Types of safetensors for weights, and for positions and masks, which libraries mostly keep together with weights."""

QUANTIZED = ("quantization_config", "compression_config")
"""Keys of a config under which libraries tell how weights are packed."""

FP8, COMPRESSED = "fp8", "compressed-tensors"
"""Methods whose weights are unpacked when they are read: see `common.packed`."""

UNPACKED = "are not supported yet; give the checkpoint that they were made from"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the header of its file. dtype: name of its type there."""

    dtype: str
    shape: tuple[int, ...]


def weights_in(file: safe_open) -> dict[str, Stored]:
    """All weights of an open file by name."""
    parts = {name: file.get_slice(name) for name in set(file.keys())}  # type: ignore[no-untyped-call]
    return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def tell_unread(folder: Path, read: Collection[Path]) -> None:
    """Log the files with weights that nobody reads, such as a LoRA in the same folder: it has no effect."""
    if unread := sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors") if path not in read):
        log.warning("not read, and without effect: %s in %s", ", ".join(unread[:SHOWN]) + (", ..." if unread[SHOWN:] else ""), folder)


def check_unpacked(header: Mapping[str, Stored], place: object) -> None:
    """Raises BadCheckpoint if a weight is packed. header: without the weights that `packed` unpacks."""
    refuse_packed({name: stored for name, stored in header.items() if stored.dtype not in PLAIN}, place)


def refuse_packed(packed: Mapping[str, Stored], place: object) -> None:
    """Raises BadCheckpoint if there is a weight in `packed`. place: for errors."""
    if packed:
        dtypes = ", ".join(sorted({stored.dtype for stored in packed.values()}))
        raise BadCheckpoint(f"{place}: {len(packed)} weights are of {dtypes}, the first is {min(packed)}: quantized weights {UNPACKED}")


def check_says_unpacked(values: object, place: str) -> None:
    """Raises BadCheckpoint for a config that says, at any depth, that weights are packed. values: as read from JSON."""
    for where, key, value in _entries(values):
        if key in QUANTIZED and value:
            method = value.get("quant_method") or value.get("quant_type") if isinstance(value, dict) else value
            told = f"quantized by {str(method)[:80]}" if method else "quantized by an unknown method"
            raise BadCheckpoint(f"{place}: {where}{key!r} is there: weights {told} {UNPACKED}")


def check_plain(whole: Config, *parts: Config) -> None:
    """Raises BadCheckpoint if a config says that weights are packed in an unknown way, or says it in a place that libraries do not use.
    whole: the config of the checkpoint. parts: its sections about the parts that are loaded."""
    said = {key: value for key in QUANTIZED if not is_unpacked(value := whole.raw.get(key))}
    for config, values in ((whole, said), *((part, part.raw) for part in parts)):
        check_says_unpacked(values, config.place)


def is_unpacked(said: object) -> bool:
    """Whether weights that are packed in this way are unpacked when they are read. said: value of a config."""
    return isinstance(said, dict) and said.get("quant_method") in (FP8, COMPRESSED)


def check_finite(
    tensor: torch.Tensor, name: str, place: object, computed: torch.dtype = torch.float32, *, may_be_infinite: bool = False
) -> None:
    """Raises BadCheckpoint for a weight with a number that is not finite in the type `computed`. Reads the weight once. place: the file or
    folder, for errors."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    ends = torch.stack(torch.aminmax(tensor.detach())).to(computed)  # Both are NaN if any number is.
    if ends.isnan().any() or (ends.isinf().any() and not may_be_infinite):
        raise BadCheckpoint(f"{place}: {name} has numbers that are not finite: it is damaged, or was not saved as it was trained")


def whole_numbers(values: object) -> Iterator[tuple[str, int]]:
    """Every whole number in a config, at any depth, with its place. values: as read from JSON."""
    for where, key, value in _entries(values):
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                yield f"{where}{key!r}", number


def _entries(values: object) -> Iterator[tuple[str, str, Any]]:
    """(place, key, value) of every object in the values, inner ones too."""
    left: list[tuple[str, object]] = [("", values)]
    while left:
        where, inner = left.pop()
        if isinstance(inner, dict):
            for key, value in inner.items():
                yield where, key, value
                left.append((f"{where}{key}: ", value))
        elif isinstance(inner, list):
            left += [(where, value) for value in inner if isinstance(value, dict | list)]
