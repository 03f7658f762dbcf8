"""The fixed sequence from which a revision is made passes through every weight and every form of attention."""

from __future__ import annotations

import pytest
import torch

from helpers import lengths
from helpers.tiny import TINY, tiny_decoder, tiny_weights
from omnistage.engine import results as engine_results
from omnistage.engine.attention import PagedAttention, RowAttention
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.results import FIXED_ROWS, fixed_results

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WEIGHTS = ("embed_tokens.weight", "lm_head.weight", *(f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in LAYER))


def results(decoder: PackedDecoder) -> list[torch.Tensor]:
    """The results that were computed."""
    return fixed_results(decoder, decoder.logits, RowAttention())[1:]


def test_another_revision_of_the_engine_gives_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """So every model on another engine has another revision."""
    decoder = tiny_decoder()
    before = fixed_results(decoder, decoder.logits, RowAttention())
    monkeypatch.setattr(engine_results, "REVISION", engine_results.REVISION + 1)
    after = fixed_results(decoder, decoder.logits, RowAttention())
    assert not torch.equal(before[0], after[0]) and all(map(torch.equal, before[1:], after[1:]))


def test_it_is_read_as_a_prompt_is_and_its_last_row_alone() -> None:
    decoder = tiny_decoder()
    rows = [len(result) for result in results(decoder)]
    assert rows == [count for count in (PAGE_ROWS, PAGE_ROWS, FIXED_ROWS % PAGE_ROWS, 1) for _ in ("hidden", "logits")]
    assert all(bool(torch.isfinite(result).all()) for result in results(decoder))
    assert all(map(torch.equal, results(decoder), results(tiny_decoder())))


@lengths.drawn_cells(6, "name", WEIGHTS)
def test_every_weight_shows_in_it(name: str) -> None:
    original = tiny_weights(torch.float32)

    def changed(asked: str) -> torch.Tensor | None:
        weight = original(asked)
        return weight * 1.001 if weight is not None and asked == name else weight

    assert not all(map(torch.equal, results(PackedDecoder(TINY, changed)), results(tiny_decoder())))


def test_attention_shows_in_every_run() -> None:
    class Shifted(PagedAttention):
        """The same without the last page that a row sees."""

        def bind(self, cache, spec, plan):
            attend = super().bind(cache, spec, plan)
            return lambda *args: attend(*args) * (1.0 if plan.runs[0].start else 1.001)

    decoder = tiny_decoder()
    plain, shifted = (fixed_results(decoder, decoder.logits, backend)[1:] for backend in (PagedAttention(), Shifted()))
    assert not any(map(torch.equal, plain, shifted)), "what the first page became is seen by all that follow"
