"""A stage that resumes goes on exactly where it is told: what it gives is the end of what an undisturbed run gives, at any cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import lengths
from helpers.logic import LogicOutput, history_of_codes, history_of_text, pieces_of, run_logic, start_at
from helpers.run import params
from helpers.servers import family_logic, toy_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import DIFFERENCE
from omnistage.stage.logic import Input, StageLogic, Start
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

HAS_SMOL = find_spec("omnistage.models.smol") is not None and find_spec("torch") is not None
SMOL = [pytest.mark.skipif(not HAS_SMOL, reason="the models extra is not installed")]

CUTS = 60
PROMPT = "How far is it?"
SPOKEN = "Hello there, and good morning. It is a fine day, is it not? We shall go for a long walk by the sea."
TEXT = Input("text", 0, 4, True, chunk_pb2.TextChunk(text=SPOKEN, token_ids=[1, 2, 3, 4]))
STOP = chunk_pb2.FINISH_REASON_STOP


KEPT: dict[str, StageLogic] = {}
"""Stages of the default model by kind. Each is loaded once: event loops come and go, and it holds nothing between two tests."""


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    yield
    while KEPT:
        asyncio.run(KEPT.popitem()[1].close())


@asynccontextmanager
async def loaded(family: str, kind: str, options: Mapping[str, object] | None = None) -> AsyncIterator[StageLogic]:
    if family != "toy":
        yield KEPT.get(kind) or KEPT.setdefault(kind, family_logic(family, kind))
        return
    logic = family_logic(family, kind, options)
    yield logic
    await logic.close()


def toy_rows(seed: int, length: int = formulas.NATURAL_LENGTH) -> NDArray[np.float32]:
    return np.stack([formulas.row(formulas.token(seed, PROMPT, n)) for n in range(length)])


def equal(got: NDArray[np.generic] | None, expected: NDArray[np.generic] | None, first: int) -> bool:
    """Whether `got` is `expected` from row `first` on."""
    if got is None or expected is None:
        return expected is None or len(expected) == first
    return np.array_equal(got, expected[first:])


# Thinker ----------------------------------------------------------------------------------------------------------------------------------


def text_of_tokens(whole: LogicOutput) -> Callable[[int], str]:
    """How much text an undisturbed toy Thinker had given with its first n tokens."""
    words = whole.text().split(" ")
    return lambda n: "".join(f"{word} " for word in words[:n])


@pytest.mark.parametrize("verbatim", ["", "one two three four five six seven"])
async def test_a_thinker_goes_on_at_any_token_and_any_row(seed: int, verbatim: str):
    rng = random.Random(seed)
    async with loaded("toy", "thinker") as logic:
        asked = params("thinker", PROMPT, verbatim=verbatim)
        whole = await run_logic(logic, asked)
        tokens, before = whole.tokens(), text_of_tokens(whole)
        for _ in range(CUTS):
            text = rng.randrange(len(tokens))
            row = rng.randint(0, text)
            made = await run_logic(logic, asked, start=start_at({"hidden": row}, history_of_text(tokens[:text])))
            assert made.tokens() == tokens[text:]
            assert before(text) + made.text() == whole.text()
            assert made.finish_reasons() == whole.finish_reasons()
            assert equal(made.rows("hidden"), whole.rows("hidden"), row)
            assert made.ended() == ["text", "hidden"]


async def test_a_thinker_gives_text_before_the_rows_of_the_same_tokens():
    """A token is with the caller before anybody can have made something from its row."""
    async with loaded("toy", "thinker") as logic:
        asked = params("thinker", PROMPT)
        tokens = (await run_logic(logic, asked)).tokens()
        for known in (0, 5):
            made = await run_logic(logic, asked, start=start_at({"hidden": 3 if known else 0}, history_of_text(tokens[:known])))
            reached = {"text": known, "hidden": 3 if known else 0}
            for output in made.outputs:
                reached[output.port] += output.count
                assert reached["hidden"] <= reached["text"]


@pytest.mark.parametrize("row", [0, 1, 11, 24])
async def test_a_thinker_whose_text_has_ended_gives_only_rows(row: int):
    async with loaded("toy", "thinker") as logic:
        asked = params("thinker", PROMPT)
        whole = await run_logic(logic, asked)
        start = start_at({"hidden": row}, history_of_text(whole.tokens(), STOP), ended=["text"])
        made = await run_logic(logic, asked, start=start)
        assert made.of("text") == []
        assert equal(made.rows("hidden"), whole.rows("hidden"), row)
        assert made.ended() == ["hidden"]


async def test_a_thinker_whose_rows_have_ended_gives_only_text():
    async with loaded("toy", "thinker") as logic:
        asked = params("thinker", PROMPT)
        tokens = (await run_logic(logic, asked)).tokens()
        made = await run_logic(logic, asked, start=start_at({"hidden": 4}, history_of_text(tokens[:4]), ended=["hidden"]))
        assert made.tokens() == tokens[4:]
        assert made.ended() == ["text"]


@pytest.mark.parametrize("family", ["toy", pytest.param("smol", marks=SMOL)])
async def test_a_thinker_that_has_said_all_gives_nothing(family: str):
    async with loaded(family, "thinker") as logic:
        start = start_at({"hidden": 2}, history_of_text([1001, 1002], STOP), ended=["text", "hidden"])
        assert (await run_logic(logic, params("thinker", PROMPT), start=start)).outputs == []


@pytest.mark.skipif(not HAS_SMOL, reason="the models extra is not installed")
async def test_the_default_thinker_goes_on_at_any_token(seed: int):
    async with loaded("smol", "thinker") as logic:
        asked = params("thinker", PROMPT, max_tokens=12, sampling=stage_pb2.Sampling(temperature=1), logprobs=True, ignore_eos=True)
        whole = await run_logic(logic, asked, seed=seed)
        tokens = whole.tokens()
        starts = [start_at({}, history_of_text(tokens[:known])) for known in range(len(tokens))]
        rests = await asyncio.gather(*(run_logic(logic, asked, start=start, seed=seed) for start in starts))
        for known, made in enumerate(rests):
            assert made.tokens() == tokens[known:]
            assert whole.text().endswith(made.text())
            assert made.ended() == ["text"]


# Talker -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 30])
async def test_a_talker_goes_on_at_any_frame(seed: int, limit: int):
    rng = random.Random(seed)
    rows = toy_rows(seed)
    async with loaded("toy", "talker") as logic:
        asked = params("talker", max_frames=limit)
        whole = await run_logic(logic, asked, pieces_of("hidden", rows, rng))
        codes = whole.rows("codes")
        assert codes is not None and len(codes) == (limit or 2 * len(rows))
        for _ in range(CUTS):
            cut = rng.randrange(len(codes))
            start = start_at({}, history_of_codes(codes[:cut].astype(np.uint32)))
            made = await run_logic(logic, asked, pieces_of("hidden", rows, rng), start)
            assert equal(made.rows("codes"), codes, cut)
            assert made.ended() == ["codes"]
            assert made.kept == []


async def test_a_talker_that_differs_leaves_one_splice(seed: int):
    """It has the same revision, so nothing can refuse it; what was heard before stays, and the rest is its own."""
    rng = random.Random(seed)
    rows = toy_rows(seed)
    async with loaded("toy", "talker") as usual, loaded("toy", "talker", {"differs": True}) as other:
        assert usual.description.revision == other.description.revision
        codes = formulas.frames(rows)
        made = await run_logic(other, params("talker"), pieces_of("hidden", rows, rng), start_at({}, history_of_codes(codes[:17])))
        assert equal(made.rows("codes"), (codes + DIFFERENCE) % 1024, 17)


@pytest.mark.skipif(not HAS_SMOL, reason="the models extra is not installed")
async def test_the_default_talker_goes_on_at_any_frame(seed: int):
    rng = random.Random(seed)
    async with loaded("smol", "talker") as logic:
        _, rows = await speech("smol", seed)
        for cut in [0, len(rows), *(rng.randrange(len(rows)) for _ in range(8))]:
            made = await run_logic(logic, params("talker"), [TEXT], start_at({"features": cut}))
            assert equal(made.rows("features"), rows, cut)
            assert made.ended() == ["alignment", "features"]


@pytest.mark.parametrize(("family", "port", "others"), [("toy", "codes", []), pytest.param("smol", "features", ["alignment"], marks=SMOL)])
async def test_a_talker_that_has_said_all_gives_nothing(family: str, port: str, others: list[str]):
    async with loaded(family, "talker") as logic:
        history = [history_of_codes(np.zeros((3, formulas.CODEBOOKS), np.uint32))] if port == "codes" else []
        start = start_at({port: 3}, *history, ended=[port, *others])
        assert (await run_logic(logic, params("talker", max_frames=3), start=start)).outputs == []


# Code2Wav ---------------------------------------------------------------------------------------------------------------------------------


SPEECH: dict[str, NDArray[np.generic]] = {}
"""The codes that the Talker of each family says; each is computed once."""

ENCODINGS = {"pcm16": chunk_pb2.AUDIO_ENCODING_PCM16, "float32": chunk_pb2.AUDIO_ENCODING_FLOAT32}


async def speech(family: str, seed: int) -> tuple[str, NDArray[np.generic]]:
    """Input of a Code2Wav: its port and all of its frames."""
    if family == "toy":
        return "codes", np.random.default_rng(seed).integers(0, 1024, (100, formulas.CODEBOOKS), np.uint32)
    if family not in SPEECH:
        async with loaded(family, "talker") as logic:
            rows = (await run_logic(logic, params("talker"), [TEXT])).rows("features")
        assert rows is not None
        SPEECH[family] = rows
    return "features", SPEECH[family]


VOICES = [
    pytest.param("toy", {}, id="toy"),
    pytest.param("toy", {"chunk_samples": 7, "context": 0}, id="toy-no-context"),
    pytest.param("toy", {"chunk_samples": 100, "context": 5}, id="toy-context-5"),
    pytest.param("smol", {}, marks=SMOL, id="smol"),
]


@lengths.drawn_cells(2, ("family", "options"), VOICES)
@lengths.one_or_all("encoding", ENCODINGS)
async def test_a_code2wav_goes_on_at_any_sample_and_needs_no_more_than_it_said(
    seed: int, family: str, options: dict[str, object], encoding: str
):
    rng = random.Random(seed)
    chosen = ENCODINGS[lengths.draw(encoding, ENCODINGS, seed)]
    size = 2 if chosen == chunk_pb2.AUDIO_ENCODING_PCM16 else 4
    port, frames = await speech(family, seed)
    async with loaded(family, "code2wav", options) as logic:
        asked = params("code2wav", encoding=chosen)
        whole = await run_logic(logic, asked, pieces_of(port, frames, rng), seed=seed)
        total = whole.count("audio")
        assert whole.needs == {port: 0}
        assert len(whole.audio()) == size * total
        firsts = [first for _, first, _ in whole.kept]
        assert firsts == sorted(set(firsts)) and firsts[-1] >= len(frames) - 40
        for cut in [0, total, *(rng.randrange(total) for _ in range(CUTS if family == "toy" else 12))]:
            start = start_at({"audio": cut})
            needed = (await logic.prepare(stage_pb2.Open(params=asked, seed=seed), start)).needs[port]
            kept = max((first for _, first, samples in whole.kept if samples <= cut), default=0)
            for begin in {0, needed, max(needed, kept), rng.randint(0, max(needed, kept))}:
                made = await run_logic(logic, asked, pieces_of(port, frames, rng, begin), start, seed=seed)
                assert made.audio() == whole.audio()[size * cut :], f"sample {cut}, frames from {begin}"
                assert made.ended() == ["audio"]
                assert all(first > max(needed, kept) - 40 for _, first, _ in made.kept)


async def test_a_code2wav_asks_for_its_left_context():
    async with loaded("toy", "code2wav", {"context": 3}) as logic:
        for sample, frame in [(0, 0), (179, 0), (240, 1), (599, 6), (600, 7), (6000, 97)]:
            assert (await logic.prepare(stage_pb2.Open(), start_at({"audio": sample}))).needs == {"codes": frame}


@pytest.mark.parametrize("family", ["toy", pytest.param("smol", marks=SMOL)])
async def test_a_code2wav_that_has_said_all_gives_nothing(family: str):
    async with loaded(family, "code2wav") as logic:
        assert (await run_logic(logic, params("code2wav"), start=start_at({"audio": 9}, ended=["audio"]))).outputs == []


# Diffusion --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2, 3])
async def test_a_diffusion_draws_only_the_pictures_that_are_missing(first: int):
    async with loaded("toy", "diffusion") as logic:
        asked = params("diffusion", "a hill", results=3, steps=4, previews=2)
        whole = await run_logic(logic, asked)
        made = await run_logic(logic, asked, start=start_at({"image": first}))
        assert len(whole.pictures()) == 3
        assert made.pictures() == whole.pictures()[first:]
        assert made.count("image") == 3 - first
        assert sorted(made.ended()) == ["image", "progress"]


async def test_a_diffusion_gives_nothing_on_ports_that_have_ended():
    async with loaded("toy", "diffusion") as logic:
        asked = params("diffusion", "a hill", results=2)
        made = await run_logic(logic, asked, start=start_at({"image": 1}, ended=["progress"]))
        assert (made.ended(), made.of("progress"), len(made.pictures())) == (["image"], [], 1)
        assert (await run_logic(logic, asked, start=start_at({"image": 2}, ended=["image", "progress"]))).outputs == []
        assert (await run_logic(logic, asked, start=start_at({"image": 2}, ended=["image"]))).ended() == ["progress"]


# Resumes that are refused -----------------------------------------------------------------------------------------------------------------

CODES = np.zeros((6, formulas.CODEBOOKS), np.uint32)


def with_width(width: int) -> chunk_pb2.Chunk:
    chunk = history_of_codes(CODES)
    chunk.codes.codebook_count = width
    return chunk


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param("thinker", start_at({}, history_of_text([1, 2, 3]), ended=["text"]), id="ended without a reason"),
        pytest.param("thinker", start_at({}, history_of_text([1, 2, 3], STOP)), id="a reason without an end"),
        pytest.param("thinker", start_at({}, history_of_text(range(24))), id="nothing left to say"),
        pytest.param("thinker", start_at({}, history_of_text(range(4000))), id="more than can be said"),
        pytest.param("talker", start_at({}, history_of_codes(CODES[:, :3])), id="too few codebooks"),
        pytest.param("talker", start_at({}, with_width(2)), id="another number of codebooks"),
        pytest.param("talker", start_at({}, with_width(0)), id="no codebooks"),
        pytest.param("diffusion", start_at({"image": 2}), id="more pictures than asked for"),
    ],
)
async def test_a_history_that_does_not_fit_is_refused_before_anything_is_computed(kind: str, start: Start):
    logic = toy_logic(kind)
    with pytest.raises(StageError) as refused:
        await logic.prepare(stage_pb2.Open(params=params(kind)), start)
    assert refused.value.reason == "BAD_REQUEST"
    assert refused.value.metadata["field"] in ("resume.history", "resume.positions")


async def test_frames_beyond_max_frames_are_refused():
    with pytest.raises(StageError, match="max_frames") as refused:
        await toy_logic("talker").prepare(stage_pb2.Open(params=params("talker", max_frames=6)), start_at({}, history_of_codes(CODES)))
    assert refused.value.metadata["field"] == "resume.history"


async def test_rows_beyond_the_text_are_refused():
    start = start_at({"hidden": 4}, history_of_text([1, 2, 3]))
    with pytest.raises(StageError, match="hidden") as refused:
        await run_logic(toy_logic("thinker"), params("thinker"), start=start)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.positions")


async def test_more_tokens_than_the_text_to_be_spoken_has_are_refused():
    start = start_at({}, history_of_text([1, 2, 3], STOP), ended=["text"])
    with pytest.raises(StageError, match="has 2 words") as refused:
        await run_logic(toy_logic("thinker"), params("thinker", verbatim="a b"), start=start)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.history")


@pytest.mark.parametrize("family", ["toy", pytest.param("smol", marks=SMOL)])
async def test_sound_that_ends_before_its_position_is_refused(family: str, seed: int):
    rng = random.Random(seed)
    port, frames = await speech(family, seed)
    async with loaded(family, "code2wav") as logic:
        whole = await run_logic(logic, params("code2wav"), pieces_of(port, frames, rng), seed=seed)
        for beyond in (1, 1 << 40, (1 << 64) - 1):
            start = start_at({"audio": min(whole.count("audio") + beyond, (1 << 64) - 1)})
            with pytest.raises(StageError) as refused:
                await run_logic(logic, params("code2wav"), pieces_of(port, frames, rng), start, seed=seed)
            assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.positions"), beyond


@pytest.mark.parametrize("family", ["toy", pytest.param("smol", marks=SMOL)])
async def test_sound_without_the_frames_it_needs_is_refused(family: str, seed: int):
    rng = random.Random(seed)
    port, frames = await speech(family, seed)
    async with loaded(family, "code2wav") as logic:
        for begin in (60, len(frames)):
            with pytest.raises(StageError) as refused:
                await run_logic(logic, params("code2wav"), pieces_of(port, frames, rng, begin), start_at({"audio": 300}), seed=seed)
            assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", port)


async def test_speech_that_ends_before_its_position_is_refused(seed: int):
    rows = toy_rows(seed, 10)
    start = start_at({}, history_of_codes(np.zeros((21, formulas.CODEBOOKS), np.uint32)))
    with pytest.raises(StageError) as refused:
        await run_logic(toy_logic("talker"), params("talker"), pieces_of("hidden", rows, random.Random(seed)), start)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.positions")
