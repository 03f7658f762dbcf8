"""Cuts a decoder for the ranks of a group: its sizes and its weights, by a tensor-parallel plan of Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from omnistage.engine.decoder import EMBEDDING, LM_HEAD
from omnistage.engine.devices import Group
from omnistage.engine.parts import DecoderConfig
from omnistage.models.errors import LoadError

Plan = Mapping[str, str]
"""Pattern of a module's name -> the style in which its weight is cut: see `transformers.integrations.tensor_parallel`."""

HEAD_PLAN: Plan = {"lm_head": "colwise_gather_output"}
"""Transformers' models add this entry to the plans of their configs. It is repeated here because importing such a model takes seconds."""

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = "rowwise"
_WHOLE = "replicated"
"""Beginning of the names of styles that leave a weight whole on every rank."""

_EXPERTS = ("grouped_gemm", "ep_dispatch_experts")
"""Styles in which each rank gets some whole experts; for experts `engine.experts` supports no other styles."""


def config_of_part(config: DecoderConfig, size: int, others: Mapping[str, int] | None = None) -> DecoderConfig:
    """The config of one of `size` ranks. others: name for errors -> size that the ranks divide too, in a decoder with experts; None: the
    decoder has no experts, and the columns of its FFN are divided. Raises LoadError for a decoder that cannot be cut into so many equal
    parts."""
    if size < 1:
        raise LoadError(f"tensor_parallel_size {size}: there is at least one rank")
    counts = {
        "query heads": config.query_heads,
        "heads of keys and values": config.kv_heads,
        **({"FFN columns": config.ffn_size} if others is None else others),
        "tokens": config.vocab_size,
    }
    if any(count % size for count in counts.values()):
        divisor = math.gcd(*counts.values())
        able = [str(number) for number in range(1, divisor + 1) if divisor % number == 0]
        counts_text = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise LoadError(f"tensor_parallel_size {size}: does not divide {counts_text} of this model; it can be {' or '.join(able)}")
    ffn_size = config.ffn_size // size if others is None else config.ffn_size
    return replace(config, query_heads=config.query_heads // size, kv_heads=config.kv_heads // size, ffn_size=ffn_size)


def weights_of_part(weight: Callable[[str], torch.Tensor | None], plan: Plan, group: Group) -> Callable[[str], torch.Tensor | None]:
    """A function that returns, by the name of a weight, the part that the rank `group.rank` has by the plan; None: there is no such weight,
    or another rank has it. weight: returns whole weights. Raises LoadError for a plan with an unknown style."""
    for pattern, style in plan.items():
        if style not in (*_COLUMNS, _ROWS, *_EXPERTS) and not style.startswith(_WHOLE):
            raise LoadError(f"tensor_parallel_size {group.size}: the plan cuts {pattern} {style!r}, which is not known here")

    def part(name: str) -> torch.Tensor | None:
        tensor = weight(name)
        if tensor is None and name == LM_HEAD:
            tensor = weight(EMBEDDING)  # The logits use the embedding, and each rank computes the logits of some tokens.
        style = next((style for pattern, style in plan.items() if fnmatchcase(name.rpartition(".")[0], pattern)), None)
        if tensor is None or style is None or style in _EXPERTS or style.startswith(_WHOLE):
            return tensor
        if style in _COLUMNS:
            return tensor.tensor_split(group.size, 0)[group.rank].clone()  # A view would keep the whole weight in memory.
        if tensor.ndim > 1:
            return tensor.tensor_split(group.size, 1)[group.rank].clone(memory_format=torch.contiguous_format)
        return tensor if group.rank == 0 else None  # The ranks' results are summed, so one rank alone adds the bias.

    return part
