"""A decoder that is built of parts: the layers of Vaswani et al. (2017), whose parts a family chooses. A request may give vectors for rows,
which enter in place of embeddings or are added after layers; taps are vectors that the decoder puts out for its rows, for the next stage.

This module has what all decoders share: one product for queries, keys and values, attention over the engine's pages with grouped queries
(Ainslie et al. 2023), residual sums, and logits. All products are packed: they take about 0.6 of the time of the same layers run as
Transformers' modules. The rest are `DecoderParts`, by default RMS norms, rotary positions and SwiGLU. A part of only one family is a
function in that family's folder which builds it; no size and no flag here mentions it.

**How a part is built**: from `Materials`, which are the sizes of this rank, the weights of this rank, the decoder's own `Linears`, and the
`Group`. A part of one layer also gets the number of its layer. All its products come from these `Linears`: they are tried out when the
model is loaded, and if one breaks the claim of a backend, all parts are built again with the next backend.

**How a part is called**: in each step with the `StepRows`, the hidden rows of all sequences, and the layer if one part serves all layers.

**A part's promise**: the result of a row depends neither on other rows of the step nor on their number. So it uses products of the
`Linears`, operations on single numbers, and operations within a row. (Beware of exponentials of a row length that is no multiple of 32, and
of sums over rows: see `engine.parts`.) It keeps nothing of a sequence, whose state lies in its pages. Every rank gets the whole result,
with the same bits: if each rank computes a part, `Group.all_reduce` sums the parts, and all ranks must call it equally often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import Attention, DecoderSpec, Hidden, StepRows
from omnistage.engine.devices import ONE_RANK, Group
from omnistage.engine.linear import Linear, Linears, build_exact
from omnistage.engine.parts import DecoderConfig, FeedForward, HeadNorm, Materials, Norm, Rope, Weights, need, rms_norm, rotary, swiglu

Enter = Callable[[StepRows, torch.Tensor], torch.Tensor]
"""(rows of a step, embeddings of their items [rows, embedding_width]) -> the first layer's input [rows, hidden_size]."""

After = Callable[[StepRows, torch.Tensor, int], torch.Tensor]
"""(rows of a step, output of a layer [rows, hidden_size], number of that layer) -> the next layer's input, in the same shape."""


def in_place(materials: Materials) -> Enter:
    """Build an `Enter` that replaces a row's embedding by the row's given vector, or by the first numbers of a wider vector."""

    def enter(rows: StepRows, embedded: torch.Tensor) -> torch.Tensor:
        if rows.given_vectors is None or rows.has_given is None:
            return embedded
        return torch.where(rows.has_given, rows.given_vectors[:, : embedded.shape[1]], embedded)

    return enter


def deepstack(layers: int) -> Callable[[Materials], After]:
    """Returns a function that builds an `After`: after each of the first `layers` layers it adds a part of a given vector to its row (Meng
    et al. 2024). A given vector has 1 + layers parts as wide as a hidden row: the first for `in_place`, one for each of these layers."""

    def build(materials: Materials) -> After:
        width = materials.config.hidden_size
        if materials.config.given_width != (1 + layers) * width:
            raise ValueError(f"given_width is {materials.config.given_width}, and for {layers} layers it is {(1 + layers) * width}")

        def add(rows: StepRows, x: torch.Tensor, layer: int) -> torch.Tensor:
            if layer >= layers or rows.given_vectors is None or rows.has_given is None:
                return x
            # The other rows must keep their bits, so nothing is added to them: adding a zero would change -0.0.
            return torch.where(rows.has_given, x + rows.given_vectors[:, (1 + layer) * width : (2 + layer) * width], x)

        return add

    return build


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


EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Functions that build the parts of a decoder; a part that is None is left out.

    entry: makes the first layer's input. norm: called for each norm, with the name of its weight without ".weight". rope: applies positions
    to queries and keys. head_norm: normalizes queries and keys of a layer before `rope`. feed_forward: makes the feed-forward of a layer.
    after: changes the output of layers. tap: puts out a vector for a row, apart from its item."""

    entry: Callable[[Materials], Enter] = in_place
    norm: Callable[[Materials, str], Norm] = rms_norm
    rope: Callable[[Materials], Rope] = field(default_factory=rotary)
    head_norm: Callable[[Materials, int], HeadNorm] | None = None
    feed_forward: Callable[[Materials, int], FeedForward] = swiglu
    after: Callable[[Materials], After] | None = None
    tap: Callable[[Materials], Tap] | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """The built parts of one layer."""

    attention_norm: Norm
    query_key_value: Linear
    head_norm: HeadNorm | None
    output: Linear
    ffn_norm: Norm
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class _Built:
    """All built parts of a decoder."""

    enter: Enter
    rope: Rope
    layers: tuple[_Layer, ...]
    after: After | None
    norm: Norm
    tap: Tap | None
    head: Linear


class PackedDecoder:
    """Implements `Decoder` over plain weights.

    weight: returns the tensor of a name as in Transformers' text models ("embed_tokens.weight", "norm.weight",
    "layers.N.self_attn.q_proj.weight" ...); None: the checkpoint has no such tensor. The embedding is kept without a copy, and may be
    memory of a file; all others are copied. If there is no weight "lm_head.weight", the logits use the embedding ("tied"). parts: None: the
    default parts. products: text for the log: the backend of its products, and why faster backends were refused. group: the ranks that
    compute it together. With several ranks, config and weights are this rank's part (of heads and of columns of the FFN), and
    "lm_head.weight" is its part of the logits; all ranks call `hidden` and `logits` alike, and each gets the whole result."""

    def __init__(self, config: DecoderConfig, weight: Weights, parts: DecoderParts | None = None, group: Group = ONE_RANK) -> None:
        embedding, decoder_parts = need(weight, EMBEDDING, (config.vocab_size, config.embedding_width)), parts or DecoderParts()
        self._config, self._embedding, self._group = config, embedding, group
        head = weight(LM_HEAD)
        head = embedding if head is None else head

        def build(linear: Linears) -> _Built:
            return _build(Materials(config, weight, linear, group, embedding.dtype, embedding.device), decoder_parts, head)

        self._parts, self.products = build_exact(build, embedding.dtype, embedding.device)
        self._spec = DecoderSpec(
            layers=config.layers,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            item_ids=config.vocab_size,
            context=config.context,
            dtype=embedding.dtype,
            codebooks=config.codebooks,
            further_ids=config.further_ids,
            axes=self._parts.rope.axes,
            given_width=config.given_width,
            tap_width=self._parts.tap.width if self._parts.tap else 0,
            device=embedding.device,
            drawn_ids=len(head) * group.size,  # `head` is this rank's part of the ids.
        )

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        """See `Decoder`. All ranks compute it together; each gets the whole result."""
        config, parts = self._config, self._parts
        tap = parts.tap if rows.taps else None
        turn = parts.rope(rows.positions)
        embedded = functional.embedding(rows.items[:, 0], self._embedding)
        x = parts.enter(rows, embedded)
        tapped = None
        for index, layer in enumerate(parts.layers):
            qkv = layer.query_key_value(layer.attention_norm(x)).view(x.shape[0], -1, config.head_size)
            if layer.head_norm is not None:
                layer.head_norm(qkv)
            turn(qkv)
            attended = attention(index, qkv[:, : config.query_heads], qkv[:, config.query_heads :])
            x = x + self._group.all_reduce(layer.output(attended))
            x = x + layer.feed_forward(rows, layer.ffn_norm(x))
            if tap is not None and tap.layer == index:
                tapped = x
            if parts.after is not None:
                x = parts.after(rows, x, index)
        last = parts.norm(x)
        # A tap of no layer is made from the last hidden rows.
        return Hidden(last, None if tap is None else tap.make(rows, embedded, last if tapped is None else tapped))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(self._parts.head(hidden))


def _build(materials: Materials, parts: DecoderParts, head: torch.Tensor) -> _Built:
    """Build all parts. head: the weight of the logits, [ids, hidden_size]."""
    return _Built(
        enter=parts.entry(materials),
        rope=parts.rope(materials),
        layers=tuple(_layer(materials, parts, index) for index in range(materials.config.layers)),
        after=parts.after and parts.after(materials),
        norm=parts.norm(materials, "norm"),
        tap=parts.tap and parts.tap(materials),
        head=materials.linear(head),
    )


def _layer(materials: Materials, parts: DecoderParts, index: int) -> _Layer:
    """Build the parts of layer number `index`."""
    config, prefix = materials.config, f"layers.{index}"
    queries, keys = config.query_heads * config.head_size, config.kv_heads * config.head_size
    attention = f"{prefix}.self_attn"
    return _Layer(
        attention_norm=parts.norm(materials, f"{prefix}.input_layernorm"),
        query_key_value=materials.fuse(attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, config.hidden_size),
        head_norm=parts.head_norm and parts.head_norm(materials, index),
        output=materials.fuse(attention, {"o_proj": config.hidden_size}, queries),
        ffn_norm=parts.norm(materials, f"{prefix}.post_attention_layernorm"),
        feed_forward=parts.feed_forward(materials, index),
    )
