"""Taps: vectors that a decoder puts out for its rows, for the next stage, in addition to the drawn items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omnistage.engine.adapter import StepRows
from omnistage.engine.entry import in_place
from omnistage.engine.materials import Materials


@dataclass(frozen=True, slots=True)
class Tap:
    """Makes the taps of a decoder. width: how many numbers a tap has. make: returns the taps, [rows, width], from the rows of a step, the
    embeddings of their items and hidden rows. layer: number of the layer whose output is passed as hidden rows; None: the last hidden rows,
    after the last norm."""

    width: int
    make: Callable[[StepRows, torch.Tensor, torch.Tensor], torch.Tensor]
    layer: int | None = None


def last_and_embedding(materials: Materials) -> Tap:
    """Build taps that are the last hidden row plus the embedding of the row's item; for a row with a given vector, the hidden row alone."""

    def make(rows: StepRows, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (embedded if rows.has_given is None else embedded.masked_fill(rows.has_given, 0.0))

    return Tap(materials.config.hidden_size, make)


def hidden_of(layer: int) -> Callable[[Materials], Tap]:
    """A function that builds taps that are the output of a layer, counted from 0, before `DecoderParts.after` adds to it. It raises
    ValueError for a layer that does not exist."""

    def build(materials: Materials) -> Tap:
        if not 0 <= layer < materials.config.layers:
            raise ValueError(f"a tap of layer {layer}: this decoder has layers 0 to {materials.config.layers - 1}")
        return Tap(materials.config.hidden_size, lambda rows, embedded, hidden: hidden, layer)

    return build


def embedding_or_hidden(index: int) -> Callable[[Materials], Tap]:
    """A function that builds taps: the embedding of the row's item, or `hidden_state(index)` for a row with a given vector."""

    def build(materials: Materials) -> Tap:
        tap = hidden_state(index)(materials)

        def make(rows: StepRows, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return embedded if rows.has_given is None else torch.where(rows.has_given, tap.make(rows, embedded, hidden), embedded)

        return Tap(tap.width, make, tap.layer)

    return build


def hidden_state(index: int) -> Callable[[Materials], Tap]:
    """A function that builds taps that are `hidden_states[index]` of Transformers. Index 0 is the input of the first layer. Index n is the
    output of the n-th layer, before `DecoderParts.after` adds to it; for the last layer, after the last norm. It raises ValueError for an
    index that does not exist."""

    def build(materials: Materials) -> Tap:
        width = materials.config.hidden_size
        if index == 0:
            enter = in_place(materials)
            return Tap(width, lambda rows, embedded, hidden: enter(rows, embedded))
        if index == materials.config.layers:
            return Tap(width, lambda rows, embedded, hidden: hidden)
        return hidden_of(index - 1)(materials)

    return build
