"""A decoder made of Transformers' own decoder layers, run by our layer loop: neither their `generate` nor their top-level `forward`.

For models that `PackedDecoder` does not describe. Transformers lets any attention be registered under a name; a model is built with
`attn_implementation=NAME` after `AttentionInterface.register(NAME, layer_attention)`, and its layers then call back into the engine.
This file imports no Transformers: the layers are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from omnistage.engine.adapter import Attention, DecoderSpec
from omnistage.engine.linear import Linear

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
    for multimodal positions, 0 for plain ones). norm, head: the last norm and the output projection.
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
        head: nn.Module,
    ) -> None:
        self._spec, self._embedding, self._layers, self._rotary = spec, embedding, layers, rotary
        self._axes, self._norm, self._head = axes, norm, head

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self._embedding(token_ids[None])
        places = positions.expand(self._axes, 1, -1) if self._axes else positions[None]
        rotations = self._rotary(x, places)
        for layer in self._layers:
            x = layer(x, attention_mask=None, position_ids=positions[None], position_embeddings=rotations, paged_attention=attention)
        normed: torch.Tensor = self._norm(x)
        return normed[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self._head(hidden)
        return scores


class PackedModule(nn.Module):
    """A `Linear` as a module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def pack_linears(root: nn.Module) -> None:
    """Replace every `nn.Linear` below `root` by a packed one: rows then do not depend on their neighbours, and small batches are faster."""
    for name, child in list(root.named_children()):
        if isinstance(child, nn.Linear):
            setattr(root, name, PackedModule(child))
        else:
            pack_linears(child)
