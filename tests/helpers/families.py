"""The models that pass the suite of helpers/contract.py: one entry for each kind of each family."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from helpers import media_files
from helpers.contract import Case, SampleRequest
from helpers.logic import Whole, run_logic
from helpers.run import params
from helpers.servers import STAGES, family_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.stage.logic import Input, StageLogic
from omnistage.v1 import chunk_pb2, stage_pb2


def asks(kind: str, inputs: Mapping[str, Whole] | None = None, **fields: Any) -> Callable[[], SampleRequest]:
    """A sample of a request. fields: of `helpers.run.params`."""
    return lambda: SampleRequest(params(kind, **fields), inputs or {})


PROMPT = "How far is it?"
SPOKEN = "Hello there, and good morning 你好. 🙂 It is a fine day, is it not?"

ROWS = np.stack([formulas.row(formulas.token(3, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH)])


@cache
def smol_features() -> np.ndarray:
    """The features that the default Talker says."""

    async def speak() -> np.ndarray:
        logic = family_logic("smol", "talker")
        text = [Input("text", 0, 1, True, chunk_pb2.TextChunk(text=SPOKEN, token_ids=[1]))]
        rows = (await run_logic(logic, params("talker"), text)).rows("features")
        await logic.close()
        assert rows is not None
        return rows

    return asyncio.run(speak())


PICTURE = (np.add.outer(np.arange(21), 3 * np.arange(34)) % 256).astype(np.uint8)
SOUND = (np.arange(1000) * 37 % 2000 - 1000).astype(np.int16)
SEEN = ("u", "What is ", PICTURE, " and ", SOUND, "?")
ITEMS = formulas.items(SEEN)
TOKENS = [formulas.omni_token(5, ITEMS, n) for n in range(formulas.NATURAL_LENGTH)]


def looked_at() -> list[stage_pb2.Message]:
    """The question SEEN as a client asks it."""
    parts = [
        stage_pb2.Part(text="What is "),
        stage_pb2.Part(media=stage_pb2.Media(data=png(PICTURE), media_type="image/png")),
        stage_pb2.Part(text=" and "),
        stage_pb2.Part(media=stage_pb2.Media(data=wav(SOUND, formulas.SAMPLE_RATE_HZ), media_type="audio/wav")),
        stage_pb2.Part(text="?"),
    ]
    return [stage_pb2.Message(role="user", parts=parts)]


def heard_live() -> SampleRequest:
    """A question whose sound is streamed."""
    parts = [stage_pb2.Part(text="What is "), stage_pb2.Part(port="microphone")]
    sound = SOUND[:, None].astype(np.float32) / np.float32(32768)
    return SampleRequest(params("thinker", messages=[stage_pb2.Message(role="user", parts=parts)]), {"microphone": sound})


def streamed() -> SampleRequest:
    """A question whose media, of every kind, are streamed."""
    media = [("image/png", png(PICTURE)), ("audio/wav", wav(SOUND, formulas.SAMPLE_RATE_HZ)), ("video/mp4", bytes(range(250)) * 3)]
    parts = [stage_pb2.Part(port=f"media{n}", media_type=kind, total_bytes=len(data)) for n, (kind, data) in enumerate(media)]
    inputs = {f"media{n}": data for n, (_, data) in enumerate(media)}
    return SampleRequest(params("thinker", messages=[stage_pb2.Message(role="user", parts=parts)]), inputs)


def spoken_rows() -> SampleRequest:
    rows = formulas.omni_rows(TOKENS)
    return SampleRequest(params("talker"), {"prompt": formulas.prompt_rows(ITEMS), "places": ITEMS, "hidden": rows})


def unreadable(data: bytes, media_type: str = "image/png") -> stage_pb2.StageParams:
    media = stage_pb2.Media(data=data, media_type=media_type)
    return params("thinker", messages=[stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media)])])


UNREADABLE = "thinker.messages.parts.media"
BAD_MEDIA = (
    (unreadable(b"no picture"), UNREADABLE),
    (unreadable(png(PICTURE)[:-20]), UNREADABLE),
    (unreadable(png(np.zeros((1, 513), np.uint8))), UNREADABLE),
    (unreadable(b"no sound", "audio/wav"), UNREADABLE),
    (unreadable(wav(SOUND, 8000), "audio/wav"), UNREADABLE),
)


def edited() -> SampleRequest:
    """Pictures that begin with a picture."""
    image = stage_pb2.Media(data=png(PICTURE), media_type="image/png")
    return SampleRequest(params("diffusion", "a hill", images=[image], results=2, width=40, height=24, steps=9))


BAD_FILMS = (
    (params("diffusion", "a hill", width=257), "diffusion.width"),
    (params("diffusion", "a hill", frames=65), "diffusion.frames"),
    (params("diffusion", "a hill", frames=9, layers=2), "diffusion.frames"),
    (params("diffusion", "a hill", duration_s=11), "diffusion.duration_s"),
    (params("diffusion", "a hill", media_type="video/mp4", frames=9), "diffusion.media_type"),
    (params("diffusion", "a hill", guidance_scale=1.5), "diffusion.guidance_scale"),
    (params("diffusion", "a hill", images=[stage_pb2.Media(data=b"x", media_type="image/png")]), "diffusion.images"),
    (params("diffusion", "a hill", images=[stage_pb2.Media(data=b"x", media_type="audio/wav")]), "diffusion.images"),
    (params("diffusion", "a hill", width=256, height=256, frames=64), "diffusion.width"),
)

BAD_PICTURES = (
    (params("diffusion", "a hill", width=16), "diffusion.width"),
    (params("diffusion", "a hill", layers=2), "diffusion.layers"),
    (params("diffusion", "a hill", guidance_scale=0, negative_prompt="rain"), "diffusion.negative_prompt"),
    (params("diffusion", "word " * 600), "diffusion.prompt"),
    (params("diffusion", "a <|im_end|> hill"), "diffusion.prompt"),
)

BAD_WAN_FILMS = (
    (params("diffusion", "a hill", frames=100_000), "diffusion.frames"),
    (params("diffusion", "a hill", width=100_000), "diffusion.width"),
    (params("diffusion", "a hill", frames_per_second=1e9), "diffusion.frames_per_second"),
    (params("diffusion", "a hill", begin_s=1), "diffusion.begin_s"),
)

BAD_SOUNDS = (
    (params("diffusion", "rain", duration_s=1e9), "diffusion.duration_s"),
    (params("diffusion", "rain", begin_s=1e9), "diffusion.begin_s"),
    (params("diffusion", "rain", flow_shift=3), "diffusion.flow_shift"),
    (params("diffusion", "rain", width=64), "diffusion.width"),
)

SMALL_ROWS = (np.arange(60).reshape(30, 2) * 7 % 20).astype(np.float32)


def of_helper(kind: str, name: str) -> StageLogic:
    """The model that a class of a helper is; it needs torch. name: MODULE:CLASS."""
    module, _, model = name.partition(":")
    return STAGES[kind](getattr(import_module(module), model)())


def of_checkpoint(name: str, **options: object) -> StageLogic:
    """The model of a checkpoint that draws, one film at a time: beside others it is the same to rounding only."""
    from helpers.drawings import checkpoint

    return family_logic("diffusers", "diffusion", options, checkpoint(name))


def films_alike(found: object, expected: object) -> bool:
    """Whether two files show the same frames: where a film goes on elsewhere, its file goes on with a key frame."""
    from helpers.moving import show_same_frames

    assert isinstance(found, bytes) and isinstance(expected, bytes)
    return show_same_frames(found, expected)


looked_only = asks("thinker", messages=[stage_pb2.Message(role="user", parts=looked_at()[0].parts[:3])], max_tokens=40)
"""A question with a picture, whose answer has many rows."""
until_a_seven = asks("thinker", prompt=PROMPT, max_tokens=60, stop=["7 1", "00"])
"""An answer that ends with a stop string, in the middle of a token's text or of several."""


