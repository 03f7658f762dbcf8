"""The input side of a session on its own. Media of a request reach the model as they stood in it; what has no form is refused by field."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.run import code_chunks, params, row_chunks, tensor_of
from helpers.servers import family_logic, toy_logic
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.diffusion.stage import DiffusionStage
from omnistage.models.conversation import Media, Streamed, TextConstraint, Turn
from omnistage.models.interface import DrawRequest, TextRequest
from omnistage.models.toy import formulas
from omnistage.models.toy.film import FilmMaker, FilmOptions, ToyScene
from omnistage.models.toy.omni import OmniThinker, OmniThinkerOptions, PreparedToy
from omnistage.stage.inputs import CODES_WINDOW, WINDOW, Inputs
from omnistage.stage.logic import Start
from omnistage.thinker.stage import MAX_CONSTRAINT_CHARACTERS, ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

CODES = toy_logic("code2wav").description.accepts
PORTS = toy_logic("talker").description.accepts
ROWS = np.stack([formulas.row(token) for token in range(8)])


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 20, segment_bytes=1 << 18)
    assert arena is not None
    yield arena
    arena.close()


@pytest.fixture
def sender(arena: Arena) -> Iterator[Sender]:
    sender = Sender(arena, inline_limit=0)
    yield sender
    sender.close(clean=True)


@pytest.fixture
def receiver(sender: Sender) -> Receiver:
    """It takes tensors in the memory of the sender."""
    receiver = Receiver()
    sender.accept(receiver.answer(sender.offers()))
    return receiver


def chunk(seq: int, tensor: tensor_pb2.Tensor | None = None, *, last: bool = False) -> chunk_pb2.Chunk:
    return chunk_pb2.Chunk(port="hidden", seq=seq, first=seq, count=1, last=last, tensor=tensor or tensor_of(ROWS[:1]))


async def nobody(message: stage_pb2.RunResponse) -> None:
    """Hears no reply."""


async def test_what_arrives_while_memory_is_given_back_is_not_overlooked(sender: Sender, receiver: Receiver):
    """The write that gives memory back lets other tasks run; a chunk that one of them takes in then must wake the one that waits for it."""
    tensors = [tensor for n in range(3) for tensor in sender.pack(ROWS[n : n + 1])]
    waiting = [chunk(n, tensor, last=n == 2) for n, tensor in enumerate(tensors)]
    inputs: Inputs

    async def reply(message: stage_pb2.RunResponse) -> None:
        if message.HasField("release"):
            sender.release(message.release)
            if waiting:
                inputs.put(waiting.pop(0))
        await asyncio.sleep(0)

    inputs = Inputs(PORTS, receiver, reply)
    inputs.put(waiting.pop(0))
    taken = []
    async with asyncio.timeout(10):
        async for piece in inputs:
            assert isinstance(piece.payload, np.ndarray)
            taken.append(piece.payload.tolist())
            del piece
    assert taken == [ROWS[n : n + 1].tolist() for n in range(3)]
    inputs.close()
    assert sender.outstanding == 0 and inputs.items == {"hidden": 3}


async def test_credit_grows_by_half_windows_as_the_stage_takes():
    granted = []

    async def reply(message: stage_pb2.RunResponse) -> None:
        granted.append(message.credit.total)

    inputs = Inputs(PORTS, Receiver(), reply)
    assert [(credit.port, credit.total) for credit in inputs.credits()] == [("hidden", WINDOW)]
    for seq in range(4 * WINDOW):
        inputs.put(chunk(seq))
        await anext(inputs)
    assert granted == [WINDOW // 2 * n + WINDOW for n in range(1, 9)]


async def test_half_close_is_told_only_after_what_had_come():
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.put(chunk(0))
    inputs.half_close()
    assert (await anext(inputs)).first == 0
    with pytest.raises(StageError, match=r"HALF_CLOSED.*\['hidden'\]"):
        await anext(inputs)


async def test_views_are_given_back_when_a_session_ends_early(arena: Arena, sender: Sender, receiver: Receiver):
    inputs = Inputs(PORTS, receiver, nobody)
    for n in range(5):
        inputs.put(chunk(n, *sender.pack(ROWS[n : n + 1])))
    first = await anext(inputs)
    assert receiver.view_count == 5
    del first
    inputs.close()
    assert receiver.view_count == 0
    receiver.close()
    sender.close(clean=True)
    assert arena.leases == 0


async def _taken(inputs: Inputs) -> tuple[list[int], list[list[float]]]:
    """Where each piece with items begins, and all items."""
    firsts: list[int] = []
    items: list[list[float]] = []
    async for piece in inputs:
        whole: NDArray[Any]
        match piece.payload:
            case chunk_pb2.CodeChunk() as codes:
                whole = np.array(codes.codes, np.float64).reshape(piece.count, codes.codebook_count)
            case np.ndarray() as rows:
                whole = rows
            case _:
                assert piece.payload is None
                whole = np.empty((0, 1))
        assert len(whole) == piece.count
        firsts.extend([piece.first] * bool(piece.count))
        items.extend(whole.tolist())
    return firsts, items


@given(
    port=st.sampled_from(["codes", "hidden"]),
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    needed=st.integers(0, 40),
    earlier=st.integers(0, 3),
)
def test_a_port_that_goes_on_gives_its_items_from_the_needed_one(port: str, cuts: Sequence[int], needed: int, earlier: int) -> None:
    """The caller sends from some piece before, or from the one that holds it; a port of which all is needed comes whole."""
    cuts = cuts[:CODES_WINDOW] if port == "codes" else cuts
    total = sum(cuts)
    width = formulas.CODEBOOKS if port == "codes" else formulas.WIDTH
    items = np.arange(total * width).reshape(total, width)
    chunks = code_chunks(items.astype(np.uint32), cuts) if port == "codes" else row_chunks("hidden", items.astype(np.float32), cuts)
    if port == "codes":
        holding = next((n for n, chunk in enumerate(chunks) if chunk.first + chunk.count > needed), len(chunks) - 1)
        chunks = chunks[max(holding - earlier, 0) :]
        for seq, chunk in enumerate(chunks):
            chunk.seq = seq

    async def play() -> None:
        inputs = Inputs(CODES if port == "codes" else PORTS, Receiver(), nobody)
        inputs.go_on_from({port: needed})
        for chunk in chunks:
            inputs.put(chunk)
        firsts, taken = await _taken(inputs)
        assert taken == items[needed:].tolist()
        assert all(first >= min(needed, total) for first in firsts)
        assert inputs.items == {port: max(total - needed, 0)}

    asyncio.run(play())


async def test_a_tensor_in_parts_is_cut_when_it_is_whole():
    data = ROWS.astype("<f4").tobytes()
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.go_on_from({"hidden": 6})
    for seq, (begin, end) in enumerate([(0, 300), (300, 700), (700, len(data))]):
        inline = tensor_pb2.InlinePart(data=data[begin:end], offset=begin, total_bytes=len(data))
        tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
        last = end == len(data)
        inputs.put(chunk_pb2.Chunk(port="hidden", seq=seq, first=0, count=len(ROWS) if last else 0, last=last, tensor=tensor))
    assert await _taken(inputs) == ([6], ROWS[6:].tolist())


@pytest.mark.parametrize("first", [1, 3, (1 << 64) - 1])
async def test_a_port_that_must_be_replayed_whole_may_not_begin_later(first: int):
    inputs = Inputs(PORTS, Receiver(), nobody)
    inputs.go_on_from({})
    late = chunk(0)
    late.first = first
    with pytest.raises(StageError, match="PROTOCOL"):
        inputs.put(late)


async def test_text_cannot_be_cut():
    """Its characters do not say which token they come from; a stage that takes text needs all of it."""
    text = stage_pb2.Port(name="text", payload=stage_pb2.PAYLOAD_TEXT, replay=stage_pb2.REPLAY_ALL)
    inputs = Inputs([text], Receiver(), nobody)
    inputs.go_on_from({"text": 1})
    inputs.put(chunk_pb2.Chunk(port="text", count=2, last=True, text=chunk_pb2.TextChunk(text="a b ", token_ids=[1, 2])))
    with pytest.raises(StageError, match="PROTOCOL"):
        await anext(inputs)


async def test_what_comes_after_the_end_of_a_session_is_not_held(sender: Sender, receiver: Receiver):
    """A caller may not have seen Ended yet."""
    inputs = Inputs(PORTS, receiver, nobody)
    inputs.put(chunk(0, *sender.pack(ROWS[:1])))
    inputs.close()
    inputs.put(chunk(1, *sender.pack(ROWS[:1])))
    assert receiver.view_count == 0


async def test_what_waits_when_the_caller_interrupts_is_dropped(sender: Sender, receiver: Receiver):
    """Its memory is given back; what is in use stays as it is until it is not."""
    released = list[tensor_pb2.Release]()

    async def reply(message: stage_pb2.RunResponse) -> None:
        if message.HasField("release"):
            released.append(message.release)
            sender.release(message.release)

    inputs = Inputs(PORTS, receiver, reply)
    for n in range(4):
        inputs.put(chunk(n, *sender.pack(ROWS[n : n + 1])))
    taken = []
    async with asyncio.timeout(10):
        async for piece in inputs:
            inputs.interrupt()
            assert isinstance(piece.payload, np.ndarray)
            taken.append(piece.payload.copy())
            del piece  # It is a view of that memory.
    assert np.array_equal(np.concatenate(taken), ROWS[:1])
    assert released and not sender.outstanding


class ListeningThinker(OmniThinker):
    """Keeps what it is asked."""

    asked: TextRequest

    async def prepare(self, request: TextRequest) -> PreparedToy:
        self.asked = request
        return PreparedToy(request, ())


class LookingFilmMaker(FilmMaker):
    """Keeps what it is asked."""

    asked: DrawRequest

    async def prepare(self, request: DrawRequest) -> ToyScene:
        self.asked = request
        return cast(ToyScene, None)

    def items(self, prepared: ToyScene) -> Mapping[str, int]:
        return {}


def said_by(role: str, *parts: stage_pb2.Part) -> stage_pb2.Message:
    return stage_pb2.Message(role=role, parts=parts)


def text(said: str) -> stage_pb2.Part:
    return stage_pb2.Part(text=said)


def media(data: bytes, media_type: str = "image/png", *, use_audio: bool = False) -> stage_pb2.Part:
    return stage_pb2.Part(media=stage_pb2.Media(data=data, media_type=media_type, use_audio=use_audio))


async def asked(*messages: stage_pb2.Message, **fields: object) -> TextRequest:
    model = ListeningThinker(OmniThinkerOptions())
    request = stage_pb2.Open(params=params("thinker", "", messages=messages, **fields), seed=3, client="somebody", scope="some key")
    await ThinkerStage(model).prepare(request, Start())
    return model.asked


async def prepare_drawing(model: LookingFilmMaker | None = None, **fields: Any) -> DrawRequest:
    model = model or LookingFilmMaker(FilmOptions())
    request = stage_pb2.Open(params=params("diffusion", **{"prompt": "a hill", **fields}), seed=3, client="somebody")
    await DiffusionStage(model).prepare(request, Start())
    return replace(model.asked, history=None)


@contextmanager
def refusal(field: str, match: str | None = None) -> Iterator[None]:
    """A bad request, which names this field."""
    with pytest.raises(StageError, match=match) as error:
        yield
    assert (error.value.reason, error.value.metadata["field"]) == ("BAD_REQUEST", field)


async def test_parts_come_in_their_order():
    system, user = said_by("system", text("Be brief.")), said_by("user", text("a"), media(b"xy"), stage_pb2.Part(port="live"), text("b"))
    film = said_by("user", media(b"zz", "video/mp4", use_audio=True))
    request = await asked(system, user, film, constraint=stage_pb2.Constraint(regex="[ab]+"), top_logprobs=5)
    picture = Media("image/png", b"xy")
    assert picture.digest == hashlib.sha256(b"xy").digest()
    assert request.turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("a", picture, Streamed("live"), "b")),
        Turn("user", (Media("video/mp4", b"zz", use_audio=True),)),
    )
    assert request.turns[1].text == "ab"
    assert (request.constraint, request.client, request.seed) == (TextConstraint("regex", "[ab]+"), "somebody", 3)
    assert (request.scope, request.logprobs, request.top_logprobs) == ("some key", True, 5)


async def test_a_media_type_is_the_same_in_capitals():
    on_port = stage_pb2.Part(port="media0", media_type="VIDEO/mp4", use_audio=True)
    request = await asked(said_by("user", media(b"xy", "Image/PNG"), on_port))
    picture, film = request.turns[0].parts
    assert picture == Media("image/png", b"xy") and film == Streamed("media0", "video/mp4", use_audio=True)
    assert (picture.kind, film.kind) == ("image", "video")
    assert (await prepare_drawing(media_type="VIDEO/X-grey8")).media_type == "video/x-grey8"


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ('Video/MP4; codecs="avc1"', 'video/mp4; codecs="avc1"'),
        ("video/mp4;codecs=avc1.64001f", "video/mp4;codecs=avc1.64001f"),
        ('video/webm ; codecs="vp9, opus"', 'video/webm; codecs="vp9, opus"'),
    ],
)
async def test_codecs_of_what_is_to_be_made_reach_the_model(said: str, asked: str):
    assert (await prepare_drawing(media_type=said)).media_type == asked


WRONG_CODECS = [f"video/mp4; {codecs}" for codecs in ('codecs=""', "codecs=", 'codecs="avc1', "rate=3")]


@pytest.mark.parametrize("said", [*WRONG_CODECS, "video/mp4;", "video/; codecs=avc1", "; codecs=avc1"])
async def test_other_parameters_of_it_are_refused(said: str):
    with refusal("diffusion.media_type"):
        await prepare_drawing(media_type=said)


async def test_a_ground_is_a_colour_and_is_for_what_is_seen():
    """The rule holds for media in a message and on a port, of conversations and of drawings."""
    shown = [stage_pb2.Media(data=b"x", media_type=kind, background="#1eC85a") for kind in ("image/png", "video/mp4")]
    parts = [*(stage_pb2.Part(media=one) for one in shown), stage_pb2.Part(port="media0", media_type="image/gif", background="#000000")]
    request = await asked(said_by("user", *parts, media(b"x")))
    colours = [(30, 200, 90), (30, 200, 90), (0, 0, 0), None]
    assert [getattr(part, "background", "none at all") for part in request.turns[0].parts] == colours
    assert (await prepare_drawing(images=shown[:1])).images[0].background == (30, 200, 90)


@pytest.mark.parametrize(
    "background", ["white", "#fff", "#ffffff ", "#ffffff\n", "ffffff", "#gggggg", "#ffffffff", "#\uff11\uff11\uff11\uff11\uff11\uff11"]
)
async def test_a_ground_that_is_no_colour_is_refused_by_field(background: str):
    shown = stage_pb2.Media(data=b"x", media_type="image/png", background=background)
    on_port = stage_pb2.Part(port="media0", media_type="image/png", background=background)
    for part, field in ((stage_pb2.Part(media=shown), "thinker.messages.parts.media"), (on_port, "thinker.messages.parts")):
        with refusal(f"{field}.background", "must be a colour as #rrggbb, such as #ffffff for white"):
            await asked(said_by("user", part))
    with refusal("diffusion.images.background"):
        await prepare_drawing(images=[shown])


async def test_a_sound_has_no_ground():
    heard = stage_pb2.Media(data=b"x", media_type="audio/wav", background="#ffffff")
    for part in (stage_pb2.Part(media=heard), stage_pb2.Part(port="live", background="#ffffff")):
        with pytest.raises(StageError, match="for pictures and films"):
            await asked(said_by("user", part))


async def test_choices_come_as_they_are_and_too_much_is_refused():
    user = said_by("user", text("a"))

    def choices(*texts: str) -> stage_pb2.Constraint:
        return stage_pb2.Constraint(choice=stage_pb2.Choices(texts=texts))

    request = await asked(user, constraint=choices("yes", "no", "yes "))
    assert request.constraint == TextConstraint("choice", choices=("yes", "no", "yes "))
    assert (request.logprobs, request.top_logprobs) == (False, 0)
    most = MAX_CONSTRAINT_CHARACTERS
    for form, bad in (
        ("choice", choices()),
        ("choice", choices("yes", "")),
        ("choice", choices("a" * most, "b")),
        ("regex", stage_pb2.Constraint(regex="")),
        ("regex", stage_pb2.Constraint(regex="a" * (most + 1))),
        ("json_schema", stage_pb2.Constraint(json_schema=" " * (most + 1))),
    ):
        with refusal(f"thinker.constraint.{form}"):
            await asked(user, constraint=bad)
    with refusal("thinker.constraint.choice"):
        await asked(user, verbatim="yes", constraint=choices("yes"))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (said_by("user", stage_pb2.Part()), "thinker.messages.parts"),
        (said_by("user", media(b"x", "")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"x", "text/html")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"x", "image/png\n")), "thinker.messages.parts.media.media_type"),
        (said_by("user", media(b"")), "thinker.messages.parts.media.data"),
        (said_by("robot", text("x")), "thinker.messages.role"),
        (said_by("user", text(" ")), "thinker.messages"),
        (said_by("assistant", media(b"x")), "thinker.messages"),
    ],
)
async def test_a_message_without_form_is_refused_by_field(message: stage_pb2.Message, field: str):
    with refusal(field):
        await asked(message)
    assert (await asked(said_by("user", text("x"), media(b"x")))).turns


async def test_a_user_may_show_something_without_a_word():
    assert (await asked(said_by("user", media(b"x")))).turns[0].text == ""


async def test_a_model_that_takes_text_says_so_of_everything_else():
    logic = family_logic("toy", "thinker")
    for part, field in [(media(b"x"), "thinker.messages.parts.media"), (stage_pb2.Part(port="live"), "thinker.messages.parts.port")]:
        with refusal(field, "toy-thinker"):
            await logic.prepare(stage_pb2.Open(params=params("thinker", messages=[said_by("user", text("x"), part)])), Start())
    assert list(logic.description.inputs) == ["text"] and not logic.description.constraints


async def test_everything_of_a_drawing_request_reaches_the_model():
    image, mask = (stage_pb2.Media(data=data, media_type="image/png") for data in (b"xy", b"m"))
    control = stage_pb2.Media(data=b"c", media_type="image/webp")
    alike: dict[str, Any] = {
        "prompt": "a hill",
        "negative_prompt": "fog",
        "width": 64,
        "height": 48,
        "frames": 7,
        "layers": 4,
        "steps": 9,
        "guidance_scale": 2.5,
        "results": 2,
        "previews": 3,
        "media_type": "video/mp4",
        "strength": 0.7,
        "options": {"eta": "0.5"},
    }
    media: dict[str, Any] = {"images": [image], "mask_image": mask, "control_image": control}
    assert await prepare_drawing(**alike, **media, duration_s=1.5, sigmas=[1.0, 0.7]) == DrawRequest(
        seed=3,
        client="somebody",
        seconds=1.5,
        sigmas=(1.0, 0.7),
        images=(Media("image/png", b"xy"),),
        mask_image=Media("image/png", b"m"),
        control_image=Media("image/webp", b"c"),
        **alike,
    )
    assert await prepare_drawing() == DrawRequest(seed=3, client="somebody", prompt="a hill"), "what is not said is the model's own"


@pytest.mark.parametrize("sigmas", [[1.0, 1 - 1e-12], [1.0, 1e-50], [1e-7], [1e7, 1.0], [float("nan")], [0.5, 1.0]])
async def test_sigmas_that_are_none_in_float32_do_not_reach_the_model(sigmas: list[float]):
    model = LookingFilmMaker(FilmOptions())
    with refusal("diffusion.sigmas"):
        await prepare_drawing(model, sigmas=sigmas)
    assert not hasattr(model, "asked")
    assert (await prepare_drawing(sigmas=[1.0, 1e-6])).sigmas == (1.0, 1e-6)
