"""Every row of the Thinker is given to the experts that Transformers chooses for it, with the same weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from helpers import lengths
from helpers.models import text_pieces
from helpers.omni_parity import turns
from helpers.omni_reference import Qwen3Reference
from helpers.qwen3_checkpoint import VARIANTS, made
from omnistage.engine.parts import Experts
from omnistage.models.interface import TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.thinker import load_thinker

TOKENS = 8
SEED = 5
"""Where two experts are almost equally good for a row, rounding would now and then choose the other one: so all is always the same."""
KINDS = ("long text", "images", "audio", "sound in video")


def spread(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """The weight of every expert, 0 where it was not chosen: [rows, experts]."""
    return torch.zeros(len(weights), experts).scatter_(1, chosen, weights)


@lengths.one_or_all("variant", VARIANTS)
async def test_rows_are_given_to_the_experts_that_transformers_chooses(
    variant: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer, of prompts with media of all kinds and of their answers; read in pieces."""
    folder = made(tmp_path, lengths.draw(variant, VARIANTS, seed), SEED)
    model = load_thinker(folder, LoadOptions(path=folder, dtype="float32", enable_cache=False, max_batch_tokens=50))
    reference, source, config = Qwen3Reference(folder), random.Random(SEED), model.config
    here, rows, there = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    route = Experts._route

    def noted(self: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made_here = route(self, x)
        here.append(spread(*made_here, config.experts.experts))
        rows.append(x)
        return made_here

    monkeypatch.setattr(Experts, "_route", noted)
    gates = [layer.mlp.gate for layer in reference.model.model.language_model.layers]
    for gate in gates:
        gate.register_forward_hook(lambda gate, given, out: there.append(spread(out[1], out[2], config.experts.experts)))
    for kind in KINDS:
        for noted_before in (here, rows, there):
            noted_before.clear()
        conversation = turns(kind, source, least_s=1.05)
        pieces = await text_pieces(model, TextRequest(conversation, seed=0, max_tokens=TOKENS, ignore_eos=True))
        said = [token_id for piece in pieces for token_id in piece.token_ids]
        ids, inputs = reference.inputs(conversation, await reference.read(conversation))
        ids = torch.cat([ids, torch.tensor([said[:-1]])], 1)
        with torch.inference_mode():
            reference.model(ids, attention_mask=torch.ones_like(ids), **inputs)
        assert len(there) == len(gates) and len(here) % len(gates) == 0
        for layer, expected in enumerate(list(there)):
            found = torch.cat(here[layer :: len(gates)])
            assert torch.equal(found > 0, expected > 0), (kind, layer)
            assert ((found > 0).sum(1) == config.experts.chosen).all()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            with torch.inference_mode():
                _, weights, chosen = gates[layer](torch.cat(rows[layer :: len(gates)]))
            # Both are computed from the same rows, without the differences by rounding in the layers before.
            torch.testing.assert_close(found, spread(weights, chosen, config.experts.experts), atol=1e-5, rtol=0)
    await model.close()
