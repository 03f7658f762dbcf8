"""Decoders of other parts give the results of Transformers with the same weights, and the same bits in any company."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

from helpers import lengths
from helpers.engines import TAPPED, TINY, close_later, items, make_engine, read, tiny_decoder, tiny_weights
from helpers.parts import EXPERTS, MIX, MIXED, SECTIONS, STACKED, ToyPart, mixed_shapes, requests
from omnistage.engine.adapter import DrawnItem, StepRows, TokenHead
from omnistage.engine.attention import RowAttention
from omnistage.engine.decoder import DecoderParts, Enter, PackedDecoder, embedding_or_hidden, hidden_of, hidden_state
from omnistage.engine.devices import ONE_RANK
from omnistage.engine.engine import Engine
from omnistage.engine.linear import Linears, build_exact
from omnistage.engine.parts import (
    Activation,
    Experts,
    ExpertSizes,
    FeedForward,
    Materials,
    activated_product,
    experts,
    interleaved_axes,
    rotary,
    swiglu,
)
from omnistage.engine.request import Given, Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.results import fixed_results
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.types import Sampling, Unfit

CASES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
SEED = 5
"""The seed of weights whose results are compared with those of another implementation, which rounds differently: if two experts, or two
tokens, are almost equally good for a row, that one would now and then choose the other."""
DRAWN = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05)
UNSHARED = replace(EXPERTS, shared=0)
PLAIN = replace(MIX, parts=replace(MIX.parts, feed_forward=experts(UNSHARED)), shapes=mixed_shapes(UNSHARED))
"""The mixture of experts as the reference has it, without a shared expert."""


def rows_of(count: int, **fields: Any) -> StepRows:
    """Rows of token 0 at place 0. fields: of StepRows."""
    return StepRows(torch.zeros(count, 1, dtype=torch.int64), torch.zeros(1, count, dtype=torch.int64), **fields)


def taps(events: list[SequenceEvent]) -> torch.Tensor:
    return torch.cat([event.taps.rows for event in events if event.taps is not None])


def running(decoder: PackedDecoder, pages: int = 80, max_rows: int = 64, kept: int | None = 0) -> Engine:
    return make_engine(decoder, pages, kept_pages=kept, max_rows=max_rows)


async def answered(engine: Engine, asked: list[SequenceRequest]) -> list[list[SequenceEvent]]:
    return list(await asyncio.gather(*(read(engine.submit(each)) for each in asked)))


# Results of Transformers with the same weights -----------------------------------------------------------------------------------------


def mixed_reference(weights: dict[str, torch.Tensor]) -> Qwen3VLMoeTextModel:
    config = Qwen3VLMoeTextConfig(
        vocab_size=MIXED.vocab_size,
        hidden_size=MIXED.hidden_size,
        num_hidden_layers=MIXED.layers,
        num_attention_heads=MIXED.query_heads,
        num_key_value_heads=MIXED.kv_heads,
        head_dim=MIXED.head_size,
        max_position_embeddings=MIXED.context,
        moe_intermediate_size=UNSHARED.size,
        num_experts=UNSHARED.experts,
        num_experts_per_tok=UNSHARED.experts_per_row,
        rms_norm_eps=MIXED.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(SECTIONS)},
        attn_implementation="sdpa",
    )
    model = Qwen3VLMoeTextModel(config).eval()
    model.load_state_dict(together(weights, UNSHARED.experts))
    return model


def together(weights: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The weights with those of all experts as one tensor, as Transformers holds them in memory."""
    state = {name: value for name, value in weights.items() if ".experts." not in name}
    for prefix in dict.fromkeys(name.partition(".experts.")[0] for name in weights if ".experts." in name):
        every = [f"{prefix}.experts.{expert}" for expert in range(count)]
        gate_up = [torch.cat([weights[f"{one}.{part}_proj.weight"] for part in ("gate", "up")]) for one in every]
        state[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"{prefix}.experts.down_proj"] = torch.stack([weights[f"{one}.down_proj.weight"] for one in every])
    return state


