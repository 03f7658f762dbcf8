"""A transformer over two processes: it draws what one draws, and whoever of them ends, all do, soon and with a reason."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import lengths
from helpers.drawings import checkpoint
from helpers.painting import PipelinePair, beside, picture
from helpers.waiting import until
from omnistage.engine.devices import Distributed, RanksApart
from omnistage.models.diffusers import loading
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.loading import load_pictures
from omnistage.models.diffusers.options import DiffusersOptions
from omnistage.models.diffusers.placement import PIPELINES, MemoryPlan, cut_weights, place_pipeline, team_of
from omnistage.models.interface import BadRequest, DrawRequest, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import Team
from omnistage.models.reports import LoadError

SAME = 1e-4
SOON_S = 10.0
FAMILY = {"condition_area": 64 * 64}
NAMES = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered")
CASES = {f"{name} {share or 'weights'}": (name, share) for name in NAMES for share in ("", "ulysses")}


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    checkpoint("qwen-image")  # Its folder is not to be among those that stay behind.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that ended a thread of this process, as they would end a server."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda each: told.append(f"{each.exc_type.__name__}: {each.exc_value}"))
    return told


@contextmanager
def pair_of(name: str, size: int = 1, share: str = "") -> Iterator[tuple[PipelinePair, Team | None]]:
    """A painter whose transformer is spread so; nothing of it runs afterwards."""
    folder = checkpoint(name)
    family = {**FAMILY, "context_parallel": share}
    options = LoadOptions(dtype="float32", tensor_parallel_size=size, family=family)
    memory = MemoryPlan.of(DiffusersOptions.from_settings(dict(family)), options, torch.float32)
    team = team_of(folder, options)
    processes = team.processes if team else ()
    try:
        yield beside(name, folder, place_pipeline(load_pipeline(folder, torch.float32), memory, team), memory.options), team
    finally:
        if team:
            team.close()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def drawn(pair: PipelinePair) -> list[torch.Tensor]:
    """Two pictures in shared steps, the words of one of them unlike in length."""
    images = [picture(3, 64, 64)] * min(pair.edits, 1)
    plans = [pair.plan(words, images, steps=3, guidance_scale=3.0, seed=5) for words in ("a red circle", "two small houses by the sea")]
    return [canvas.latents for canvas in pair.drawn(*plans)]


@lengths.one_or_all("case", CASES)
def test_two_ranks_draw_what_one_draws(case: str, seed: int) -> None:
    name, share = CASES[lengths.draw(case, CASES, seed)]
    with pair_of(name) as (alone, _):
        expected = drawn(alone)
    with pair_of(name, 2, share) as (pair, _):
        found = drawn(pair)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=SAME, atol=SAME)


def test_a_part_has_half_of_the_weights_that_are_cut() -> None:
    whole: Any = load_pipeline(checkpoint("qwen-image"), torch.float32)
    part: Any = load_pipeline(checkpoint("qwen-image"), torch.float32)
    cut_weights(part.transformer, Distributed(1, 2))
    block, other = whole.transformer.transformer_blocks[0], part.transformer.transformer_blocks[0]
    assert torch.equal(other.attn.to_q.weight, block.attn.to_q.weight[len(block.attn.to_q.weight) // 2 :])
    assert other.attn.to_q.weight.untyped_storage().nbytes() == block.attn.to_q.weight.nbytes // 2
    assert other.img_mlp.net[2].weight.shape[1] * 2 == block.img_mlp.net[2].weight.shape[1]
    assert other.img_mlp.net[2].bias is None
    assert torch.equal(other.img_mod[1].weight, block.img_mod[1].weight)


@lengths.long_form(unkept="a killed rank ends the picture that is being drawn, and a thread")
@lengths.one_or_all("share", {"weights": "", "tokens": "ulysses"})
def test_a_rank_that_is_killed_ends_the_picture_and_a_thread(share: str, ended: list[str], seed: int) -> None:
    with pair_of("qwen-image", 2, "ulysses" if lengths.draw(share, {"weights": "", "tokens": "ulysses"}, seed) == "tokens" else "") as made:
        pair, team = made
        assert team is not None
        plan = pair.plan("a red circle", steps=200, guidance_scale=3.0)
        begun = time.monotonic()
        killing = threading.Timer(0.3, os.kill, (team.processes[0], signal.SIGKILL))
        killing.start()
        with pytest.raises(RanksApart, match=r"^rank 1 ended with signal SIGKILL; its standard error says why"):
            pair.drawn(plan)
        with pytest.raises(RanksApart, match=r"^rank 1 ended with signal SIGKILL"):
            pair.drawn(plan)
        while not ended and time.monotonic() - begun < SOON_S:
            time.sleep(0.01)
        assert time.monotonic() - begun < SOON_S
        assert any("RanksApart: rank 1 ended with signal SIGKILL" in told for told in ended)


@lengths.long_form(unkept="an error within a pass ends the other rank, and one before it does not")
@pytest.mark.parametrize("share", ["ulysses", pytest.param("", marks=lengths.LONG)])
def test_too_few_tokens_to_share_fail_alone_and_an_error_within_a_pass_ends_the_other(
    share: str, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank then waits in the middle of a pass, and would take the next one for the rest of it."""
    with pair_of("qwen-image", 2, share) as (pair, team):
        assert team is not None
        if share:
            with pytest.raises(ValueError, match="1 tokens of hidden_states cannot be shared by 2 ranks: draw it larger, or say more"):
                pair.pipe.transformer(hidden_states=torch.zeros(1, 1, 64), encoder_hidden_states=torch.zeros(1, 5, 32))
        assert drawn(pair) and not ended

        def no_room(*arguments: Any, **named: Any) -> Any:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(pair.pipe.transformer.transformer_blocks[1], "forward", no_room)
            with pytest.raises(RanksApart, match=r"this rank failed within a step of 2 ranks: MemoryError\('no room'\)"):
                drawn(pair)
        with pytest.raises(RanksApart, match="this rank failed"):
            drawn(pair)
        begun = time.monotonic()
        # The thread that watches the ranks ends this process, and is to have said so before the test is over.
        while (Path(f"/proc/{team.processes[0]}/exe").exists() or not ended) and time.monotonic() - begun < SOON_S:
            time.sleep(0.01)
        assert time.monotonic() - begun < SOON_S


