"""Attention within the frames of the code predictor: each speaker has a frame of a few places, and all speakers share one product. Each
frame begins anew. So keys and values are stored by speaker and head, and are multiplied without a copy. Places that a row does not see yet
are masked, so that all passes have one size; the numbers in masked places must be finite. The bits of a row may depend on how many speakers
are multiplied together. So each number of speakers is tried at load; if the bits differ for any number, each speaker is always multiplied
alone."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import Attention, DecoderSpec


class FrameAttention:
    """Attention of the code predictor; holds keys and values of one frame for each speaker. speakers: largest number of speakers. together:
    whether all speakers share a product."""

    def __init__(self, spec: DecoderSpec, speakers: int) -> None:
        self._spec = spec
        shape = (spec.layers, 2, speakers * spec.kv_heads, spec.context, spec.head_size)
        # In float32 for every type of rows: small products are faster in it, and oneDNN then keeps no kernel for each number of speakers.
        self._held = torch.zeros(shape, device=spec.device)
        self.together = all(self._keeps_bits(speakers, each) for each in (1, 2))

    @property
    def told(self) -> str:
        """A text on whether speakers share a product, for the settings of the model."""
        if self.together:
            return "all speakers at once: each had the same bits in every company at load"
        return "speaker by speaker: together they had other bits at load"

    def forget(self) -> None:
        """Set all keys and values to zero."""
        self._held.zero_()

    def rows(self, speakers: int, start: int, each: int) -> Attention:
        """The attention of a pass for `speakers` speakers. start: the first place of the pass in each frame. each: number of rows of each
        speaker."""
        spec, count, heads = self._spec, speakers * each, self._spec.kv_heads
        group, end = spec.query_heads // heads, start + each
        hidden = torch.arange(spec.context) > torch.arange(start, end).repeat_interleave(group)[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(spec.device)
        layers = [
            (cache[:, : speakers * heads].unflatten(1, (speakers, heads))[..., start:end, :], *cache[:, : speakers * heads])
            for cache in self._held
        ]

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            places, keys, values = layers[layer]
            places.copy_(keys_values[:count].view(speakers, each, 2, heads, -1).permute(2, 0, 3, 1, 4))
            # The heads that share keys are rows of one product.
            grouped_queries = (
                queries[:count].view(speakers, each, heads, group, -1).transpose(1, 2).reshape(speakers * heads, each * group, -1).float()
            )
            output = (
                _attend(grouped_queries, keys, values, mask) if self.together else _one_by_one(heads, grouped_queries, keys, values, mask)
            )
            output = output.view(speakers, heads, each, group, -1).transpose(1, 2).reshape(count, -1).to(spec.dtype)
            return functional.pad(output, (0, 0, 0, len(queries) - count)) if len(queries) > count else output

        return attend

    def _keeps_bits(self, max_speakers: int, each: int) -> bool:
        """Whether rows have the same bits in products of up to `max_speakers` as alone. each: number of rows of each speaker."""
        spec, generator = self._spec, torch.Generator().manual_seed(0)
        shapes = ((each * spec.query_heads // spec.kv_heads, spec.head_size), *((spec.context, spec.head_size),) * 2)
        queries, keys, values = (torch.randn(max_speakers * spec.kv_heads, *shape, generator=generator).to(spec.device) for shape in shapes)
        mask = torch.zeros(1, spec.context, device=spec.device)
        reference = _one_by_one(spec.kv_heads, queries, keys, values, mask)
        # Parts with the last speakers, so that each speaker has another place than in the product of all.
        parts = (slice((max_speakers - count) * spec.kv_heads, None) for count in range(1, max_speakers + 1))
        return all(torch.equal(_attend(queries[part], keys[part], values[part], mask), reference[part]) for part in parts)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The results of attention, [heads, rows, head_size]. queries: in the same shape. keys, values: [heads, places, head_size]. mask: added
    to the scores, [rows, places]."""
    return torch.bmm(torch.baddbmm(mask, queries, keys.transpose(1, 2)).softmax(-1), values)


def _one_by_one(heads: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As `_attend`, with one product for each speaker. heads: number of heads of keys of one speaker."""
    parts = zip(*(torch.split(each, heads) for each in (queries, keys, values)), strict=True)
    return torch.cat([_attend(own_queries, own_keys, own_values, mask) for own_queries, own_keys, own_values in parts])