def mixed_states(
    reference: Qwen3VLMoeTextModel, weights: dict[str, torch.Tensor], prompt: Prompt, said: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The prompt and the answer without its last token: the ids, which rows have a given vector, and the hidden states [rows, hidden]."""
    ids = torch.tensor([*prompt.items[:, 0], *said[:-1]])
    positions = torch.arange(len(ids)).expand(3, -1) + prompt.delta
    embedded, is_seen = functional.embedding(ids, weights["embed_tokens.weight"]), torch.zeros(len(ids), dtype=torch.bool)
    stacked = None
    if prompt.given:
        assert prompt.positions is not None
        positions = torch.cat([torch.from_numpy(prompt.positions), positions[:, len(prompt) :]], 1)
        (given,) = prompt.given
        is_seen[given.first : given.first + len(given.rows)] = True
        first, *stacked = given.rows.split(MIXED.hidden_size, 1)
        embedded[is_seen] = first
    with torch.no_grad():
        made = reference(
            inputs_embeds=embedded[None],
            position_ids=positions[:, None],
            visual_pos_masks=is_seen[None],
            deepstack_visual_embeds=stacked,
            output_hidden_states=True,
        )
    return ids, is_seen, [state[0] for state in made.hidden_states]


async def test_a_mixture_of_experts_says_what_transformers_says() -> None:
    """Positions have three axes that take turns, and vectors are added after layers."""
    weights, asked = PLAIN.weights(SEED), requests(PLAIN, SEED, (1, 4, 33, 70), 30)
    engine, reference = running(PLAIN.decoder(SEED)), mixed_reference(weights)
    for each, events in zip(asked, await answered(engine, asked), strict=True):
        said = [item[0] for item in items(events)]
        expected = mixed_states(reference, weights, each.prompt, said)[-1][-1]
        logits = expected @ weights["embed_tokens.weight"].T
        assert said == logits[-len(said) :].argmax(-1).tolist()
        torch.testing.assert_close(taps(events), expected[: len(taps(events))], atol=1e-5, rtol=1e-5)


def materials(toy: ToyPart, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Materials:
    """The materials, with products that keep their claims."""

    def build(linear: Linears) -> Materials:
        made = Materials(toy.config, weights.get, linear, ONE_RANK, dtype, torch.device("cpu"))
        toy.parts.feed_forward(made, 0)
        return made

    return build_exact(build, dtype, torch.device("cpu"))[0]


@pytest.mark.parametrize("normalized", [False, True])
def test_experts_of_whom_one_is_shared_are_those_of_transformers(normalized: bool) -> None:
    sizes, weights = replace(EXPERTS, normalized=normalized), MIX.weights(SEED)
    config = Qwen2MoeConfig(
        hidden_size=MIXED.hidden_size,
        moe_intermediate_size=sizes.size,
        shared_expert_intermediate_size=sizes.shared,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_row,
        norm_topk_prob=normalized,
    )
    reference, prefix = Qwen2MoeSparseMoeBlock(config), "layers.0.mlp."
    layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    whole = {name.removeprefix(prefix): value for name, value in together(weights, sizes.experts).items() if name.startswith(prefix)}
    assert len(layer) == 3 * sizes.experts + 5
    reference.load_state_dict(whole)
    x = torch.randn(37, MIXED.hidden_size, generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        made = Experts(materials(MIX, weights, torch.float32), "layers.0.mlp", sizes)(rows_of(37), x)
        torch.testing.assert_close(made, reference(x[None])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sections", [(5, 4, 3), (24, 20, 20), (2, 3, 3)], ids=str)
def test_axes_take_turns_in_a_head_as_in_transformers(sections: tuple[int, ...], seed: int) -> None:
    size = 2 * sum(sections)
    config = Qwen3VLTextConfig(
        hidden_size=3 * size,
        head_dim=size,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "mrope_section": list(sections)},
    )
    made, weights = replace(MIXED, query_heads=3, kv_heads=1, head_size=size), PLAIN.weights(seed)
    plain = replace(materials(PLAIN, weights, torch.float32), config=made, weight=weights.get)
    rope = rotary(500.0, interleaved_axes(sections))(plain)
    assert rope.axes == 3
    generator = torch.Generator().manual_seed(seed)
    positions, heads = torch.randint(0, 300, (3, 20), generator=generator), torch.randn(20, 5, size, generator=generator)
    turned = heads.clone()
    rope(positions)(turned)
    rotations = Qwen3VLTextRotaryEmbedding(config)(heads, positions[:, None])
    queries, keys = apply_rotary_pos_emb(heads[None, :, :3].transpose(1, 2), heads[None, :, 3:4].transpose(1, 2), *rotations)
    torch.testing.assert_close(turned[:, :3], queries[0].transpose(0, 1) * size**-0.5)
    torch.testing.assert_close(turned[:, 3:4], keys[0].transpose(0, 1))
    assert torch.equal(turned[:, 4:], heads[:, 4:])


# The same bits in any company ----------------------------------------------------------------------------------------------------------


@lengths.long_form(
    "engine/test_parts.py::test_a_row_of_experts_has_the_same_bits_however_many_chose_the_same",
    "engine/test_rows.py::test_given_rows_positions_and_taps_alone_in_company_and_preempted",
    "engine/test_engine.py::test_answers_do_not_depend_on_company_order_or_a_break",
)
@lengths.one_or_all("case", CASES)
async def test_a_row_has_the_same_bits_in_any_company(case: str, seed: int) -> None:
    """The sequence runs beside others, with so little room that they take each other's pages, and is read in small pieces; alone; with
    pages that are found again; and cut anywhere, with its history read as a prompt."""
    dtype, rng = CASES[lengths.draw(case, CASES, seed)], random.Random(seed)
    # The prompts are as long as in test_team, for the same reason: there is no room for the pages of both, however late the second one
    # comes.
    long, short = requests(MIX, seed, (61, 60), 80, DRAWN), requests(MIX, seed + 2, (1, 7, 40), 24, DRAWN)
    decoder, asked = MIX.decoder(seed, dtype), [*long, *short]
    narrow = running(decoder, pages=8, max_rows=rng.choice((33, 50)))
    beside = await answered(narrow, asked)
    assert narrow.stats().preemptions
    bare, wide = running(decoder, max_rows=200), running(decoder, max_rows=200, kept=40)
    for each, before in zip(asked[1:], beside[1:], strict=True):
        cut = rng.randrange(each.max_items // 2, each.max_items)
        (alone,) = await answered(bare, [each])
        (resumed,) = await answered(bare, [replace(each, history=tuple(items(before)[:cut]))])
        assert items(alone) == items(before) and items(resumed) == items(before)[cut:]
        assert torch.equal(taps(alone), taps(before)) and torch.equal(taps(resumed), taps(before))
    for again in (False, True):
        found = await answered(wide, asked)
        assert list(map(items, found)) == list(map(items, beside))
        assert all(map(torch.equal, map(taps, found), map(taps, beside)))
        assert any(events[0].cached_rows for events in found) is again


def test_a_row_of_experts_has_the_same_bits_however_many_chose_the_same(dtype: torch.dtype, seed: int) -> None:
    weights = MIX.weights(seed, dtype)
    built = Experts(materials(MIX, weights, dtype), "layers.0.mlp", EXPERTS)
    generator = torch.Generator().manual_seed(seed)
    # The rows are alike enough to choose almost the same experts, and unlike enough to be told apart.
    x = (torch.randn(1, MIXED.hidden_size, generator=generator) + 0.1 * torch.randn(70, MIXED.hidden_size, generator=generator)).to(dtype)

    def computed(part: torch.Tensor, padding: int = 0) -> torch.Tensor:
        return built(rows_of(len(part), padding=padding), part)

    whole = computed(x)
    assert built._route(x)[1].unique(return_counts=True)[1].max() > 64
    for count in range(1, 70):
        assert torch.equal(computed(x[:count]), whole[:count]), count
        assert torch.equal(computed(x[-count:].flip(0)), whole[-count:].flip(0)), count
    padded = computed(torch.cat([x[:1], torch.randn(3, MIXED.hidden_size, generator=generator).to(dtype)]), padding=3)
    assert torch.equal(padded[:1], whole[:1])


def test_padding_is_given_to_no_expert(seed: int) -> None:
    """So a row that is decoded alone costs only the experts that it chose."""
    weights, x = PLAIN.weights(seed), torch.randn(4, MIXED.hidden_size, generator=torch.Generator().manual_seed(seed))
    made = Experts(materials(PLAIN, weights, torch.float32), "layers.0.mlp", UNSHARED)(rows_of(4, padding=3), x)
    assert bool(made[0].any()) and not made[1:].any()


def plain(activation: Activation) -> Callable[[Materials, int], FeedForward]:
    """Builds fc2(activation(fc1(x))) as the feed-forward of a layer."""

    def build(materials: Materials, layer: int) -> FeedForward:
        widths = (materials.config.hidden_size, materials.config.ffn_size, materials.config.hidden_size)
        computed = activated_product(materials, f"layers.{layer}", ("fc1", "fc2"), widths, activation)
        return lambda rows, x: computed(x)

    return build


def feed_forward(
    build: Callable[[Materials, int], FeedForward], hidden: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> FeedForward:
    """The feed-forward with random weights, and with products that keep their claims."""
    first, second = ("mlp.gate_proj", "mlp.up_proj", "fc1"), ("mlp.down_proj", "fc2")
    shapes = {**dict.fromkeys(first, (size, hidden)), **dict.fromkeys(second, (hidden, size))}
    drawn = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    weights = {f"layers.0.{name}.weight": value.to(dtype) for name, value in drawn.items()}
    config = replace(TINY, hidden_size=hidden, ffn_size=size)

    def built(linear: Linears) -> FeedForward:
        return build(Materials(config, weights.get, linear, ONE_RANK, dtype, torch.device("cpu")), 0)

    return build_exact(built, dtype, torch.device("cpu"))[0]


def test_activations_of_any_number_of_columns_are_the_same_in_any_company(dtype: torch.dtype, seed: int) -> None:
    """The processor takes 16 columns at a time, so some of 88 columns are left over: in the last row of a step, another one each time."""
    generator = torch.Generator().manual_seed(seed)
    built = feed_forward(plain(lambda x: functional.gelu(x, approximate="tanh")), 144, 88, dtype, generator)
    x, rows = torch.randn(40, 144, generator=generator).to(dtype), rows_of(40)
    whole = built(rows, x)
    for count in range(1, 40):
        assert torch.equal(built(rows, x[-count:]), whole[-count:]), count


@pytest.fixture
def threads() -> Iterator[None]:
    """As many threads as a large machine has."""
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("build", [swiglu, plain(functional.silu)], ids=["gated", "plain"])
def test_activations_on_several_threads_are_the_same_in_any_company(
    build: Callable[[Materials, int], FeedForward], threads: None, dtype: torch.dtype, seed: int
) -> None:
    """PyTorch divides the numbers of many rows among threads, at any place within a row."""
    generator = torch.Generator().manual_seed(seed)
    computed = feed_forward(build, 16, 1536, dtype, generator)
    x, rows = torch.randn(256, 16, generator=generator).to(dtype), rows_of(256)
    whole = computed(rows, x)
    for count in (4, 32, *range(80, 128)):
        assert torch.equal(computed(rows, x[:count]), whole[:count]), count


def test_what_is_added_behind_a_layer_changes_no_other_row() -> None:
    """Even the signs of zeros stay."""
    after = MIX.parts.after
    assert after is not None
    add = after(materials(MIX, MIX.weights(0), torch.float32))
    x = torch.full((2, MIXED.hidden_size), -0.0)
    has_given, given = torch.tensor([[True], [False]]), torch.ones(2, MIXED.given_width)
    given[1] = 0
    rows = rows_of(2, given_vectors=given, has_given=has_given)
    for layer in range(MIXED.layers):
        made = add(rows, x, layer)
        assert bool((made[0] == (1 if layer < STACKED else 0)).all()) and bool(made[1].signbit().all())


# Frames of many codes --------------------------------------------------------------------------------------------------------------------

CODEBOOKS, CODES = 16, 300
FRAMES = replace(TINY, codebooks=CODEBOOKS, further_ids=CODES)
TABLES = torch.randn(CODEBOOKS - 1, CODES, TINY.hidden_size, generator=torch.Generator().manual_seed(3)) * 0.2


def summed(materials: Materials) -> Enter:
    """The embeddings of all codes of a frame are added to one row."""
    return lambda rows, embedded: embedded + sum(functional.embedding(rows.items[:, 1 + n], table) for n, table in enumerate(TABLES))


class FollowingCodesHead(TokenHead):
    """The further codes of a frame follow from its first code."""

    def draw(self, *asked: Any) -> list[DrawnItem | None]:
        found = super().draw(*asked)
        return [one and DrawnItem((one.item[0], *((one.item[0] * 7 + n * 13) % CODES for n in range(1, CODEBOOKS)))) for one in found]


def frames_engine() -> Engine:
    decoder = PackedDecoder(FRAMES, tiny_weights(torch.float32), DecoderParts(entry=summed))
    assert all(torch.isfinite(result).all() for result in fixed_results(decoder, decoder.logits, RowAttention()))
    head, limits = FollowingCodesHead(decoder.logits), SchedulerLimits(max_rows=33)
    return close_later(Engine(decoder, head, pages=80, limits=limits, kept_pages=0, poison=True))


async def test_an_item_may_be_a_frame_of_many_codes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [np.concatenate([rng.integers(0, 500, (rows, 1)), rng.integers(0, CODES, (rows, CODEBOOKS - 1))], 1) for rows in (1, 9, 40)]
    asked = [SequenceRequest(Prompt(frames), seed + n, 30, DRAWN) for n, frames in enumerate(prompts)]
    engine, plain = frames_engine(), running(tiny_decoder())
    together = await answered(engine, asked)
    for each, found in zip(asked, together, strict=True):
        made = items(found)
        assert len(made) == 30 and {len(item) for item in made} == {CODEBOOKS}
        (alone,) = await answered(engine, [each])
        (rest,) = await answered(engine, [replace(each, history=tuple(made[:11]))])
        assert items(alone) == made and items(rest) == made[11:]
        frames = torch.from_numpy(each.prompt.items)
        rows = functional.embedding(frames[:, 0], cast(torch.Tensor, tiny_weights(torch.float32)("embed_tokens.weight")))
        rows = rows + sum(functional.embedding(frames[:, 1 + n], table) for n, table in enumerate(TABLES))
        said = SequenceRequest(replace(Prompt.of_tokens(frames[:, 0].tolist()), given=(Given(0, rows, b"x"),)), each.seed, 1, DRAWN)
        said = replace(said, seen_ids=frozenset(frames[:, 0].tolist()))
        assert items((await answered(plain, [said]))[0])[0][0] == made[0][0], "as of given sums"
    with pytest.raises(ValueError, match="not below 500 or 300"):
        engine.submit(SequenceRequest(Prompt(np.full((2, CODEBOOKS), CODES)), 0, 3))
    with pytest.raises(Unfit, match="codebooks behind the first must be below 300"):
        engine.submit(replace(asked[0], history=((1, *[CODES] * (CODEBOOKS - 1)),)))


# Taps, and decoders that are refused ----------------------------------------------------------------------------------------------------


def test_a_tap_may_be_what_comes_out_of_a_layer() -> None:
    """The tap is the output of the layer before the last one; the last layer and the norm make the last row of it."""
    rows = StepRows(torch.arange(4)[:, None], torch.arange(4)[None], taps=True)
    decoders = [PackedDecoder(TINY, tiny_weights(torch.float32), DecoderParts(tap=hidden_of(layer))) for layer in (0, 1)]
    first, last = (decoder.hidden(rows, lambda layer, queries, keys_values: queries.flatten(1)) for decoder in decoders)
    assert first.taps is not None and last.taps is not None
    assert not torch.equal(first.taps, last.taps)
    assert torch.equal(functional.rms_norm(last.taps, (TINY.hidden_size,), eps=TINY.norm_eps), last.last)
    with pytest.raises(ValueError, match="a tap of layer 2: this decoder has layers 0 to 1"):
        PackedDecoder(TINY, tiny_weights(torch.float32), DecoderParts(tap=hidden_of(2)))


async def test_taps_are_the_hidden_states_of_transformers() -> None:
    """The hidden states of Transformers lack the vectors that are added after the first layers. The other tap is the hidden state of a row
    with a given vector, and the embedding of any other row."""
    weights, asked = PLAIN.weights(SEED), requests(PLAIN, SEED, (33, 70), 8)
    reference = mixed_reference(weights)
    for index in range(MIXED.layers + 1):
        for tap, is_mixed in ((hidden_state(index), False), (embedding_or_hidden(index), True)):
            engine = running(replace(PLAIN, parts=replace(PLAIN.parts, tap=tap)).decoder(SEED))
            for each, events in zip(asked, await answered(engine, asked), strict=True):
                ids, is_seen, states = mixed_states(reference, weights, each.prompt, [item[0] for item in items(events)])
                wanted, found = states[index], taps(events)
                if is_mixed:
                    wanted = torch.where(is_seen[:, None], wanted, functional.embedding(ids, weights["embed_tokens.weight"]))
                torch.testing.assert_close(found, wanted[: len(found)], atol=1e-5, rtol=1e-5)


def test_sizes_of_experts_and_of_given_vectors_that_cannot_be_are_told() -> None:
    for chosen in (0, 8):
        with pytest.raises(ValueError, match=f"a row cannot be given to {chosen} of 7 experts"):
            experts(ExpertSizes(experts=7, experts_per_row=chosen, size=8, normalized=True))
    narrow = replace(MIX, config=replace(MIXED, given_width=MIXED.hidden_size))
    with pytest.raises(ValueError, match="given_width is 100, and for 2 layers it is 300"):
        narrow.decoder(1)
    assert TAPPED.after is None
