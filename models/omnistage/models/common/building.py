"""Stops libraries that build a much larger model than the files have weights for. The files' headers give the number of weights.

A config may ask for a hundred million layers, and a library then builds until memory or patience ends. Here building ends with an error as
soon as there are more modules than the files could fill.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from omnistage.models.common.checkpoint import MOST, BadCheckpoint
from omnistage.models.common.header import COMPUTED, PLAIN, Stored, check_finite, refuse_packed, whole_numbers

SPARE_WEIGHTS = 256
SPARE_NUMBERS = 1 << 24
TIMES = 4
"""A model may have this many times as many weights as the files, and the spare ones: some weights are tied, some are computed."""

DEPTH = 32
"""Largest number of dots in a weight's name at which names are compared."""

MODULES = 64
"""Number of modules that a model may have for each weight, because some modules have no weights of their own."""


def check_numbers(values: Mapping[str, Any], place: Path) -> None:
    """Raises BadCheckpoint for a whole number above MOST, because libraries make lists of such a length before they build a module. The
    base of rotary frequencies is no count, and may be larger. place: file of the values, for the error."""
    for field, number in whole_numbers(values):
        if abs(number) > MOST and not field.endswith("theta'"):
            raise BadCheckpoint(f"{place}: {field} is {str(number)[:80]}, and {MOST} is the most that anything has")


@contextmanager
def bound_building(header: Mapping[str, Stored], folder: Path) -> Iterator[None]:
    """While the context is open, raises BadCheckpoint as soon as the modules that this thread builds have many times more weights, numbers
    or modules than the files have weights for. header: the weights in the files."""
    thread = threading.get_ident()
    max_weights = TIMES * len(header) + SPARE_WEIGHTS
    max_numbers = TIMES * sum(math.prod(stored.shape) for stored in header.values()) + SPARE_NUMBERS
    weights = numbers = modules = 0

    def more(name: str) -> BadCheckpoint:
        problem = f"its files have {len(header)} weights, and by config.json the model has many times more"
        return BadCheckpoint(f"{folder}: {problem}: stopped at {name!r}, the {weights}th")

    def parameter(module: torch.nn.Module, name: str, value: torch.nn.Parameter | None) -> None:
        nonlocal weights, numbers
        if value is None or threading.get_ident() != thread:
            return
        weights, numbers = weights + 1, numbers + value.numel()
        if weights > max_weights or numbers > max_numbers:
            raise more(name)

    def inner(module: torch.nn.Module, name: str, value: torch.nn.Module | None) -> None:
        nonlocal modules
        modules += threading.get_ident() == thread
        if modules > MODULES * max_weights:
            raise more(name)

    hooks = register_module_parameter_registration_hook(parameter), register_module_module_registration_hook(inner)
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
    others = {name: stored for name, stored in header.items() if stored.dtype not in COMPUTED}
    numbers = {name for name, value in model.named_buffers() if not value.is_floating_point()}
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    without_place = set() if report["missing_keys"] else set(map(str, report["unexpected_keys"]))
    spare = without_place | _named_alike(others, numbers)
    bad = _named_alike(others, weights) | {name for name, stored in others.items() if stored.dtype not in PLAIN}
    refuse_packed({name: others[name] for name in bad - spare}, folder)


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
