"""What every kind of stage must do, whatever model family it runs: described in full, usable alone from a plain stub, repeatable."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from helpers.run import Caller, Heard, code_chunks, open_of, params, row_chunks, run_once
from helpers.servers import CHAIN, KINDS, family_logic, local_stage, stage_stub
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

HAS_SMOL = find_spec("omnistage.models.smol") is not None and find_spec("torch") is not None

SMOL_MARKS = [pytest.mark.slow, pytest.mark.skipif(not HAS_SMOL, reason="the models extra is not installed")]

FAMILY_KINDS = [
    *[pytest.param(("toy", kind), id=f"toy-{kind}") for kind in KINDS],
    *[pytest.param(("smol", kind), id=f"smol-{kind}", marks=SMOL_MARKS) for kind in CHAIN],
]
SPOKEN = "Hello there, and good morning."
PAYLOAD_OF_PORT = {
    "text": "text",
    "hidden": "tensor",
    "features": "tensor",
    "codes": "codes",
    "audio": "audio",
    "image": "image",
    "progress": "progress",
    "alignment": "alignment",
}


class Case:
    """One kind of one family behind a real server."""

    def __init__(self, family: str, kind: str, stub: stage_pb2_grpc.StageServiceAsyncStub, description: stage_pb2.DescribeResponse) -> None:
        self.family = family
        self.kind = kind
        self.stub = stub
        self.description = description

    def opening(self, seed: int, prompt: str, resume: stage_pb2.Resume | None = None) -> stage_pb2.Open:
        fields: dict[str, object] = {"max_tokens": 12} if self.kind == "thinker" and self.family == "smol" else {}
        return open_of(self.description, params=params(self.kind, prompt, **fields), seed=seed, resume=resume)

    async def run(self, seed: int, prompt: str, inputs: Sequence[chunk_pb2.Chunk]) -> Heard:
        return await run_once(self.stub, self.opening(seed, prompt), inputs)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILY_KINDS)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    family, kind = request.param
    async with local_stage(family_logic(family, kind), max_sessions=4) as server, stage_stub(server.address) as stub:
        await server.service.start()
        yield Case(family, kind, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))


def random_cuts(total: int) -> list[int]:
    cuts = []
    while total:
        cuts.append(random.randint(1, min(total, 5)))
        total -= cuts[-1]
    return cuts


async def inputs_of(family: str, kind: str, seed: int, prompt: str) -> list[chunk_pb2.Chunk]:
    """What the stage before this kind would send, cut at random."""
    if family == "toy" and kind == "talker":
        rows = np.stack([formulas.row(formulas.token(seed, prompt, n)) for n in range(formulas.NATURAL_LENGTH)])
        return row_chunks("hidden", rows, random_cuts(len(rows)))
    if family == "toy" and kind == "code2wav":
        rows = np.stack([formulas.row(formulas.token(seed, prompt, n)) for n in range(formulas.NATURAL_LENGTH)])
        codes = formulas.frames(rows)
        return code_chunks(codes, random_cuts(len(codes)))
    if kind == "talker":
        return [chunk_pb2.Chunk(port="text", count=4, last=True, text=chunk_pb2.TextChunk(text=SPOKEN, token_ids=[1, 2, 3, 4]))]
    if kind == "code2wav":
        rows = await smol_features(seed)
        return row_chunks("features", rows, random_cuts(len(rows)))
    return []


async def smol_features(seed: int) -> NDArray[np.float32]:
    async with local_stage(family_logic("smol", "talker")) as server, stage_stub(server.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        text = await inputs_of("smol", "talker", seed, "")
        return (await run_once(stub, open_of(description, seed=seed), text)).rows("features")


async def test_describe_is_complete(case: Case):
    said = case.description
    assert stage_pb2.StageKind.Name(said.kind) == f"STAGE_KIND_{case.kind.upper()}"
    assert said.model and said.revision
    assert said.max_sessions == 4 and said.pid and len(said.boot_id) == 36
    assert list(said.transports) == [tensor_pb2.TRANSPORT_KIND_INLINE]
    assert said.produces and bool(said.accepts) == (case.kind in ("talker", "code2wav"))
    if case.kind == "talker":
        assert said.voices
    for port in [*said.accepts, *said.produces]:
        assert stage_pb2.Payload.Name(port.payload) == f"PAYLOAD_{PAYLOAD_OF_PORT[port.name].upper()}"
        is_tensor = port.payload == stage_pb2.PAYLOAD_TENSOR
        assert (port.element_type == tensor_pb2.ELEMENT_TYPE_FLOAT32) == is_tensor
        assert bool(port.width) == (is_tensor or port.payload in (stage_pb2.PAYLOAD_CODES, stage_pb2.PAYLOAD_AUDIO))
        if port.payload in (stage_pb2.PAYLOAD_CODES, stage_pb2.PAYLOAD_AUDIO):
            assert port.rate_millihertz
    assert all(port.replay != stage_pb2.REPLAY_UNSPECIFIED for port in said.accepts)


async def test_a_plain_stub_runs_the_stage_alone(case: Case, seed: int):
    prompt = f"What is {seed}?"
    heard = await case.run(seed, prompt, await inputs_of(case.family, case.kind, seed, prompt))
    heard.check_whole([port.name for port in case.description.produces])
    assert heard.opened is not None
    assert list(heard.opened.revisions) == [case.description.revision]
    assert {credit.port for credit in heard.opened.credits} == {port.name for port in case.description.accepts}
    assert heard.opened.answer.kind == tensor_pb2.TRANSPORT_KIND_INLINE
    (report,) = heard.reports
    assert report.kind == case.description.kind and report.replica
    assert dict(report.output_items) == {port: sum(chunk.count for chunk in chunks) for port, chunks in heard.chunks.items()}
    for name, chunks in heard.chunks.items():
        for chunk in chunks:
            assert chunk.WhichOneof("payload") == (PAYLOAD_OF_PORT[name] if chunk.count or chunk.WhichOneof("payload") else None)


async def test_equal_seed_and_input_give_equal_content(case: Case, seed: int):
    contents = []
    for _ in range(2):
        heard = await case.run(seed, "Say it again.", await inputs_of(case.family, case.kind, seed, "Say it again."))
        contents.append({port: content(heard, port) for port in heard.chunks if port != "progress"})
    assert contents[0] == contents[1]
    assert any(contents[0].values())


def content(heard: Heard, port: str) -> bytes:
    """What a port carried, however it was cut."""
    match port:
        case "text":
            return heard.text().encode()
        case "codes":
            return heard.codes().tobytes()
        case "audio":
            return heard.samples().tobytes()
        case "image":
            return b"".join(chunk.image.data.data for chunk in heard.of(port))
        case "alignment":
            return b"".join(chunk.alignment.SerializeToString() for chunk in heard.of(port))
    return heard.rows(port).tobytes()


async def test_a_plain_stub_resumes_the_stage(case: Case, seed: int):
    """Lost after a few chunks of every port, opened again with what had come: it goes on there, and both parts are the whole."""
    prompt = f"What is {seed}?"
    inputs = await inputs_of(case.family, case.kind, seed, prompt)
    whole = await case.run(seed, prompt, inputs)
    draw = random.Random(seed)
    held = {port: chunks[: draw.randrange(len(chunks))] for port, chunks in whole.chunks.items() if port != "progress"}
    if "hidden" in held:  # Nobody has rows of a token that the caller does not have.
        known = sum(chunk.count for chunk in held["text"])
        held["hidden"] = [chunk for chunk in held["hidden"] if chunk.first + chunk.count <= known]
    heard = await run_once(case.stub, case.opening(seed, prompt, resume_of(case, held)), inputs)
    assert heard.opened is not None and heard.ended is not None and heard.ended.code == 0, heard.ended
    assert {position.port for position in heard.opened.needs} <= {port.name for port in case.description.accepts}
    for port, chunks in held.items():
        rest = heard.of(port)
        assert (rest[0].seq, rest[0].first) == (len(chunks), sum(chunk.count for chunk in chunks)), port
        assert [chunk.last for chunk in rest] == [False] * (len(rest) - 1) + [True], port
        assert content(Heard(chunks={port: [*chunks, *rest]}), port) == content(whole, port), port


def resume_of(case: Case, held: Mapping[str, Sequence[chunk_pb2.Chunk]]) -> stage_pb2.Resume:
    """What a caller says that holds these chunks."""
    compact = {port.name for port in case.description.produces if port.compact}
    return stage_pb2.Resume(
        positions=[
            stage_pb2.Position(port=port, seq=len(chunks), first=sum(chunk.count for chunk in chunks)) for port, chunks in held.items()
        ],
        history=[chunk for port, chunks in held.items() if port in compact for chunk in chunks],
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOL, reason="the models extra is not installed")
async def test_the_times_of_words_keep_to_their_credit_and_are_not_sent_to_who_does_not_want_them(seed: int):
    async with local_stage(family_logic("smol", "talker")) as server, stage_stub(server.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        text = await inputs_of("smol", "talker", seed, "")
        plenty = {"features": 1 << 20}
        caller = Caller(stub)
        await caller.send(open=open_of(description, {**plenty, "alignment": 1}))
        await caller.opened()
        await caller.send(chunk=text[0])
        await caller.until_silent()
        (first,) = caller.heard.of("alignment")
        assert [word.first_character for word in first.alignment.words] == [0, 6]
        await caller.send(credit=stage_pb2.Credit(port="alignment", total=9))
        heard = await caller.finish()
        heard.check_whole(["features", "alignment"])
        spoken = [word for chunk in heard.of("alignment") for word in chunk.alignment.words]
        assert [SPOKEN[word.first_character :][: word.character_count] for word in spoken] == SPOKEN.split()
        unwanted = await run_once(stub, open_of(description, plenty, unwanted=["alignment"]), text)
        unwanted.check_whole(["features"])
        assert content(unwanted, "features") == content(heard, "features")
        assert dict(unwanted.reports[0].output_items) == {"features": len(unwanted.rows("features")), "alignment": 0}


@pytest_asyncio.fixture(loop_scope="module")
async def toy(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    kind = request.param
    async with local_stage(family_logic("toy", kind)) as server, stage_stub(server.address) as stub:
        yield Case("toy", kind, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))


@pytest.mark.parametrize("toy", ["thinker"], indirect=True)
@pytest.mark.parametrize("prompt", ["hi", "What is the sum?", "\N{GRINNING FACE}\N{SLICE OF PIZZA}", "x" * 20_000])
async def test_toy_thinker_says_the_formula(toy: Case, prompt: str, seed: int):
    heard = await toy.run(seed, prompt, [])
    length = formulas.NATURAL_LENGTH
    tokens = [formulas.token(seed, prompt, n) for n in range(length)]
    assert heard.text() == formulas.text(seed, prompt, length)
    assert [token for chunk in heard.of("text") for token in chunk.text.token_ids] == tokens
    np.testing.assert_array_equal(heard.rows("hidden"), np.stack([formulas.row(token) for token in tokens]))
    assert [chunk.text.finish_reason for chunk in heard.of("text")][-1] == chunk_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("toy", ["talker"], indirect=True)
async def test_toy_talker_makes_the_formula(toy: Case, seed: int):
    rows = np.stack([formulas.row(formulas.token(seed, "hm", n)) for n in range(50)])
    heard = await toy.run(seed, "", row_chunks("hidden", rows, random_cuts(50)))
    np.testing.assert_array_equal(heard.codes(), formulas.frames(rows))
    assert dict(heard.reports[0].input_items) == {"hidden": 50}


@pytest.mark.parametrize("toy", ["code2wav"], indirect=True)
async def test_toy_code2wav_sounds_like_the_formula(toy: Case, seed: int):
    codes = np.random.default_rng(seed).integers(0, 1024, (100, formulas.CODEBOOKS), np.uint32)
    heard = await toy.run(seed, "", code_chunks(codes, random_cuts(100)))
    np.testing.assert_array_equal(heard.samples(), formulas.samples(codes)[:, 0] * 32768)


@pytest.mark.parametrize("toy", ["diffusion"], indirect=True)
async def test_toy_diffusion_draws_the_formula(toy: Case, seed: int):
    seed %= 1000
    opening = open_of(toy.description, params=params("diffusion", "a hill", width=40, height=24, results=2, steps=7), seed=seed)
    heard = await run_once(toy.stub, opening)
    heard.check_whole(["image", "progress"])
    pictures = [chunk.image for chunk in heard.of("image") if chunk.count]
    assert len(pictures) == 2
    for n, picture in enumerate(pictures):
        assert picture.media_type == "image/png"
        expected = (seed + n + np.add.outer(np.arange(24), np.arange(40))) % 256
        np.testing.assert_array_equal(decode_png(picture.data.data), expected)
    progress = [chunk.progress.done for chunk in heard.of("progress") if chunk.HasField("progress")]
    assert progress == list(range(1, 8))


@pytest.mark.parametrize("toy", ["diffusion"], indirect=True)
async def test_progress_without_credit_is_dropped_and_the_picture_still_comes(toy: Case):
    caller = Caller(toy.stub)
    await caller.send(open=open_of(toy.description, {"image": 8, "progress": 1}))
    await caller.until(lambda heard: bool(heard.of("image")))
    assert [chunk.progress.done for chunk in caller.heard.of("progress")] == [1]
    await caller.send(credit=stage_pb2.Credit(port="progress", total=2))
    heard = await caller.finish()
    heard.check_whole(["image", "progress"])


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """[height, width] of a grey 8-bit PNG without filters: what the toy draws, read independently of it."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, size, body = 8, (0, 0), b""
    while position < len(data):
        length, name = struct.unpack(">I4s", data[position : position + 8])
        payload = data[position + 8 : position + 8 + length]
        assert zlib.crc32(name + payload) == struct.unpack(">I", data[position + 8 + length : position + 12 + length])[0]
        if name == b"IHDR":
            size = struct.unpack(">II", payload[:8])
            assert payload[8:] == bytes([8, 0, 0, 0, 0])
        elif name == b"IDAT":
            body += payload
        position += 12 + length
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(size[1], size[0] + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]
