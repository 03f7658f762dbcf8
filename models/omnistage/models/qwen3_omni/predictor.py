"""The code predictor of Qwen3-Omni (Xu et al. 2025): draws the codes of a frame after the first code, each from the codes before it.

A frame is a short sequence of rows: the hidden row of the Talker, the embedding of the first code, and the embeddings of the further codes.
Each further code is drawn by a head of its own from the row before it. The last code is never embedded here, so a frame has as many rows as
codes. Frames do not see each other. The frames of all speakers of a step are computed together: first two rows of each frame, then one row
of each for every further code. It is a decoder of the engine's parts with attention of its own, over the places of one frame. The bits of a
frame do not depend on other frames."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from omnistage.engine.adapter import Attention, DecoderSpec, DrawnItem, StepRows
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.devices import to_device
from omnistage.engine.linear import pad_rows
from omnistage.engine.sampler import DrawnToken, Draws, Sampler
from omnistage.engine.types import SEEDS, Sampling
from omnistage.models.text.engine_model import Logits

GREEDY = Sampling()

PUBLISHED_SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.8)
"""The sampling with which Transformers draws the further codes, unless greedy sampling is requested for the first code."""

FIXED_SPEAKERS = 3

_SEED_STRIDE = 0xD6E8FEB86659FD93

Codes = tuple[int, ...]
"""The codes of a frame, without the first code."""

Choose = Callable[[int, torch.Tensor], Sequence[int]]
"""Chooses a code for each speaker from one of the further codebooks. Arguments: the codebook, from 0; its logits, [speakers, ids]."""


class Predictor:
    """The code predictor. decoder: its items are the codes of all further codebooks, one codebook after the other. heads: a head for each
    of these codebooks. first: embeddings of the first codes, [ids, hidden_size]. speakers: largest number of speakers in a step."""

    def __init__(self, decoder: PackedDecoder, heads: Sequence[Logits], first: torch.Tensor, speakers: int) -> None:
        self._decoder, self._heads, self._first = decoder, tuple(heads), first
        self._ids = decoder.spec.item_ids // len(heads)
        self._speakers, self.attention = speakers, FrameAttention(decoder.spec, speakers)
        self._plans: dict[tuple[int, int], _Pass] = {}
        """(number of speakers, codebook) -> the plan of the pass."""

    def codes(self, hidden: torch.Tensor, first: Sequence[int], choose: Choose) -> list[Codes]:
        """The further codes of one frame for each speaker. hidden: the rows from which the first codes were drawn, [speakers, hidden_size].
        first: the first codes. choose: draws the codes of each codebook."""
        count, device = len(first), self._decoder.spec.device
        embedded = functional.embedding(to_device(torch.tensor(first), device), self._first)
        input_rows = torch.stack((hidden, embedded), 1).flatten(0, 1)
        last = self._run_pass(count, 0, input_rows=input_rows)[1::2]  # the second of each speaker's two rows
        codes = [choose(0, self._heads[0](last.contiguous()))]
        for codebook in range(1, len(self._heads)):
            ids = torch.tensor(codes[-1]) + (codebook - 1) * self._ids
            last = self._run_pass(count, codebook, ids=to_device(ids, device))
            codes.append(choose(codebook, self._heads[codebook](last)))
        return list(zip(*codes, strict=True))

    def forget(self) -> None:
        """Set all keys and values to zero. It is called after numbers that are not finite, which must not stay in masked places."""
        self.attention.forget()

    def fixed_results(self) -> list[torch.Tensor]:
        """The logits of a few fixed frames, for the model's revision."""
        results, spec = list[torch.Tensor](), self._decoder.spec
        speakers = min(FIXED_SPEAKERS, self._speakers)
        rows = torch.randn(speakers, self._first.shape[1], generator=torch.Generator().manual_seed(0))

        def choose(codebook: int, logits: torch.Tensor) -> list[int]:
            results.append(logits)
            # Arbitrary codes, other ones for each codebook and speaker.
            return [(7919 * codebook + speaker) % self._ids for speaker in range(speakers)]

        with torch.inference_mode():
            self.codes(rows.to(spec.device, spec.dtype), list(range(speakers)), choose)
        return results

    def _run_pass(
        self, count: int, codebook: int, *, input_rows: torch.Tensor | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The decoder's hidden rows of the pass for one codebook, without padding, [rows, hidden_size]. count: number of speakers.
        input_rows: [rows, hidden_size]; None: the embeddings of the codes `ids`, int64 [rows]."""
        plan = self._plans.get((count, codebook))
        if plan is None:
            plan = self._plans[count, codebook] = self._plan_pass(count, codebook)
        items = torch.zeros(plan.rows, 1, dtype=torch.int64, device=self._decoder.spec.device)
        if ids is not None:
            items[: len(ids), 0] = ids
        if input_rows is not None:
            input_rows = functional.pad(input_rows, (0, 0, 0, plan.padding))
        has_given = None if input_rows is None else torch.ones_like(items, dtype=torch.bool)
        rows = StepRows(items, plan.positions, input_rows, has_given, padding=plan.padding)
        return self._decoder.hidden(rows, plan.attention).last[: plan.rows - plan.padding]

    def _plan_pass(self, count: int, codebook: int) -> _Pass:
        """The plan of the pass for a codebook and `count` speakers. The first pass has two rows of each speaker, a later pass has one."""
        speaker_rows, start = (2, 0) if codebook == 0 else (1, codebook + 1)
        rows, device = count * speaker_rows, self._decoder.spec.device
        padding = pad_rows(rows) - rows
        positions = functional.pad(torch.arange(start, start + speaker_rows).repeat(count), (0, padding))
        return _Pass(rows + padding, padding, to_device(positions[None], device), self.attention.rows(count, start, speaker_rows))


@dataclass(frozen=True, slots=True)
class _Pass:
    """The plan of all passes for one codebook and one number of speakers. rows: number of rows, padding included. padding: number of
    padding rows at the end. positions: int64 [1, rows]."""

    rows: int
    padding: int
    positions: torch.Tensor
    attention: Attention


class FrameHead:
    """Implements `Head`: the first code of a frame is drawn like a token, and the code predictor draws the further codes, unless the first
    code is an end. logits: computes the logits of first codes. ends: first codes that end a speech; their further codes are zeros."""

    def __init__(self, logits: Logits, predictor: Predictor, codes: int, ends: Collection[int]) -> None:
        """codes: number of codes in a frame."""
        self._logits, self._predictor, self._ends = logits, predictor, frozenset(ends)
        self._sample, self._zero_codes = Sampler(), (0,) * (codes - 1)

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnItem | None]:
        """See Head. The item of a frame is all of its codes."""
        tokens = self._sample(self._logits(hidden)[: len(draws)], draws, banned)
        # The first codes after which further codes are drawn, by place.
        first = {place: token.token_id for place, token in enumerate(tokens) if token is not None and token.token_id not in self._ends}
        codes_by_place: dict[int, Codes | None] = {}
        if first:
            places = to_device(torch.tensor([*first]), hidden.device)
            codes = self.draw_further_codes(hidden.index_select(0, places), [*first.values()], [draws[place] for place in first])
            codes_by_place = dict(zip(first, codes, strict=True))
        return [_item(token, codes_by_place.get(place, self._zero_codes)) for place, token in enumerate(tokens)]

    def draw_further_codes(self, hidden: torch.Tensor, first: Sequence[int], draws: Sequence[Draws]) -> list[Codes | None]:
        """The further codes of each speaker's frame; None for a frame with logits that are not finite. hidden, first: as in
        `Predictor.codes`. draws: of the same speakers, in the same order."""
        further_draws = [Draws(PUBLISHED_SAMPLING if draw.sampling.temperature else GREEDY, 0) for draw in draws]
        broken, no_bans = set[int](), [()] * len(further_draws)

        def choose(codebook: int, logits: torch.Tensor) -> list[int]:
            for further_draw, draw in zip(further_draws, draws, strict=True):
                further_draw.seed, further_draw.step = seed_of(draw.seed, codebook), draw.step
            tokens = self._sample(logits, further_draws, no_bans)
            broken.update(place for place, token in enumerate(tokens) if token is None)
            return [0 if token is None else token.token_id for token in tokens]

        codes = self._predictor.codes(hidden, first, choose)
        if broken:
            self._predictor.forget()
        return [None if place in broken else each for place, each in enumerate(codes)]


def _item(token: DrawnToken | None, codes: Codes | None) -> DrawnItem | None:
    return None if token is None or codes is None else DrawnItem((token.token_id, *codes), token.logprob, token.top)


def seed_of(seed: int, codebook: int) -> int:
    """The seed for drawing from one of the further codebooks, counted from 0. It differs for each codebook, because with the same seed all
    codebooks would get the same noise."""
    return (seed + (codebook + 1) * _SEED_STRIDE) % SEEDS


class FrameAttention:
    """Attention of the code predictor, within frames; holds keys and values of one frame for each speaker. speakers: largest number of
    speakers. together: whether all speakers share a product.

    A frame has a few places, and each frame begins anew. So keys and values are stored by speaker and head, and are multiplied without a
    copy. Places that a row does not see yet are masked, so that all passes have one size; the numbers in masked places must be finite. The
    bits of a row may depend on how many speakers are multiplied together. So each number of speakers is tried at load; if the bits differ
    for any number, each speaker is always multiplied alone."""

    def __init__(self, spec: DecoderSpec, speakers: int) -> None:
        self._spec = spec
        shape = (spec.layers, 2, speakers * spec.kv_heads, spec.context, spec.head_size)
        # In float32 for every type of rows: small products are faster in it, and oneDNN then keeps no kernel for each number of speakers.
        self._caches = torch.zeros(shape, device=spec.device)
        self.together = all(self._keeps_bits(speakers, speaker_rows) for speaker_rows in (1, 2))

    @property
    def sharing_text(self) -> str:
        """A text on whether speakers share a product, for the settings of the model."""
        if self.together:
            return "all speakers at once: each had the same bits in every company at load"
        return "speaker by speaker: together they had other bits at load"

    def forget(self) -> None:
        """Set all keys and values to zero."""
        self._caches.zero_()

    def rows(self, speakers: int, start: int, speaker_rows: int) -> Attention:
        """The attention of a pass for `speakers` speakers. start: the first place of the pass in each frame. speaker_rows: number of rows
        of each speaker."""
        spec, count, heads = self._spec, speakers * speaker_rows, self._spec.kv_heads
        group, end = spec.query_heads // heads, start + speaker_rows
        is_later = torch.arange(spec.context) > torch.arange(start, end).repeat_interleave(group)[:, None]
        mask = torch.zeros(is_later.shape).masked_fill_(is_later, float("-inf")).to(spec.device)
        layers = [
            (cache[:, : speakers * heads].unflatten(1, (speakers, heads))[..., start:end, :], *cache[:, : speakers * heads])
            for cache in self._caches
        ]

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            places, keys, values = layers[layer]
            places.copy_(keys_values[:count].view(speakers, speaker_rows, 2, heads, -1).permute(2, 0, 3, 1, 4))
            # The heads that share keys are rows of one product.
            queries_by_head = queries[:count].view(speakers, speaker_rows, heads, group, -1).transpose(1, 2)
            grouped_queries = queries_by_head.reshape(speakers * heads, speaker_rows * group, -1).float()
            if self.together:
                output = _attend(grouped_queries, keys, values, mask)
            else:
                output = _one_by_one(heads, grouped_queries, keys, values, mask)
            output = output.view(speakers, heads, speaker_rows, group, -1).transpose(1, 2).reshape(count, -1).to(spec.dtype)
            return functional.pad(output, (0, 0, 0, len(queries) - count)) if len(queries) > count else output

        return attend

    def _keeps_bits(self, max_speakers: int, speaker_rows: int) -> bool:
        """Whether rows have the same bits in products of up to `max_speakers` as alone. speaker_rows: number of rows of each speaker."""
        spec, generator = self._spec, torch.Generator().manual_seed(0)
        shapes = ((speaker_rows * spec.query_heads // spec.kv_heads, spec.head_size), *((spec.context, spec.head_size),) * 2)
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
