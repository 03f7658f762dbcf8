"""Attention in which rows see only their own segment: windows and frames of a picture, chunks of sound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional

MOST_ROWS = 1 << 14
"""Largest number of rows of equally long segments in one call of attention, to bound its memory."""


class Segments:
    """Consecutive segments of rows. lengths: number of rows of each segment, in order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._of_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            self._of_length.setdefault(length, []).append(index)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Each row's attention to the rows of its segment, [rows, heads * head size]. query, key, value: [rows, heads, head size]."""
        parts = [torch.split(tensor, self.lengths) for tensor in (query, key, value)]
        out = torch.empty(len(query), query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        outs = torch.split(out, self.lengths)
        for length, indices in self._of_length.items():
            at_once = max(MOST_ROWS // length, 1)
            for first in range(0, len(indices), at_once):
                some = indices[first : first + at_once]
                queries, keys, values = (torch.stack([part[index] for index in some]).transpose(1, 2) for part in parts)
                attended = functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
                for index, rows in zip(some, attended, strict=True):
                    outs[index].copy_(rows.reshape(length, -1))
        return out
