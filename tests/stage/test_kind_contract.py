"""The contract of every kind of stage over gRPC, whatever model family it runs: it is described in full, and a plain stub can use and
resume it.

The suite of helpers/contract.py asks each family for what the models behind it must do."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from helpers.contract import SampleRequest
from helpers.families import CASES
from helpers.logic import pieces_of
from helpers.run import RunAnswer, code_chunks, params, tensor_of
from helpers.servers import family_logic
from helpers.stage import Stage, stage_of, stage_with
from omnistage.models.toy import formulas
from omnistage.stage.logic import Input
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILY_KINDS = {f"{case.family}-{case.kind}": case for case in reversed(CASES) if not case.slow}
"""The first case of each kind of each family whose model takes no time to load."""
SPOKEN = "Hello there, and good morning."


@dataclass
class ServedKind:
    """One kind of one family behind a real server."""

    sample: SampleRequest
    stage: Stage

    @property
    def description(self) -> stage_pb2.DescribeResponse:
        return self.stage.description

    async def run(self, inputs: Sequence[chunk_pb2.Chunk], seed: int, resume: stage_pb2.Resume | None = None) -> RunAnswer:
        return await self.stage.run(inputs, params=self.sample.params, seed=seed, resume=resume)

    def inputs(self, source: random.Random) -> list[chunk_pb2.Chunk]:
        """The chunks that the stage before this one would send, cut at random."""
        chunks = []
        for port in self.description.accepts:
            whole = self.sample.inputs[port.name]
            if port.element_type == tensor_pb2.ELEMENT_TYPE_INT32 and isinstance(whole, np.ndarray):
                whole = whole.astype(np.int32)
            chunks += [chunk_of(piece, seq) for seq, piece in enumerate(pieces_of(port, whole, source, 0))]
        return chunks


def chunk_of(piece: Input, seq: int) -> chunk_pb2.Chunk:
    chunk = chunk_pb2.Chunk(port=piece.port, seq=seq, first=piece.first, count=piece.count, last=piece.last)
    match piece.payload:
        case np.ndarray() as rows:
            chunk.tensor.CopyFrom(tensor_of(rows))
        case chunk_pb2.CodeChunk() as codes:
            chunk.codes.CopyFrom(codes)
        case chunk_pb2.TextChunk() as text:
            chunk.text.CopyFrom(text)
    return chunk


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILY_KINDS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[ServedKind]:
    case = FAMILY_KINDS[request.param]
    async with stage_with(case.load(), max_sessions=4) as stage:
        yield ServedKind(case.sample(), stage)


async def test_describe_is_complete(served: ServedKind):
    said = served.description
    assert said.model and said.revision
    assert said.max_sessions == 4 and said.pid and len(said.boot_id) == 36
    assert list(said.transports) == [tensor_pb2.TRANSPORT_KIND_INLINE]
    assert said.produces and all(port.replay != stage_pb2.REPLAY_UNSPECIFIED for port in said.accepts)


async def test_a_plain_stub_runs_the_stage_alone(served: ServedKind, seed: int):
    heard = await served.run(served.inputs(random.Random(seed)), seed)
    produced = {port.name: port for port in served.description.produces}
    heard.check_whole([*produced])
    assert heard.opened is not None
    assert list(heard.opened.revisions) == [served.description.revision]
    assert {credit.port for credit in heard.opened.credits} == {port.name for port in served.description.accepts}
    assert heard.opened.answer.kind == tensor_pb2.TRANSPORT_KIND_INLINE
    (report,) = heard.reports
    assert report.kind == served.description.kind and report.replica
    assert dict(report.output_items) == {port: sum(chunk.count for chunk in chunks) for port, chunks in heard.chunks.items()}
    for name, chunks in heard.chunks.items():
        carried = stage_pb2.Payload.Name(produced[name].payload).removeprefix("PAYLOAD_").lower()
        for chunk in chunks:
            assert chunk.WhichOneof("payload") in ((carried,) if chunk.count else (carried, None))


CONTENT: dict[str | None, Callable[[chunk_pb2.Chunk], bytes]] = {
    "text": lambda chunk: chunk.text.text.encode(),
    "codes": lambda chunk: np.array(chunk.codes.codes, np.uint32).tobytes(),
    "audio": lambda chunk: chunk.audio.data,
    "image": lambda chunk: b"" if chunk.image.HasField("preview_step") else chunk.image.data.data,
    "video": lambda chunk: chunk.video.data,
    "alignment": lambda chunk: chunk.alignment.SerializeToString(),
    "tensor": lambda chunk: chunk.tensor.inline.data,
}


def content(heard: RunAnswer, port: str) -> bytes:
    """The content of a port, however it was cut."""
    return b"".join(CONTENT[kind](chunk) for chunk in heard.of(port) if (kind := chunk.WhichOneof("payload")) in CONTENT)


async def test_a_plain_stub_resumes_the_stage(served: ServedKind, seed: int):
    """Lost after a few chunks of every port, opened again with what had come: it goes on there, and both parts are the whole."""
    source = random.Random(seed)
    inputs = served.inputs(source)
    whole = await served.run(inputs, seed)
    held = {port: chunks[: source.randrange(len(chunks))] for port, chunks in whole.chunks.items() if port != "progress"}
    if "hidden" in held:  # Nobody has rows of a token that the caller does not have.
        known = sum(chunk.count for chunk in held["text"])
        held["hidden"] = [chunk for chunk in held["hidden"] if chunk.first + chunk.count <= known]
    heard = await served.run(inputs, seed, resume_of(served, held))
    assert heard.opened is not None and heard.ended is not None and heard.ended.code == 0, heard.ended
    assert {position.port for position in heard.opened.needs} <= {port.name for port in served.description.accepts}
    for port, chunks in held.items():
        rest = heard.of(port)
        assert (rest[0].seq, rest[0].first) == (len(chunks), sum(chunk.count for chunk in chunks)), port
        assert [chunk.last for chunk in rest] == [False] * (len(rest) - 1) + [True], port
        assert content(RunAnswer(chunks={port: [*chunks, *rest]}), port) == content(whole, port), port
    assert any(content(whole, port) for port in held)


def resume_of(served: ServedKind, held: Mapping[str, Sequence[chunk_pb2.Chunk]]) -> stage_pb2.Resume:
    """The Resume of a caller that holds these chunks."""
    compact = {port.name for port in served.description.produces if port.compact}
    return stage_pb2.Resume(
        positions=[
            stage_pb2.Position(port=port, seq=len(chunks), first=sum(chunk.count for chunk in chunks)) for port, chunks in held.items()
        ],
        history=[chunk for port, chunks in held.items() if port in compact for chunk in chunks],
    )


@pytest.mark.skipif(find_spec("torch") is None, reason="the models extra is not installed")
async def test_the_times_of_words_keep_to_their_credit_and_are_not_sent_to_who_does_not_want_them(seed: int):
    async with stage_with(family_logic("smol", "talker")) as stage:
        text = [chunk_pb2.Chunk(port="text", count=4, last=True, text=chunk_pb2.TextChunk(text=SPOKEN, token_ids=[1, 2, 3, 4]))]
        plenty = {"features": 1 << 20}
        caller = await stage.opened(credits={**plenty, "alignment": 1})
        await caller.send(chunk=text[0])
        await caller.until_silent()
        (first,) = caller.heard.of("alignment")
        assert [word.first_character for word in first.alignment.words] == [0, 6]
        await caller.send(credit=stage_pb2.Credit(port="alignment", total=9))
        heard = await caller.finish()
        heard.check_whole(["features", "alignment"])
        spoken = [word for chunk in heard.of("alignment") for word in chunk.alignment.words]
        assert [SPOKEN[word.first_character :][: word.character_count] for word in spoken] == SPOKEN.split()
        unwanted = await stage.run(text, credits=plenty, unwanted=["alignment"])
        unwanted.check_whole(["features"])
        assert content(unwanted, "features") == content(heard, "features")
        assert dict(unwanted.reports[0].output_items) == {"features": len(unwanted.rows("features")), "alignment": 0}


@pytest.mark.parametrize("prompt", ["hi", "What is the sum?", "\N{GRINNING FACE}\N{SLICE OF PIZZA}", "x" * 20_000])
async def test_toy_thinker_says_the_formula(prompt: str, seed: int):
    async with stage_of("thinker") as stage:
        heard = await stage.run(params=params("thinker", prompt), seed=seed)
    length = formulas.NATURAL_LENGTH
    tokens = [formulas.token(seed, prompt, n) for n in range(length)]
    assert heard.text() == formulas.text(seed, prompt, length)
    assert [token for chunk in heard.of("text") for token in chunk.text.token_ids] == tokens
    np.testing.assert_array_equal(heard.rows("hidden"), np.stack([formulas.row(token) for token in tokens]))
    assert [chunk.text.finish_reason for chunk in heard.of("text")][-1] == chunk_pb2.FINISH_REASON_STOP


async def test_toy_code2wav_sounds_like_the_formula(seed: int):
    codes = np.random.default_rng(seed).integers(0, 1024, (100, formulas.CODEBOOKS), np.uint32)
    cuts = np.diff([0, *sorted(random.Random(seed).sample(range(1, 100), 30)), 100]).tolist()
    async with stage_of("code2wav") as stage:
        heard = await stage.run(code_chunks(codes, cuts))
    np.testing.assert_array_equal(heard.samples(), formulas.samples(codes)[:, 0] * 32768)


async def test_toy_diffusion_draws_the_formula(seed: int):
    seed %= 1000
    async with stage_of("diffusion") as stage:
        heard = await stage.run(params=params("diffusion", "a hill", width=40, height=24, results=2, steps=7), seed=seed)
    heard.check_whole(["image", "progress"])
    pictures = [chunk.image for chunk in heard.of("image") if chunk.count]
    assert len(pictures) == 2
    for n, picture in enumerate(pictures):
        assert picture.media_type == "image/png"
        expected = (seed + n + np.add.outer(np.arange(24), np.arange(40))) % 256
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture.data.data))), expected)
    progress = [chunk.progress.done for chunk in heard.of("progress") if chunk.HasField("progress")]
    assert progress == list(range(1, 8))


async def test_progress_without_credit_is_dropped_and_the_picture_still_comes():
    async with stage_of("diffusion") as stage:
        caller = await stage.begin(credits={"image": 8, "progress": 1})
        await caller.until(lambda heard: bool(heard.of("image")))
        assert [chunk.progress.done for chunk in caller.heard.of("progress")] == [1]
        await caller.send(credit=stage_pb2.Credit(port="progress", total=2))
        (await caller.finish()).check_whole(["image", "progress"])