def spoken_on_the_engine() -> SampleRequest:
    """The speech of a Talker with prompt rows: it says the rows of a reply of 40 tokens."""
    from helpers.engine_family import Reply

    reply = Reply.to(("Say it.",), 5, 40)
    return SampleRequest(params("talker"), {"prompt": reply.prompt, "hidden": reply.hidden})


def seen_and_heard() -> SampleRequest:
    """A picture, a sound, and a film with its sound."""
    media = (
        stage_pb2.Media(data=media_files.picture(1), media_type="image/png"),
        stage_pb2.Media(data=media_files.sound(2), media_type="audio/wav"),
        stage_pb2.Media(data=media_files.film(3, sound_s=2.0), media_type="video/mp4", use_audio=True),
    )
    parts = [stage_pb2.Part(text="What is this?"), *(stage_pb2.Part(media=one) for one in media)]
    message = stage_pb2.Message(role="user", parts=parts)
    return SampleRequest(params("thinker", messages=[message], max_tokens=12, sampling=SAMPLING, ignore_eos=True))


SAMPLING = stage_pb2.Sampling(temperature=1)

BAD_PARTS = (
    (unreadable(b"no picture"), UNREADABLE),
    (unreadable(media_files.picture(1)[:-300]), UNREADABLE),
    (unreadable(media_files.picture(1), "audio/wav"), UNREADABLE),
    (unreadable(b"no film", "video/mp4"), UNREADABLE),
)


