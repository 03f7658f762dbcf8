"""A decoder made of Transformers' own decoder layers, run by our layer loop: neither their `generate` nor their top-level `forward`.

For models that `PackedDecoder` does not describe. Transformers lets any attention be registered under a name; a model is built with
`attn_implementation=NAME` after `AttentionInterface.register(NAME, layer_attention)`, and its layers then call back into the engine.
This file imports no Transformers: the layers are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from omnistage.engine.adapter import Attention, DecoderSpec, Hidden, StepRows
from omnistage.engine.linear import Linears, build_exact

NAME = "omnistage_paged"
"""The name to register `layer_attention` under."""


def layer_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    dropout: float = 0.0,
    paged_attention: Attention,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The function for Transformers' AttentionInterface.

    query: [1, query_heads, rows, head_size]; key, value: [1, kv_heads, rows, head_size]. paged_attention: what `LayersDecoder` passes
    through the layer. Returns [1, rows, query_heads, head_size].
    """
    if attention_mask is not None or dropout:
        raise ValueError("paged attention takes neither a mask nor dropout")
    rows = query.shape[2]
    keys_values = torch.cat((key[0], value[0])).transpose(0, 1).contiguous()
    queries = (query[0] * scaling).transpose(0, 1).contiguous()
    attended = paged_attention(int(module.layer_idx), queries, keys_values)  # type: ignore[arg-type]
    return attended.view(1, rows, queries.shape[1], -1), None


class LayersDecoder:
    """Implements `Decoder` over Transformers' layers.

    embedding: int64 [1, rows] to [1, rows, hidden]. rotary: Transformers' rotary module; axes: how many kinds of positions it takes (3
    for multimodal positions, 0 for plain ones). norm: the last norm.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        embedding: nn.Module,
        layers: Sequence[nn.Module],
        rotary: nn.Module,
        axes: int,
        norm: nn.Module,
    ) -> None:
        self._spec, self._embedding, self._layers, self._rotary = spec, embedding, layers, rotary
        self._axes, self._norm = axes, norm

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        """A given vector stands in the place of the embedding, which a tap then is without."""
        x = embedded = self._embedding(rows.items[None, :, 0])
        if rows.given is not None and rows.has_given is not None:
            x, embedded = torch.where(rows.has_given[None], rows.given[None], x), embedded.masked_fill(rows.has_given[None], 0.0)
        positions = rows.positions[:1]
        rotations = self._rotary(x, rows.positions[:, None].expand(self._axes, 1, -1) if self._axes else positions)
        for layer in self._layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotations, paged_attention=attention)
        normed: torch.Tensor = self._norm(x)
        return Hidden(normed[0], (normed + embedded)[0] if rows.taps else None)


class PackedModule(nn.Module):
    """A `Linear` as a module."""

    def __init__(self, module: nn.Linear, linears: Linears) -> None:
        super().__init__()
        self._linear = linears(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def pack_linears(root: nn.Module) -> str:
    """Replace every `nn.Linear` below `root` by one whose rows do not depend on their neighbours. Returns the backend chosen, and why."""
    found = [(parent, name, child) for parent in root.modules() for name, child in parent.named_children() if isinstance(child, nn.Linear)]
    if not found:
        raise ValueError("the module has no linear layer")
    weight = found[0][2].weight

    def build(linears: Linears) -> list[PackedModule]:
        return [PackedModule(child, linears) for _, _, child in found]

    packed, chosen = build_exact(build, weight.dtype, weight.device)
    for (parent, name, _), module in zip(found, packed, strict=True):
        setattr(parent, name, module)
    return chosen
