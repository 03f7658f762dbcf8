"""The decoder, with our cache and our loop, gives the tokens of Transformers' own `generate`, and rotates rows as its layers do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from transformers import (
    Qwen2_5OmniTalkerConfig,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import apply_rotary_pos_emb

from helpers.engines import items, make_engine, read
from omnistage.engine.decoder import DecoderParts, Enter, PackedDecoder
from omnistage.engine.parts import DecoderConfig, Materials, contiguous_axes, head_rms_norm, rotary
from omnistage.engine.request import Given, Prompt, SequenceRequest

Thinker = Qwen2_5OmniThinkerForConditionalGeneration
Talker = Qwen2_5OmniTalkerForConditionalGeneration

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SIZES = DecoderConfig(layers=3, hidden_size=64, ffn_size=96, query_heads=4, kv_heads=2, vocab_size=300, context=512, norm_eps=1e-6)


def thinker() -> Thinker:
    """A small random Thinker with biases that are not zero; equal weights for every call."""
    config = Qwen2_5OmniThinkerConfig(  # type: ignore[call-arg]  # The class takes more than its annotations say.
        text_config={**SMALL, "rope_parameters": THREE_AXES, "tie_word_embeddings": False},
        audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64},
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
        audio_token_index=290,
        image_token_index=291,
        video_token_index=292,
        audio_start_token_id=293,
        vision_start_token_id=294,
        vision_end_token_id=295,
        attn_implementation="sdpa",
    )
    torch.manual_seed(3)
    model = Thinker(config).eval()
    for name, value in model.model.language_model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.3)
        elif "proj" in name:
            torch.nn.init.normal_(value, std=0.15)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return cast(Thinker, model)


def weights_of(model: Thinker) -> dict[str, torch.Tensor]:
    """The weights by the decoder's names."""
    weights: dict[str, torch.Tensor] = model.model.language_model.state_dict()
    return weights | {"lm_head.weight": model.lm_head.weight.detach()}


