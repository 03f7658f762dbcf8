"""Which pipeline answers a request that names none: the default if it can, else the only one that can; else the client is told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from helpers.ask import ask, refused, request
from helpers.families import looked_at
from helpers.run import messages
from helpers.servers import CHAIN, all_free, family_logic, local_router, local_stage, omni_stub
from omnistage.router.choice import chosen
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError

TABLE = {name: load_pipeline(name) for name in ("toy", "toy-omni", "toy-film", "toy-picture")}


def spoken(*types: str, text: str = "", **fields: object) -> omni_pb2.GenerateRequest:
    """A question with media of these types."""
    parts = [stage_pb2.Part(media=stage_pb2.Media(media_type=one)) for one in types]
    given = [stage_pb2.Message(role="user", parts=[*parts, stage_pb2.Part(text=text)])]
    return omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=given), **fields)  # type: ignore[arg-type]


def streamed(media_type: str) -> omni_pb2.GenerateRequest:
    part = stage_pb2.Part(port="media0", media_type=media_type)
    return omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=[stage_pb2.Message(role="user", parts=[part])]))


def drawn(*types: str, prompt: str = "", **fields: object) -> omni_pb2.GenerateRequest:
    images = [stage_pb2.Media(media_type=one) for one in types]
    return omni_pb2.GenerateRequest(diffusion=stage_pb2.DiffusionParams(prompt=prompt, images=images), **fields)  # type: ignore[arg-type]


def choice(asked: omni_pb2.GenerateRequest, table: Sequence[str] = tuple(TABLE)) -> str:
    return chosen(asked, {name: TABLE[name] for name in table}).name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (omni_pb2.GenerateRequest(), "toy"),
        (spoken(text="hi"), "toy"),
        (spoken(text="hi", outputs=["text", "audio"]), "toy"),
        (spoken("image/png", text="what is this?"), "toy-omni"),
        (spoken("image/png", "audio/wav"), "toy-omni"),
        (spoken("Image/PNG"), "toy-omni"),
        (streamed("audio/wav"), "toy-omni"),
        (streamed("AUDIO/wav"), "toy-omni"),
        (drawn("image/png", prompt="a walk"), "toy-film"),
        (drawn(prompt="a walk", outputs=["video"]), "toy-film"),
        (omni_pb2.GenerateRequest(outputs=["video"]), "toy-film"),
    ],
)
def test_the_default_is_taken_if_it_can_else_the_only_one_that_can(asked: omni_pb2.GenerateRequest, name: str) -> None:
    assert choice(asked) == name


def test_the_default_is_taken_where_others_can_too() -> None:
    asked = drawn(prompt="a walk")
    assert [choice(asked, (first, second)) for first, second in (("toy-film", "toy-picture"), ("toy-picture", "toy-film"))] == [
        "toy-film",
        "toy-picture",
    ]


@pytest.mark.parametrize("asked", [spoken("video/mp4"), drawn(prompt="a walk"), omni_pb2.GenerateRequest(outputs=["smell"])])
def test_the_only_pipeline_is_asked_whatever_it_can(asked: omni_pb2.GenerateRequest) -> None:
    """It says itself what is wrong, with the field."""
    assert choice(asked, ["toy"]) == "toy"


def test_several_that_can_are_named() -> None:
    with pytest.raises(StageError) as raised:
        choice(drawn(prompt="a walk"))
    error = raised.value
    assert (error.reason, error.metadata) == ("BAD_REQUEST", {"field": "model", "candidates": "toy-film,toy-picture"})
    assert error.message == "model: toy-film, toy-picture: each of them could answer this; name one"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            spoken("video/mp4", text="hi"),
            "toy takes no video; toy-omni takes no video; toy-film has no thinker, takes no video;"
            " toy-picture has no thinker, takes no video",
        ),
        (
            spoken(text="hi", outputs=["video"]),
            "toy gives no video; toy-omni gives no video; toy-film has no thinker; toy-picture has no thinker, gives no video",
        ),
        (
            spoken("a\nb/c"),
            r"toy takes no 'a\nb'; toy-omni takes no 'a\nb'; toy-film has no thinker, takes no 'a\nb';"
            r" toy-picture has no thinker, takes no 'a\nb'",
        ),
    ],
)
def test_where_none_can_each_one_says_what_it_lacks(asked: omni_pb2.GenerateRequest, told: str) -> None:
    with pytest.raises(StageError) as raised:
        choice(asked)
    assert (raised.value.reason, raised.value.metadata) == ("BAD_REQUEST", {"field": "model"})
    assert raised.value.message == f"model: no pipeline does this: {told}"


def test_an_error_of_a_large_table_stays_small() -> None:
    table = {f"{n}-{'x' * 60}": TABLE["toy-picture"].model_copy(update={"name": f"{n}-{'x' * 60}"}) for n in range(100)}
    for asked in (spoken(*["y" * 1000] * 50), omni_pb2.GenerateRequest(outputs=["z" * 5000, "image"])):
        with pytest.raises(StageError) as raised:
            chosen(asked, table)
        assert len(raised.value.status().SerializeToString()) < 4096
    both = {"toy": TABLE["toy"], **table}
    with pytest.raises(StageError) as raised:
        chosen(drawn(prompt="x"), both)
    assert len(raised.value.metadata["candidates"].split(",")) == 8 and len(raised.value.status().SerializeToString()) < 4096


async def test_one_router_in_front_of_several_chains(seed: int) -> None:
    async with AsyncExitStack() as everything:
        stages: list[tuple[str, str]] = []
        for name, kinds in (("toy", CHAIN), ("toy-omni", CHAIN), ("toy-film", ["diffusion"]), ("toy-picture", ["diffusion"])):
            for kind in kinds:
                family = TABLE[name].stages[0].family
                local = await everything.enter_async_context(local_stage(family_logic(family, kind), arena_bytes=64 << 20))
                stages.append((f"{name}/{kind}", local.address))
        router = await everything.enter_async_context(local_router(stages, *TABLE.values()))
        stub = await everything.enter_async_context(omni_stub(router.address))
        by_default = await ask(stub, request("hi", seed))
        by_default.check_toy(seed, "hi")
        seeing = omni_pb2.GenerateRequest(seed=seed, thinker=stage_pb2.ThinkerParams(messages=looked_at()))
        film = omni_pb2.GenerateRequest(seed=seed, outputs=["video"], diffusion=stage_pb2.DiffusionParams(prompt="a walk", frames=4))
        answers = [by_default, await ask(stub, seeing), await ask(stub, film)]
        assert [answer.started.model for answer in answers if answer.started] == ["toy", "toy-omni", "toy-film"]
        named = await ask(stub, request("hi", seed, model="toy-omni"))
        assert named.started is not None and named.started.model == "toy-omni"
        both = await refused(stub, omni_pb2.GenerateRequest(diffusion=film.diffusion))
        assert (both.reason, both.fields, both.metadata["candidates"]) == ("BAD_REQUEST", ["model"], "toy-film,toy-picture")
        none = await refused(stub, request("hi", seed, outputs=["video"]))
        assert (none.reason, none.fields) == ("BAD_REQUEST", ["model"]) and "toy gives no video" in none.message
        hub = await refused(stub, request("hi", seed, model="owner/name"))
        assert (hub.reason, hub.metadata["field"]) == ("UNKNOWN_MODEL", "model")
        await all_free([address for _, address in stages])


def test_words_in_messages_are_text() -> None:
    """A pipeline without text is no candidate for them."""
    silent = TABLE["toy-omni"].model_copy(update={"name": "silent", "inputs": ("image",)})
    asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=messages("hi")))
    assert chosen(asked, {"silent": silent, "toy": TABLE["toy"]}).name == "toy"
    assert chosen(spoken("image/png"), {"toy": TABLE["toy"], "silent": silent}).name == "silent"
