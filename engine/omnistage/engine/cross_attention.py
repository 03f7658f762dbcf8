"""Attention of a decoder to the rows of an encoder (Vaswani et al. 2017), between its own attention and its feed-forward.

The rows of the encoder are the first rows of each prompt, given as vectors and filled up to whole pages (`Prompt.beside_encoder`). Their
keys and values lie in pages of the sequence, as any other row's do. So nothing else has to keep them for the sequence or free them: a
prompt with the same vectors finds them again, a sequence that is preempted loses them and computes them again from the vectors, and every
rank has the keys and values of its own heads. Only keys and values of these rows are computed. The rows after them attend twice in each
layer: to each other, as if the pages of the encoder were not there, and across, to all rows of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from omnistage.engine.adapter import Attention, DecoderSpec, Hidden, StepRows
from omnistage.engine.materials import Materials
from omnistage.engine.norm import Norm
from omnistage.engine.pages import PAGE_ROWS, pages_for
from omnistage.engine.plan import PlannedRun, StepPlan

if TYPE_CHECKING:
    from omnistage.engine.attention import AttentionBackend
    from omnistage.engine.kv import KVCache


def bind(backend: AttentionBackend, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
    """The attention for the rows of a plan; a `Crossing` if the decoder attends to the rows of an encoder."""
    return Crossing(backend, cache, spec, plan) if spec.crosses else backend.bind(cache, spec, plan)


class Crossing:
    """Implements `Attention` of rows to each other, and `across`. Both are a backend's attention over pages. In the first, a run sees the
    pages after the encoder's; in the second, each row is a run of its own that sees all rows in the encoder's pages."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> None:
        self._own = backend.bind(cache, spec, replace(plan, runs=tuple(_own(plan.runs))))
        # Nothing is stored here: the keys and values were stored with the encoder's rows.
        self._across = backend.bind(
            cache, spec, replace(plan, runs=tuple(_across(plan.runs)), pages=plan.pages[:0], places=plan.places[:0])
        )
        self._heads = 2 * spec.kv_heads

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """The results for rows of the encoder have no meaning."""
        return self._own(layer, queries, keys_values)

    def across(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attend to the rows of the encoder. Shapes as in `Attention`."""
        return self._across(layer, queries, queries.new_empty(0, self._heads, queries.shape[-1]))


def _own(runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
    """The runs as if their sequences began after the encoder's pages. Runs of the encoder's own rows are left out."""
    for run in runs:
        skipped = pages_for(run.encoded)
        if len(run.pages) > skipped:
            yield PlannedRun(run.first, run.count, run.start - skipped * PAGE_ROWS, run.pages[skipped:])


def _across(runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
    """A run for each row that is not the encoder's: it stands at the last of the encoder's rows, so it sees all of them."""
    for run in runs:
        pages = run.pages[: pages_for(run.encoded)]
        if len(run.pages) > len(pages):
            for row in range(run.first, run.first + run.count):
                yield PlannedRun(row, 1, run.encoded - 1, pages)


class ComputeLayers(Protocol):
    """Computes the layers of a decoder for some rows. between: called between attention and feed-forward of each layer with the hidden rows
    and the number of the layer; returns the hidden rows to go on with."""

    def __call__(
        self, rows: StepRows, attention: Attention, between: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    ) -> Hidden: ...


class CrossAttention:
    """The part of a decoder that attends to an encoder's rows, in each layer. norm: builds the norm before it.

    Its weights: "layers.N.encoder_attn.q_proj.weight", k_proj, v_proj and o_proj, with biases or without; k_proj and v_proj take vectors of
    `DecoderConfig.given_width`. The weights of its norm begin with "layers.N.encoder_attn_layer_norm".
    """

    def __init__(self, materials: Materials, norm: Callable[[Materials, str], Norm]) -> None:
        config = self._config = materials.config
        self._group, self._scale = materials.group, config.head_size**-0.5
        queries, keys, hidden = config.query_heads * config.head_size, config.kv_heads * config.head_size, config.hidden_size
        prefixes = [f"layers.{layer}.encoder_attn" for layer in range(config.layers)]
        self._norms = tuple(norm(materials, f"{prefix}_layer_norm") for prefix in prefixes)
        self._queries = tuple(materials.fuse(prefix, {"q_proj": queries}, hidden) for prefix in prefixes)
        stored = {"k_proj": keys, "v_proj": keys}
        self._keys_values = tuple(materials.fuse(prefix, stored, config.given_width) for prefix in prefixes)
        self._outputs = tuple(materials.fuse(prefix, {"o_proj": hidden}, queries) for prefix in prefixes)

    def step(self, rows: StepRows, attention: Attention, compute: ComputeLayers) -> Hidden:
        """Compute the rows of a step that are not the encoder's. Rows of the encoder get zeros as hidden rows, and in each layer their keys
        and values are stored together with the other rows'."""
        if not isinstance(attention, Crossing):
            raise TypeError(f"a decoder with cross-attention needs attention that crosses, not {type(attention).__name__}")
        if rows.given is None or rows.has_given is None:
            return compute(rows, attention, lambda x, layer: self._attend(x, layer, lambda asked: attention.across(layer, asked)))
        encoder, own = (mask.nonzero()[:, 0] for mask in (rows.has_given[:, 0], ~rows.has_given[:, 0]))
        taken, padding, given, count = own, rows.padding, rows.given[encoder], len(rows.items)
        if len(own) == padding:  # At least one row must run, so one row of the encoder is computed in vain.
            own, taken, padding = own[:0], encoder[:1], 0

        def spread(part: torch.Tensor) -> torch.Tensor:
            return part.new_zeros(count, *part.shape[1:]).index_copy_(0, own, part[: len(own)])

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            stored = self._keys_values[layer](given).view(-1, *keys_values.shape[1:])
            return attention(layer, spread(queries), spread(keys_values).index_copy_(0, encoder, stored))[taken]

        def between(x: torch.Tensor, layer: int) -> torch.Tensor:
            return self._attend(x, layer, lambda asked: attention.across(layer, spread(asked))[taken])

        mine = replace(rows, items=rows.items[taken], positions=rows.positions[:, taken], given=None, has_given=None, padding=padding)
        computed = compute(mine, attend, between)
        return Hidden(spread(computed.last), None if computed.taps is None else spread(computed.taps))

    def _attend(self, x: torch.Tensor, layer: int, across: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        queries = self._queries[layer](self._norms[layer](x)).view(len(x), -1, self._config.head_size)
        return x + self._group.all_reduce(self._outputs[layer](across(queries * self._scale)))


def cross_attention(norm: Callable[[Materials, str], Norm]) -> Callable[[Materials], CrossAttention]:
    """Returns a function that builds cross-attention with norms of this kind."""
    return lambda materials: CrossAttention(materials, norm)