async def check_answers(decoder: PackedDecoder, oracle: Thinker | Qwen3ForCausalLM, prompts: list[list[int]]) -> None:
    """Greedy tokens are those of Transformers."""
    engine, count = make_engine(decoder, 60, max_rows=64), 40
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = oracle.generate(  # type: ignore[misc]  # A mixin whose self is annotated as another class.
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        events = await read(engine.submit(SequenceRequest(Prompt.of_tokens(prompt), 0, count)))
        assert [item[0] for item in items(events)] == whole[0, len(prompt) :].tolist()


async def test_greedy_tokens_are_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    oracle = thinker()
    decoder = PackedDecoder(SIZES, weights_of(oracle).get)
    await check_answers(decoder, oracle, [[rng.randrange(280) for _ in range(length)] for length in (1, 2, 31, 32, 33, 64, 150)])


def qwen3() -> Qwen3ForCausalLM:
    """A small random Qwen3: heads are wider than hidden size over heads, and queries and keys have norms. Equal weights for every call."""
    config = Qwen3Config(  # type: ignore[call-arg]  # The class takes more than its annotations say.
        **SMALL,
        head_dim=48,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(4)
    model = Qwen3ForCausalLM(config).eval()
    for name, value in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.uniform_(value, 0.5, 2.0)
        elif "proj" in name or "lm_head" in name:
            torch.nn.init.normal_(value, std=0.3)
    return cast(Qwen3ForCausalLM, model)


async def test_greedy_tokens_of_qwen3_are_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    oracle = qwen3()
    sizes = replace(SIZES, head_size=48)
    weights = oracle.model.state_dict() | {"lm_head.weight": oracle.lm_head.weight.detach()}
    decoder = PackedDecoder(sizes, weights.get, DecoderParts(head_norm=head_rms_norm))
    assert decoder.spec.head_size == 48 != SIZES.hidden_size // SIZES.query_heads
    await check_answers(decoder, oracle, [[rng.randrange(300) for _ in range(length)] for length in (1, 33, 100)])


NOTHING = 300
"""The id of a row that has no code: its embedding is zero."""


def talker() -> Talker:
    """A small random Talker, whose rows are wider than its layers; equal weights for every call."""
    config = Qwen2_5OmniTalkerConfig(  # type: ignore[call-arg]  # The class takes more than its annotations say.
        **SMALL, embedding_size=80, head_dim=16, rope_parameters=THREE_AXES, attn_implementation="sdpa"
    )
    torch.manual_seed(5)
    model = Talker(config).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias") or "proj" in name or "codec_head" in name:
            torch.nn.init.normal_(value, std=0.3)
    return cast(Talker, model)


async def test_codes_of_a_talker_are_those_of_transformers(seed: int) -> None:
    """The row of a code is its embedding plus a row of the reply, projected. Only the last two rows of the prompt have a code."""
    oracle, count = talker(), 30
    embedding = oracle.model.embed_tokens.weight.detach()
    weights = oracle.model.state_dict() | {
        "embed_tokens.weight": torch.cat([embedding, torch.zeros(1, 80)]),
        "lm_head.weight": oracle.codec_head.weight.detach(),
    }

    def entry(materials: Materials) -> Enter:
        project = materials.linear(oracle.thinker_to_talker_proj.weight.detach(), oracle.thinker_to_talker_proj.bias.detach())
        return lambda rows, embedded: project(embedded if rows.given_vectors is None else embedded + rows.given_vectors)

    decoder = PackedDecoder(replace(SIZES, vocab_size=301, embedding_width=80, given_width=80), weights.get, DecoderParts(entry=entry))
    engine = make_engine(decoder, 60, max_rows=64)
    generator = torch.Generator().manual_seed(seed)
    for length in (2, 33, 70):
        prompt, reply = torch.randn(length, 80, generator=generator), torch.randn(20, 80, generator=generator)
        ids = np.array([NOTHING] * (length - 2) + [7, 8], np.int64)
        stream = engine.submit(SequenceRequest(Prompt(ids[:, None], (Given(0, prompt, b"reply"),)), 0, count, appended=True))
        stream.append(reply, end=True)
        made = [item[0] for item in items(await read(stream))]
        rows = torch.cat([prompt, reply, reply[-1:].expand(count, -1)])[: length + count - 1]
        codes = torch.tensor([*ids, *made[:-1]])
        x = functional.embedding(codes, weights["embed_tokens.weight"]) + rows
        with torch.no_grad():
            hidden = oracle.model(inputs_embeds=oracle.thinker_to_talker_proj(x)[None]).last_hidden_state[0, length - 1 :]
            assert made == oracle.codec_head(hidden).argmax(-1).tolist()


def test_components_of_a_head_turn_by_their_axis_as_in_transformers(seed: int) -> None:
    model, sections = thinker(), DecoderParts(rope=rotary(axis_of_pair=contiguous_axes((2, 3, 3))))
    decoder = PackedDecoder(SIZES, weights_of(model).get, sections)
    assert decoder.spec.axes == 3
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 512, (3, 20), generator=generator)
    given = torch.randn(20, 4 + 2 + 2, 16, generator=generator)
    turned = given.clone()
    decoder._parts.rope(positions)(turned)
    rotations = model.model.language_model.rotary_emb(given, positions[:, None])
    queries, keys = apply_rotary_pos_emb(given[None, :, :4].transpose(1, 2), given[None, :, 4:6].transpose(1, 2), *rotations)
    torch.testing.assert_close(turned[:, :4], queries[0].transpose(0, 1) * 16**-0.5)
    torch.testing.assert_close(turned[:, 4:6], keys[0].transpose(0, 1))
    assert torch.equal(turned[:, 6:], given[:, 6:])


def test_sections_that_are_no_head_are_refused() -> None:
    with pytest.raises(ValueError, match="the sections of positions are 9 pairs of components, and a head has 8"):
        PackedDecoder(SIZES, weights_of(thinker()).get, DecoderParts(rope=rotary(axis_of_pair=contiguous_axes((2, 3, 4)))))
