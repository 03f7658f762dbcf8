"""Which pipeline answers a request that names none: the default if it can, else the only one that can; else the client is told. And which
prompts are drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from helpers.ask import ask, refused, request
from helpers.families import looked_at
from helpers.run import messages
from helpers.servers import all_free, family_logic, local_router, local_stage, omni_stub
from omnistage.client.connection import CHECKPOINTS
from omnistage.gateway.offer import ABILITIES as OFFERED
from omnistage.router.pipeline import load_pipeline
from omnistage.router.request import ABILITIES, choose_pipeline, validate
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


CALLED = {
    "toy": TABLE["toy"].with_names(["Owner/One", "shared", "TOY", "toy-film", "one"]),
    "toy-film": TABLE["toy-film"].with_names(["Owner/Two", "Shared"]),
}
"""Pipelines with further names."""


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("toy", "toy"),
        ("TOY", "toy"),
        ("Owner/One", "toy"),
        ("owner/ONE", "toy"),
        ("One", "toy"),
        ("owner/two", "toy-film"),
        ("Toy-Film", "toy-film"),  # Toy has this as a further name, and it shadows nothing.
    ],
)
def test_a_pipeline_is_asked_by_each_of_its_names(word: str, name: str) -> None:
    assert choose_pipeline(omni_pb2.GenerateRequest(model=word), CALLED)[0].pipeline.name == name
    assert CALLED["toy"].names == ("Owner/One", "shared", "toy-film", "one"), "its own is no further one"


@pytest.mark.parametrize(
    ("word", "reason", "message"),
    [
        ("SHARED", "BAD_REQUEST", "toy, toy-film: each of them is also called 'SHARED'; name one"),
        ("two", "UNKNOWN_MODEL", "no pipeline 'two'; this router has toy (Owner/One), toy-film (Owner/Two)"),
        ("Owner/", "UNKNOWN_MODEL", "no pipeline 'Owner/'; this router has toy (Owner/One), toy-film (Owner/Two)"),
    ],
)
def test_a_name_of_two_or_of_none_is_refused_with_those_that_there_are(word: str, reason: str, message: str) -> None:
    with pytest.raises(StageError, match=re.escape(message)) as raised:
        choose_pipeline(omni_pb2.GenerateRequest(model=word), CALLED)
    assert (raised.value.reason, raised.value.metadata["field"]) == (reason, "model")
    assert raised.value.metadata.get("candidates") == ("toy,toy-film" if reason == "BAD_REQUEST" else None)


def choice(asked: omni_pb2.GenerateRequest, table: Sequence[str] = tuple(TABLE)) -> str:
    return choose_pipeline(asked, {name: TABLE[name] for name in table})[0].pipeline.name


def error_of(asked: omni_pb2.GenerateRequest, table: Sequence[str] = tuple(TABLE)) -> StageError:
    with pytest.raises(StageError) as raised:
        choice(asked, table)
    return raised.value


def looked(*types: str, text: str = "a walk", **fields: object) -> omni_pb2.GenerateRequest:
    """A prompt with pictures that have something in them, and all fields that a request may have beside."""
    asked = spoken(*types, text=text, seed=7, request_id="r", conversation_id="c", batches=True, revisions=["1"], **fields)
    for number, part in enumerate(asked.thinker.messages[0].parts[:-1]):
        part.media.data, part.media.background = bytes([number]), "#000000"
    return asked


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
    for table in (("toy-film", "toy-picture"), ("toy-picture", "toy-film")):
        assert choice(drawn(prompt="a walk"), table) == table[0]


@pytest.mark.parametrize("asked", [spoken("video/mp4"), drawn(prompt="a walk"), omni_pb2.GenerateRequest(outputs=["smell"])])
def test_the_only_pipeline_is_asked_whatever_it_can(asked: omni_pb2.GenerateRequest) -> None:
    """It says itself what is wrong, with the field."""
    assert choice(asked, ["toy"]) == "toy"


def test_several_that_can_are_named() -> None:
    error = error_of(drawn(prompt="a walk"))
    assert (error.reason, error.metadata) == ("BAD_REQUEST", {"field": "model", "candidates": "toy-film,toy-picture"})
    assert error.message == "toy-film, toy-picture: each of them could answer this; name one"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            spoken(text="hi", outputs=["video", "text"]),
            "toy gives no video; toy-omni gives no video; toy-film does not answer, gives no text;"
            " toy-picture does not answer, gives no text, gives no video",
        ),
        (
            drawn("audio/wav", prompt="a walk"),
            "toy does not draw, takes no audio; toy-omni does not draw; toy-film takes no audio; toy-picture takes no audio;"
            " these draw: toy-film, toy-picture",
        ),
        (
            drawn("audio/wav", prompt="a walk", outputs=["video", "progress"]),
            "toy makes no films, takes no audio, gives no video; toy-omni makes no films, gives no video; toy-film takes no audio;"
            " toy-picture takes no audio, gives no video; these make films: toy-film",
        ),
        (
            spoken("a\nb/c"),
            r"toy takes no 'a\nb'; toy-omni takes no 'a\nb'; toy-film does not answer, takes no 'a\nb';"
            r" toy-picture does not answer, takes no 'a\nb'",
        ),
    ],
)
def test_where_none_can_each_one_says_what_it_lacks(asked: omni_pb2.GenerateRequest, told: str) -> None:
    error = error_of(asked)
    assert (error.reason, error.metadata) == ("BAD_REQUEST", {"field": "model"})
    assert error.message == f"no pipeline does this: {told}"


def test_who_asks_for_a_drawing_is_told_who_draws_such() -> None:
    told = error_of(drawn("video/mp4", prompt="rain", outputs=["audio"])).message
    assert told.endswith("; these make sound of a prompt: toy-film")


@pytest.mark.parametrize(
    ("question", "table", "lack", "words"),
    [
        (drawn(prompt="a walk", outputs=["video"]), ["toy", "toy-picture"], "video", "makes films"),
        (looked(outputs=["video"]), ["toy", "toy-picture"], "video", "makes films"),
        (drawn(prompt="rain", outputs=["audio"]), ["toy", "toy-picture"], "sound", "makes sound of a prompt"),
        (drawn(prompt="a walk", outputs=["image"]), ["toy", "toy-omni"], "image", "draws"),
        (drawn("image/png", prompt="a walk"), ["toy", "toy-omni"], "drawing", "draws"),
        (drawn("image/png", prompt="a walk"), ["toy", "toy-picture"], "edit", "draws from pictures"),
        (spoken(text="hi", outputs=["text", "audio"]), ["toy-film", "toy-picture"], "answer", "answers"),
        (spoken(text="hi", outputs=["audio"]), ["toy-picture", "toy-picture-2"], "speech", "speaks"),
        (spoken("image/png", text="hi"), ["toy", "toy-film"], "sees", "looks at pictures"),
        (spoken("audio/wav", text="hi"), ["toy", "toy-film"], "hears", "listens to sound"),
        (streamed("audio/wav"), ["toy", "toy-film"], "hears", "listens to sound"),
        (spoken("video/mp4", text="hi"), list(TABLE), "watches", "watches films"),
    ],
)
def test_what_nothing_here_does_is_said_in_a_sentence(question: omni_pb2.GenerateRequest, table: list[str], lack: str, words: str) -> None:
    """A pipeline that speaks gives sound too, but not from a prompt; and one that draws from pictures looks at none to answer."""
    second = TABLE["toy-picture"].model_copy(update={"name": "toy-picture-2"})
    pipelines = {name: {**TABLE, "toy-picture-2": second}[name] for name in table}
    with pytest.raises(StageError) as raised:
        choose_pipeline(question, pipelines)
    assert (raised.value.message, raised.value.metadata) == (f"nothing here {words}", {"field": "model", "lack": lack})
    assert lack in CHECKPOINTS, "the client names one"


def test_a_checkpoint_is_named_for_everything_that_may_be_lacking() -> None:
    assert CHECKPOINTS.keys() == ABILITIES.keys() >= {each.lack for each in OFFERED}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (drawn(prompt="a walk", outputs=["video"], model="toy"), "toy makes no films; toy-film does"),
        (drawn(prompt="rain", outputs=["audio"], model="toy"), "toy makes no sound of a prompt; toy-film does"),
        (drawn(prompt="a walk", outputs=["image"], model="toy"), "toy does not draw; toy-film, toy-picture do"),
        (
            drawn(prompt="a walk", outputs=["video", "progress"], model="toy-picture"),
            "outputs: toy-picture gives image, progress, not 'video'; toy-film does",
        ),
        (spoken(text="hi", outputs=["smell"], model="toy"), "outputs: toy gives text, audio, not 'smell'"),
        (spoken(text="hi", outputs=["image"], model="toy"), "outputs: toy gives text, audio, not 'image'"),
    ],
)
def test_a_named_pipeline_that_cannot_is_refused_with_those_that_can(asked: omni_pb2.GenerateRequest, told: str) -> None:
    with pytest.raises(StageError) as raised:
        validate(asked, TABLE)
    assert raised.value.message == told


def test_progress_is_left_out_where_it_is_not_told() -> None:
    still = TABLE["toy-picture"].model_copy(update={"name": "still", "outputs": ("image",)})
    table = {"toy": TABLE["toy"], "still": still}
    assert validate(drawn(prompt="a walk", outputs=["image", "progress"]), table).outputs == {"image"}
    with pytest.raises(StageError, match="outputs: still gives image, not 'progress'"):
        validate(drawn(prompt="a walk", outputs=["progress"], model="still"), table)
    told = {"toy": TABLE["toy"], "toy-picture": TABLE["toy-picture"]}
    assert validate(drawn(prompt="a walk", outputs=["image", "progress"]), told).outputs == {"image", "progress"}


def test_an_error_of_a_large_table_stays_small() -> None:
    table = {f"{n}-{'x' * 60}": TABLE["toy-picture"].model_copy(update={"name": f"{n}-{'x' * 60}"}) for n in range(100)}
    for asked in (spoken(*["y" * 1000] * 50), omni_pb2.GenerateRequest(outputs=["z" * 5000, "image"])):
        with pytest.raises(StageError) as raised:
            choose_pipeline(asked, table)
        assert len(raised.value.status().SerializeToString()) < 4096
    both = {"toy": TABLE["toy"], **table}
    with pytest.raises(StageError) as raised:
        choose_pipeline(drawn(prompt="x"), both)
    assert len(raised.value.metadata["candidates"].split(",")) == 8 and len(raised.value.status().SerializeToString()) < 4096


async def test_one_router_in_front_of_several_chains(seed: int) -> None:
    async with AsyncExitStack() as everything:
        stages: list[tuple[str, str]] = []
        for name, pipeline in TABLE.items():
            for stage in pipeline.stages:
                logic = family_logic(stage.family, stage.kind)
                local = await everything.enter_async_context(local_stage(logic, arena_bytes=64 << 20))
                stages.append((f"{name}/{stage.kind}", local.address))
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
        none = await refused(stub, request("hi", seed, outputs=["video", "text"]))
        assert (none.reason, none.fields) == ("BAD_REQUEST", ["model"]) and "toy gives no video" in none.message
        walk = request("a walk", seed, outputs=["image"], model="toy-picture")
        both_ways = [await ask(stub, walk), await ask(stub, drawn(prompt="a walk", seed=seed, model="toy-picture"))]
        prompted, as_drawing = (
            b"".join(chunk.image.SerializeToString(deterministic=True) for chunk in answer.of("image")) for answer in both_ways
        )
        assert prompted == as_drawing != b""
        hub = await refused(stub, request("hi", seed, model="owner/name"))
        assert (hub.reason, hub.metadata["field"]) == ("UNKNOWN_MODEL", "model")
        await all_free([address for _, address in stages])


def test_words_in_messages_are_text() -> None:
    """A pipeline without text is no candidate for them."""
    silent = TABLE["toy-omni"].model_copy(update={"name": "silent", "inputs": ("image",)})
    asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=messages("hi")))
    assert choose_pipeline(asked, {"silent": silent, "toy": TABLE["toy"]})[0].pipeline.name == "toy"
    assert choose_pipeline(spoken("image/png"), {"toy": TABLE["toy"], "silent": silent})[0].pipeline.name == "silent"


# Prompts that are drawn ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "types", "table", "name"),
    [
        ({}, (), ["toy-picture"], "toy-picture"),
        ({"model": "toy-picture"}, (), list(TABLE), "toy-picture"),
        ({"outputs": ["video"]}, (), list(TABLE), "toy-film"),
        ({"outputs": ["image", "progress"]}, (), ["toy", "toy-omni", "toy-picture"], "toy-picture"),
        ({"outputs": ["video"]}, ("image/png", "Image/webp"), ["toy", "toy-film"], "toy-film"),
        ({"diffusion": stage_pb2.DiffusionParams(width=64)}, ("image/png",), ["toy", "toy-film"], "toy-film"),
        ({"model": "toy-film"}, ("image/png",), list(TABLE), "toy-film"),
        ({"diffusion": stage_pb2.DiffusionParams(width=64)}, (), ["toy", "toy-picture"], "toy-picture"),
        ({"resume": omni_pb2.GenerateRequest(resume=stage_pb2.Resume()).resume}, (), ["toy-picture", "toy-film"], "toy-picture"),
    ],
)
def test_a_prompt_is_drawn_where_only_drawing_can_be_meant(
    fields: dict[str, object], types: tuple[str, ...], table: list[str], name: str
) -> None:
    """All else that the request says stays as it is."""
    asked = looked(*types, **fields)  # type: ignore[arg-type]
    expected = omni_pb2.GenerateRequest()
    expected.CopyFrom(asked)
    expected.ClearField("thinker")
    expected.diffusion.prompt = "a walk"
    for number, media_type in enumerate(types):
        expected.diffusion.images.add(data=bytes([number]), media_type=media_type, background="#000000")
    assert choice(asked, table) == name
    assert asked == expected


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (looked(), "toy"),
        (looked("image/png"), "toy-omni"),
        (looked(model="toy"), "toy"),
        (looked(model="toy", outputs=["image"]), "toy"),
        (spoken("audio/wav", model="toy-picture"), "toy-picture"),
        (looked(model="toy-picture", diffusion=stage_pb2.DiffusionParams(prompt="another")), "toy-picture"),
    ],
)
def test_what_can_be_answered_or_is_no_prompt_is_not_drawn(asked: omni_pb2.GenerateRequest, name: str) -> None:
    before = asked.SerializeToString(deterministic=True)
    assert choice(asked) == name
    assert asked.SerializeToString(deterministic=True) == before


def test_a_question_about_a_picture_that_nobody_sees_is_not_drawn() -> None:
    with pytest.raises(StageError, match="nothing here looks at pictures"):
        choice(looked("image/png", text="What is this?"), ["toy", "toy-film"])


@pytest.mark.parametrize(
    "turns",
    [
        [("system", "Be brief."), ("user", "a walk")],
        [("system", "a walk")],
        [("user", "a walk"), ("assistant", "Done."), ("user", "at night")],
    ],
)
def test_a_conversation_is_no_prompt(turns: list[tuple[str, str]]) -> None:
    said = [stage_pb2.Message(role=role, parts=[stage_pb2.Part(text=text)]) for role, text in turns]
    asked = omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(messages=said), outputs=["image"])
    with pytest.raises(StageError, match=r"no pipeline does this: .*toy-picture does not answer"):
        choice(asked)


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("thinker", {"max_tokens": 5}, "thinker.max_tokens"),
        ("thinker", {"stop": ["x"]}, "thinker.stop"),
        ("thinker", {"sampling": stage_pb2.Sampling(top_k=5)}, "thinker.sampling.top_k"),
        ("thinker", {"constraint": stage_pb2.Constraint(regex="a")}, "thinker.constraint.regex"),
        ("talker", {"voice": "toy"}, "talker.voice"),
        ("code2wav", {"sample_rate_hz": 8000}, "code2wav.sample_rate_hz"),
    ],
)
@pytest.mark.parametrize("named", [{"model": "toy-picture"}, {"outputs": ["image"]}], ids=["named", "meant"])
def test_what_a_drawing_has_no_use_for_is_refused(kind: str, fields: dict[str, object], field: str, named: dict[str, object]) -> None:
    asked = looked(**named)  # type: ignore[arg-type]
    getattr(asked, kind).MergeFrom(type(getattr(asked, kind))(**fields))
    error = error_of(asked, ["toy", "toy-picture"])
    assert (error.reason, error.metadata) == ("BAD_REQUEST", {"field": field})
    told = "is for text and sound, and toy-picture only draws: leave it out; it takes the fields of diffusion"
    assert error.message == f"{field}: {told}"


def test_a_picture_to_draw_from_is_not_streamed() -> None:
    asked = streamed("image/png")
    asked.model = "toy-film"
    with pytest.raises(StageError, match=r"port media0: toy-film only draws, .* is not streamed: ask for a drawing") as raised:
        choice(asked, ["toy", "toy-film"])
    assert raised.value.metadata == {"field": "thinker.messages.parts.port", "port": "media0"}


def test_where_several_could_draw_a_prompt_they_are_named() -> None:
    error = error_of(looked(outputs=["image"]))
    assert error.metadata == {"field": "model", "candidates": "toy-film,toy-picture"}
    assert choice(looked(outputs=["image"]), ["toy-picture", "toy-film"]) == "toy-picture", "the default of those that can"