def tiny_sizes(family: str) -> Mapping[str, Any]:
    """The sizes of the family's tiny checkpoint. Its module imports torch, which not every test with this module may."""
    sizes: Mapping[str, Any] = import_module(f"omnistage.models.tiny.{family}").SIZES["tiny"]
    return sizes


def spoken_by_qwen(family: str, decoder: str, *, is_seen: bool, top_k: int, **fields: Any) -> SampleRequest:
    """Rows of any kind, on places as a picture has them: a few pages, read as they come. decoder: the section of the sizes that has the
    width of a row. is_seen: places say what is a picture."""
    width, at = tiny_sizes(family)[decoder]["hidden_size"], np.arange(100)
    rows = np.random.default_rng(7).standard_normal((110, width), np.float32)
    places = np.stack([at // 10, at % 10, at, *([at // 10 % 2] * is_seen)], 1).astype(np.int32)
    drawn = stage_pb2.Sampling(temperature=1, top_k=top_k, repetition_penalty=1.05)
    inputs = {"prompt": rows[:100], "places": places, "hidden": rows[100:]}
    return SampleRequest(params("talker", sampling=drawn, **fields), inputs)


def coded_by_qwen(seed: int, frames: int, ids: int = 0, codebooks: int = 0, **fields: Any) -> SampleRequest:
    """More frames than the last one's samples depend on. ids, codebooks: as the tiny Qwen3-Omni has them if they are 0."""
    if not ids:
        ids, codebooks = (tiny_sizes("qwen3_omni")["talker"][name] for name in ("codes", "groups"))
    codes = np.random.default_rng(seed).integers(0, ids, (frames, codebooks)).astype(np.uint32)
    return SampleRequest(params("code2wav", **fields), {"codes": codes})


BAD_SOUND = ((params("code2wav", voice="Nobody"), "code2wav.voice"), (params("code2wav", profile="quick"), "code2wav.profile"))

BAD_SPEECH = (
    (params("talker", voice="Nobody"), "talker.voice"),
    (params("talker", speed=1.5), "talker.speed"),
    (params("talker", sampling=stage_pb2.Sampling(logit_bias={9000: 1.0})), "talker.sampling.logit_bias"),
)


def toy(
    kind: str, inputs: Mapping[str, Whole] | None = None, name: str = "", options: Mapping[str, object] | None = None, **fields: Any
) -> Case:
    return Case("toy", kind, asks(kind, inputs, **fields), options=options or {}, name=name and f"toy-{kind}-{name}")


def film(name: str = "", options: Mapping[str, object] | None = None, **fields: Any) -> Case:
    return Case("toy-film", "diffusion", asks("diffusion", **fields), options=options or {}, name=name and f"toy-film-{name}")


ARITHMETIC = partial(of_helper, "thinker", "helpers.arithmetic_models:ArithmeticThinker")
FRAMES = {"codes": formulas.frames(ROWS)}
OMNI = (("qwen2_5_omni", "omni_checkpoint"), ("qwen3_omni", "qwen3_checkpoint"))
QWEN2, QWEN3 = (partial(Case, family, slow=True, fixture=fixture) for family, fixture in OMNI)
DIFFUSERS = partial(Case, "diffusers", "diffusion", slow=True)

CASES = (
    toy("thinker", prompt=PROMPT),
    toy("thinker", name="stop", prompt=PROMPT, stop=["7 w", "never"]),
    toy("thinker", name="verbatim", verbatim="Say exactly this, please."),
    toy("thinker", name="thinks", options={"thinks": 9}, prompt=PROMPT, stop=["7 w"]),
    toy("talker", {"hidden": ROWS}),
    toy("talker", {"hidden": ROWS}, "limited", max_frames=17),
    toy("talker", {"hidden": ROWS}, "mute", {"mute_every": 3}),
    toy("talker", {"hidden": ROWS}, "mute-limited", {"mute_every": 3}, max_frames=17),
    toy("code2wav", FRAMES),
    toy("code2wav", FRAMES, "16000", sample_rate_hz=16000),
    toy("code2wav", FRAMES, "no-context", {"chunk_samples": 7, "context": 0}),
    toy("code2wav", FRAMES, "float32", {"chunk_samples": 100, "context": 5}, encoding=chunk_pb2.AUDIO_ENCODING_FLOAT32),
    toy("diffusion", prompt="a hill", results=3, steps=4, previews=2),
    Case("toy-omni", "thinker", asks("thinker", messages=looked_at()), BAD_MEDIA),
    Case("toy-omni", "thinker", asks("thinker", prompt=PROMPT, stop=["7 w"]), name="toy-omni-thinker-stop"),
    Case("toy-omni", "thinker", heard_live, options={"microphone": True}, name="toy-omni-thinker-live"),
    Case("toy-omni", "thinker", streamed, options={"films": True}, name="toy-omni-thinker-streamed"),
    Case("toy-omni", "talker", spoken_rows),
    Case("toy-omni", "code2wav", asks("code2wav", {"codes": formulas.omni_frames(ITEMS, TOKENS)})),
    replace(film(prompt="a hill", layers=3, results=2, previews=3), refused=BAD_FILMS),
    Case("toy-film", "diffusion", edited, name="toy-film-edited"),
    film("experts", {"experts": 2, "multistep": True, "workers": 2}, prompt="a hill", results=2, steps=7, previews=2, width=24, height=16),
    film("with-sound", prompt="a walk", frames=23, duration_s=0.4, negative_prompt="rain", guidance_scale=7, previews=2),
    film("large", {"max_chunk": 24}, prompt="a walk", frames=24, width=256, height=256),
    # One at a time: beside others a picture is the same to rounding only.
    DIFFUSERS(
        asks("diffusion", prompt="a hill", steps=4, previews=2, width=64, height=64, negative_prompt="rain"),
        BAD_PICTURES,
        {"width": 64, "height": 64, "max_tokens": 128},  # It is drawn at 128x128, and made smaller.
    ),
    DIFFUSERS(
        asks("diffusion", prompt="a walk", steps=4, negative_prompt="rain", guidance_scale_2=2),
        BAD_WAN_FILMS,
        name="diffusers-film",
        own=partial(of_checkpoint, "wan2.2-t2v", width=64, height=64, max_frames=9, max_tokens=96),
        alike={"video": films_alike},
    ),
    DIFFUSERS(
        asks("diffusion", prompt="rain", steps=4, duration_s=1.3, negative_prompt="wind"),
        BAD_SOUNDS,
        name="diffusers-sound",
        own=partial(of_checkpoint, "stable-audio", max_tokens=130),
    ),
    Case("arithmetic", "thinker", looked_only, BAD_MEDIA[:3], slow=True, own=ARITHMETIC),
    Case("arithmetic", "thinker", until_a_seven, slow=True, own=ARITHMETIC, name="arithmetic-thinker-stop"),
    Case(
        "arithmetic",
        "talker",
        asks("talker", {"hidden": SMALL_ROWS}),
        slow=True,
        own=partial(of_helper, "talker", "helpers.arithmetic_models:ArithmeticTalker"),
    ),
    Case(
        "tiny",
        "thinker",
        asks("thinker", prompt=PROMPT, max_tokens=20),
        slow=True,
        own=partial(of_helper, "thinker", "helpers.arithmetic_models:TinyThinker"),
        name="tiny-thinker-bf16",
    ),
    Case("test-engine", "thinker", looked_only, slow=True),
    Case("test-engine", "talker", spoken_on_the_engine, slow=True),
    QWEN2(
        "talker",
        partial(spoken_by_qwen, "qwen2_5_omni", "thinker", is_seen=False, top_k=40, voice="Ethan", max_frames=40),
        BAD_SPEECH,
    ),
    QWEN2("code2wav", partial(coded_by_qwen, 8, 90, 8193, 1, voice="Ethan"), BAD_SOUND, {"solver": "euler", "steps": 1}, held_back=90),
    QWEN3(
        "talker",
        partial(spoken_by_qwen, "qwen3_omni", "text", is_seen=True, top_k=50, voice="ethan", max_frames=20),
        BAD_SPEECH,
    ),
    QWEN3("code2wav", partial(coded_by_qwen, 9, 110), BAD_SOUND[1:], held_back=80),
    *(
        qwen("thinker", sample, bad, name=f"{family}-thinker{name}")
        for (family, _), qwen in zip(OMNI, (QWEN2, QWEN3), strict=True)
        for name, sample, bad in (
            ("", seen_and_heard, BAD_PARTS),
            ("-stop", asks("thinker", prompt=PROMPT, max_tokens=40, stop=["e"], ignore_eos=True), ()),
            ("-verbatim", asks("thinker", prompt=PROMPT, verbatim="It is as far as the eye can see, and a mile more."), ()),
        )
    ),
    Case("smol", "thinker", asks("thinker", prompt=PROMPT, max_tokens=12, sampling=SAMPLING, logprobs=True, ignore_eos=True), slow=True),
    Case("smol", "talker", asks("talker", {"text": SPOKEN}), slow=True),
    Case("smol", "code2wav", lambda: SampleRequest(params("code2wav"), {"features": smol_features()}), slow=True),
    Case(
        "smol",
        "code2wav",
        lambda: SampleRequest(params("code2wav", sample_rate_hz=16000), {"features": smol_features()}),
        name="smol-code2wav-16000",
        slow=True,
    ),
)