@lengths.long_form(
    "models/diffusers/test_spread.py::test_two_ranks_draw_what_one_draws",
    unkept="a served model tells its ranks, refuses a step cache and ends them with it",
)
async def test_a_model_of_two_ranks_is_served_and_ends_both(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(dtype="float32", tensor_parallel_size=2, family=FAMILY)
    team = team_of(checkpoint("qwen-image"), options)
    assert team is not None
    monkeypatch.setattr(loading, "team_of", lambda *_: team)
    (process,) = team.processes
    model = load_pictures(checkpoint("qwen-image"), options)
    try:
        assert model.info.settings["ranks"] == "2, each with a part of the weights of the transformer"
        with pytest.raises(BadRequest, match="step_cache"):
            await model.prepare(DrawRequest(seed=1, prompt="x", width=64, height=64, steps=2, step_cache=0.5))
        plan = await model.prepare(DrawRequest(seed=1, prompt="a red circle", width=64, height=64, steps=200))
        with pytest.raises(RanksApart, match=r"^rank 1 ended with signal SIGKILL"):
            async with aclosing(model.draw(plan, inputs_of(), {"image": 0, "progress": 0})) as pieces:
                async for _ in pieces:
                    os.kill(process, signal.SIGKILL)
        await until(lambda: bool(ended))
    finally:
        await model.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_who_cannot_be_spread_says_who_can() -> None:
    for name in ("z-image", "longcat-image"):
        with pytest.raises(LoadError, match=rf"tensor_parallel_size 2: a \w+ computes on one device.*spread: {', '.join(PIPELINES)}"):
            load_pictures(checkpoint(name), LoadOptions(tensor_parallel_size=2))


@lengths.drawn_cells(
    2,
    ("size", "family", "told"),
    [
        (3, {}, r"tensor_parallel_size 3: does not divide the 2 heads of this transformer; it can be 1 or 2"),
        (0, {}, r"tensor_parallel_size 0: there is at least one rank"),
        (1, {"context_parallel": "ulysses"}, r"option context_parallel ulysses: give tensor_parallel_size, the number of ranks, with it"),
        (2, {"storage": "float8_e5m2"}, r"tensor_parallel_size 2 and option storage float8_e5m2 exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(size: int, family: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        load_pictures(checkpoint("qwen-image"), LoadOptions(tensor_parallel_size=size, family=family))


@lengths.long_form(unkept="an error of the other rank as it loads is told in its words")
def test_what_the_other_rank_cannot_load_is_told() -> None:
    options = LoadOptions(dtype="float16", tensor_parallel_size=2, family={**FAMILY, "width": -1})
    team = team_of(checkpoint("qwen-image"), options)
    assert team is not None
    try:
        with pytest.raises(LoadError, match=r"^rank 1 of 2: LoadError: option width is -1"):
            team.connect(torch.device("cpu"))
    finally:
        team.close()
