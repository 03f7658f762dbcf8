"""Every field of Open, changed at random, on a stage alone and on one with the rest of the chain behind it: a typed end, nothing held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.mistreated import Mistreated, end_of, mistreated
from helpers.mutation import changed
from helpers.run import code_chunks, params, row_chunks
from helpers.servers import KINDS
from helpers.stage import ROWS
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2

FRAMES = formulas.frames(ROWS)
INPUT = {"talker": row_chunks("hidden", ROWS, [3, 5]), "code2wav": code_chunks(FRAMES, [7, 9])}


@pytest.fixture(scope="module")
def house() -> Iterator[Mistreated]:
    with mistreated() as opened:
        yield opened


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 22, segment_bytes=1 << 18)
    assert arena is not None
    yield arena
    arena.close()


def hop(house: Mistreated, kind: str, port: str) -> stage_pb2.Hop:
    stage = house.stages[kind]
    return stage_pb2.Hop(
        kind=stage.description.kind,
        model=stage.description.model,
        addresses=[stage.address],
        params=params(kind),
        takes=[port],
        checkpoints=["codes"] if kind == "talker" else [],
    )


def held(*ports: str) -> stage_pb2.Resume:
    """The items of each port that a caller may hold: about four tokens, frames and so on."""
    resume = stage_pb2.Resume()
    for port in ports:
        resume.positions.add(port=port, seq=2, first=4)
        if port == "text":
            words = chunk_pb2.TextChunk(text="a b c d ", token_ids=[1, 2, 3, 4])
            resume.history.add(port=port, count=4, text=words)
        elif port == "codes":
            resume.history.add(port=port, count=4, codes=chunk_pb2.CodeChunk(codes=FRAMES[:4].ravel().tolist(), codebook_count=4))
    return resume


def openings(house: Mistreated, kind: str, arena: Arena) -> list[stage_pb2.Open]:
    """Good ones to begin with: new, going on, with memory to offer, with a route, and with a route and going on."""
    stage = house.stages[kind]
    own = {"thinker": ("text", "hidden"), "talker": ("codes",), "code2wav": ("audio",), "diffusion": ("image", "progress")}[kind]
    sender = Sender(arena)
    opens = [stage.open(), stage.open(resume=held(*own)), stage.open(offers=sender.offers(), attempts=[1, 2], revision="1")]
    sender.close(clean=True)
    if kind in ("thinker", "talker"):
        route = [hop(house, "talker", "hidden"), hop(house, "code2wav", "codes")][kind == "talker" :]
        checkpoints = ["text"] if kind == "thinker" else ["codes"]
        fields = {"route": route, "credits": {"text": 1 << 20, "audio": 1 << 20}, "checkpoints": checkpoints, "attempts": [0]}
        compact = ("text", "codes", "audio")[kind == "talker" :]
        opens += [stage.open(**fields), stage.open(**fields, resume=held(*compact))]
    return opens


@lengths.rounds(200, 750)
@lengths.drawn_cells(1, "kind", KINDS)
def test_any_field_of_open(house: Mistreated, arena: Arena, kind: str, rounds: int) -> None:
    """The caller then sends good input and half-closes, so the stage has no reason to wait."""
    opens = openings(house, kind, arena)
    words = ["text", "hidden", "codes", "audio", "image", "1", "session-1", f"toy-{kind}", "toy-talker", "png", "user", "balanced", "toy"]
    words += [house.stages[name].address for name in ("talker", "code2wav")] + ["10.0.0.1:1"]
    reasons: Counter[str] = Counter()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None)
    @given(opening=st.sampled_from(opens).flatmap(lambda opening: changed(opening, words)))
    def play(opening: stage_pb2.Open) -> None:
        _keep_short(opening)
        if opening.route and not any(credit.port == "audio" for credit in opening.credits):
            del opening.credits[:]  # A stage does not know that no other one has a port "a", and waits for it to the end of its time.
        steps = [stage_pb2.RunRequest(open=opening).SerializeToString()]
        steps += [stage_pb2.RunRequest(chunk=chunk).SerializeToString() for chunk in INPUT.get(kind, [])]
        reasons[house.play(end_of(house.run(kind), steps)) or "OK"] += 1

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["OK"] and reasons["BAD_REQUEST"], "the fields are changed too little or too much"


def _keep_short(opening: stage_pb2.Open) -> None:
    """A good request for 32,000 tokens takes its time."""
    for each in [opening.params, *(hop.params for hop in opening.route)]:
        if each.HasField("thinker") and each.thinker.max_tokens > 300:
            each.thinker.ignore_eos = False
        if each.HasField("diffusion"):
            each.diffusion.steps = min(each.diffusion.steps, 20) if each.diffusion.steps <= 1000 else each.diffusion.steps
            if max(each.diffusion.width, each.diffusion.height) <= 1024:
                each.diffusion.width, each.diffusion.height = 16, 16


def test_the_input_is_good(house: Mistreated) -> None:
    """Else nothing above would come far."""
    for kind, chunks in INPUT.items():
        steps = [stage_pb2.RunRequest(open=house.stages[kind].open()), *[stage_pb2.RunRequest(chunk=chunk) for chunk in chunks]]
        heard: list[stage_pb2.RunResponse] = []
        assert house.play(end_of(house.run(kind), [step.SerializeToString() for step in steps], heard)) == ""
        if kind == "talker":
            codes = [code for message in heard for code in message.chunk.codes.codes]
            np.testing.assert_array_equal(codes, FRAMES.ravel())
