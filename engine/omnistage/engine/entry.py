"""Puts the vectors that a request gives for rows into the input of a decoder's layers, in place of or added to embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omnistage.engine.adapter import StepRows
from omnistage.engine.materials import Materials

Enter = Callable[[StepRows, torch.Tensor], torch.Tensor]
"""(rows of a step, embeddings of their items [rows, embedding_width]) -> the first layer's input [rows, hidden_size]."""

After = Callable[[StepRows, torch.Tensor, int], torch.Tensor]
"""(rows of a step, output of a layer [rows, hidden_size], number of that layer) -> the next layer's input, in the same shape."""


def in_place(materials: Materials) -> Enter:
    """Build an `Enter` that replaces a row's embedding by the row's given vector, or by the first numbers of a wider vector."""

    def enter(rows: StepRows, embedded: torch.Tensor) -> torch.Tensor:
        if rows.given is None or rows.has_given is None:
            return embedded
        return torch.where(rows.has_given, rows.given[:, : embedded.shape[1]], embedded)

    return enter


def deepstack(layers: int) -> Callable[[Materials], After]:
    """Returns a function that builds an `After`: after each of the first `layers` layers it adds a part of a given vector to its row (Meng
    et al. 2024). A given vector has 1 + layers parts as wide as a hidden row: the first for `in_place`, one for each of these layers."""

    def build(materials: Materials) -> After:
        width = materials.config.hidden_size
        if materials.config.given_width != (1 + layers) * width:
            raise ValueError(f"given_width is {materials.config.given_width}, and for {layers} layers it is {(1 + layers) * width}")

        def add(rows: StepRows, x: torch.Tensor, layer: int) -> torch.Tensor:
            if layer >= layers or rows.given is None or rows.has_given is None:
                return x
            # The other rows must keep their bits, so nothing is added to them: adding a zero would change -0.0.
            return torch.where(rows.has_given, x + rows.given[:, (1 + layer) * width : (2 + layer) * width], x)

        return add

    return build
