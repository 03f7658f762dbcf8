"""The models that pass the suite of helpers/contract.py: one entry for each kind of each family."""

from __future__ import annotations

import asyncio

import numpy as np

from helpers import media_files
from helpers.contract import Case, SampleRequest
from helpers.logic import run_logic
from helpers.run import params
from helpers.servers import family_logic
from omnistage.models.tiny.qwen2_5_omni import SIZES
from omnistage.models.tiny.qwen3_omni import SIZES as QWEN3_SIZES
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.stage.logic import Input, StageLogic
from omnistage.talker.stage import TalkerStage
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2

PROMPT = "How far is it?"
SPOKEN = "Hello there, and good morning 你好. 🙂 It is a fine day, is it not?"

ROWS = np.stack([formulas.row(formulas.token(3, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH)])


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
    (params("diffusion", "a hill", width=65), "diffusion.width"),
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


def arithmetic_thinker() -> StageLogic:
    from helpers.arithmetic_models import ArithmeticThinker

    return ThinkerStage(ArithmeticThinker())


def tiny_thinker() -> StageLogic:
    from helpers.tiny_thinker import TinyThinker

    return ThinkerStage(TinyThinker())


def arithmetic_talker() -> StageLogic:
    from helpers.arithmetic_models import ArithmeticTalker

    return TalkerStage(ArithmeticTalker())


def wan() -> StageLogic:
    """One film at a time: beside others it is the same to rounding only."""
    from helpers.drawings import checkpoint

    return family_logic("diffusers", "diffusion", {"width": 64, "height": 64, "max_frames": 9, "max_tokens": 96}, checkpoint("wan2.2-t2v"))


def films_alike(found: object, expected: object) -> bool:
    """Whether two files show the same frames: where a film goes on elsewhere, its file goes on with a key frame."""
    from helpers.moving import show_same_frames

    assert isinstance(found, bytes) and isinstance(expected, bytes)
    return show_same_frames(found, expected)


def stable_audio() -> StageLogic:
    from helpers.drawings import checkpoint

    return family_logic("diffusers", "diffusion", {"max_tokens": 130}, checkpoint("stable-audio"))


def looked_only() -> SampleRequest:
    """A question with a picture, whose answer has many rows."""
    given = [stage_pb2.Message(role="user", parts=looked_at()[0].parts[:3])]
    return SampleRequest(params("thinker", messages=given, max_tokens=40))


def until_a_seven() -> SampleRequest:
    """An answer that ends with a stop string, in the middle of a token's text or of several."""
    return SampleRequest(params("thinker", PROMPT, max_tokens=60, stop=["7 1", "00"]))


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


def spoken_by_qwen() -> SampleRequest:
    """Rows of any kind, on places as a picture has them: a few pages, which are read as they come."""
    source = np.random.default_rng(7)
    rows = source.standard_normal((110, SIZES["tiny"]["thinker"]["hidden_size"]), np.float32)
    places = np.stack([np.arange(100) // 10, np.arange(100) % 10, np.arange(100)], 1).astype(np.int32)
    drawn = stage_pb2.Sampling(temperature=1, top_k=40, repetition_penalty=1.05)
    inputs = {"prompt": rows[:100], "places": places, "hidden": rows[100:]}
    return SampleRequest(params("talker", voice="Ethan", max_frames=40, sampling=drawn), inputs)


def spoken_by_qwen3() -> SampleRequest:
    """Rows of text, with those of a picture among them."""
    source = np.random.default_rng(7)
    rows = source.standard_normal((110, QWEN3_SIZES["tiny"]["text"]["hidden_size"]), np.float32)
    seen = (np.arange(100) // 10) % 2
    places = np.stack([np.arange(100) // 10, np.arange(100) % 10, np.arange(100), seen], 1).astype(np.int32)
    drawn = stage_pb2.Sampling(temperature=1, top_k=50, repetition_penalty=1.05)
    inputs = {"prompt": rows[:100], "places": places, "hidden": rows[100:]}
    return SampleRequest(params("talker", voice="ethan", max_frames=20, sampling=drawn), inputs)


def coded_by_qwen() -> SampleRequest:
    """Codes of some windows."""
    codes = np.random.default_rng(8).integers(0, 8193, (90, 1)).astype(np.uint32)
    return SampleRequest(params("code2wav", voice="Ethan"), {"codes": codes})


def framed_by_qwen() -> SampleRequest:
    """More frames than the last one's samples depend on."""
    talker = QWEN3_SIZES["tiny"]["talker"]
    codes = np.random.default_rng(9).integers(0, talker["codes"], (110, talker["groups"])).astype(np.uint32)
    return SampleRequest(params("code2wav"), {"codes": codes})


BAD_SOUND = (
    (params("code2wav", voice="Nobody"), "code2wav.voice"),
    (params("code2wav", profile="quick"), "code2wav.profile"),
)

BAD_SPEECH = (
    (params("talker", voice="Nobody"), "talker.voice"),
    (params("talker", speed=1.5), "talker.speed"),
    (params("talker", sampling=stage_pb2.Sampling(logit_bias={9000: 1.0})), "talker.sampling.logit_bias"),
)

CASES = (
    Case("toy", "thinker", lambda: SampleRequest(params("thinker", PROMPT))),
    Case("toy", "thinker", lambda: SampleRequest(params("thinker", PROMPT, stop=["7 w", "never"])), name="toy-thinker-stop"),
    Case("toy", "thinker", lambda: SampleRequest(params("thinker", verbatim="Say exactly this, please.")), name="toy-thinker-verbatim"),
    Case(
        "toy", "thinker", lambda: SampleRequest(params("thinker", PROMPT, stop=["7 w"])), options={"thinks": 9}, name="toy-thinker-thinks"
    ),
    Case("toy", "talker", lambda: SampleRequest(params("talker"), {"hidden": ROWS})),
    Case("toy", "talker", lambda: SampleRequest(params("talker", max_frames=17), {"hidden": ROWS}), name="toy-talker-limited"),
    Case("toy", "talker", lambda: SampleRequest(params("talker"), {"hidden": ROWS}), options={"mute_every": 3}, name="toy-talker-mute"),
    Case(
        "toy",
        "talker",
        lambda: SampleRequest(params("talker", max_frames=17), {"hidden": ROWS}),
        options={"mute_every": 3},
        name="toy-talker-mute-limited",
    ),
    Case("toy", "code2wav", lambda: SampleRequest(params("code2wav"), {"codes": formulas.frames(ROWS)})),
    Case(
        "toy",
        "code2wav",
        lambda: SampleRequest(params("code2wav", sample_rate_hz=16000), {"codes": formulas.frames(ROWS)}),
        name="toy-code2wav-16000",
    ),
    Case("toy", "diffusion", lambda: SampleRequest(params("diffusion", "a hill", results=3, steps=4, previews=2))),
    Case("toy-omni", "thinker", lambda: SampleRequest(params("thinker", messages=looked_at())), refused=BAD_MEDIA),
    Case("toy-omni", "thinker", lambda: SampleRequest(params("thinker", PROMPT, stop=["7 w"])), name="toy-omni-thinker-stop"),
    Case("toy-omni", "thinker", heard_live, options={"microphone": True}, name="toy-omni-thinker-live"),
    Case("toy-omni", "thinker", streamed, options={"films": True}, name="toy-omni-thinker-streamed"),
    Case("toy-omni", "talker", spoken_rows),
    Case("toy-omni", "code2wav", lambda: SampleRequest(params("code2wav"), {"codes": formulas.omni_frames(ITEMS, TOKENS)})),
    Case("toy-film", "diffusion", lambda: SampleRequest(params("diffusion", "a hill", layers=3, results=2, previews=3)), refused=BAD_FILMS),
    Case("toy-film", "diffusion", edited, name="toy-film-edited"),
    Case(
        "toy-film",
        "diffusion",
        lambda: SampleRequest(params("diffusion", "a hill", results=2, steps=7, previews=2, width=24, height=16)),
        options={"experts": 2, "multistep": True, "workers": 2},
        name="toy-film-experts",
    ),
    Case(
        "toy-film",
        "diffusion",
        lambda: SampleRequest(
            params("diffusion", "a walk", frames=23, duration_s=0.4, negative_prompt="rain", guidance_scale=7, previews=2)
        ),
        name="toy-film-with-sound",
    ),
    Case(
        "diffusers",
        "diffusion",
        lambda: SampleRequest(params("diffusion", "a hill", steps=4, previews=2, width=64, height=64, negative_prompt="rain")),
        refused=BAD_PICTURES,
        # One at a time: beside others a picture is the same to rounding only.
        options={"width": 64, "height": 64, "max_tokens": 64},
        slow=True,
    ),
    Case(
        "diffusers",
        "diffusion",
        lambda: SampleRequest(params("diffusion", "a walk", steps=4, negative_prompt="rain", guidance_scale_2=2)),
        refused=BAD_WAN_FILMS,
        slow=True,
        own=wan,
        alike={"video": films_alike},
        name="diffusers-film",
    ),
    Case(
        "diffusers",
        "diffusion",
        lambda: SampleRequest(params("diffusion", "rain", steps=4, duration_s=1.3, negative_prompt="wind")),
        refused=BAD_SOUNDS,
        slow=True,
        own=stable_audio,
        name="diffusers-sound",
    ),
    Case(
        "toy-film",
        "diffusion",
        lambda: SampleRequest(params("diffusion", "a walk", frames=24, width=256, height=256)),
        options={"max_chunk": 24},
        name="toy-film-large",
    ),
    Case("arithmetic", "thinker", looked_only, refused=BAD_MEDIA[:3], slow=True, own=arithmetic_thinker),
    Case("arithmetic", "thinker", until_a_seven, slow=True, own=arithmetic_thinker, name="arithmetic-thinker-stop"),
    Case("arithmetic", "talker", lambda: SampleRequest(params("talker"), {"hidden": SMALL_ROWS}), slow=True, own=arithmetic_talker),
    Case(
        "tiny",
        "thinker",
        lambda: SampleRequest(params("thinker", PROMPT, max_tokens=20)),
        slow=True,
        own=tiny_thinker,
        name="tiny-thinker-bf16",
    ),
    Case("test-engine", "thinker", looked_only, slow=True),
    Case("test-engine", "talker", spoken_on_the_engine, slow=True),
    Case("qwen2_5_omni", "thinker", seen_and_heard, refused=BAD_PARTS, slow=True, fixture="omni_checkpoint"),
    Case(
        "qwen2_5_omni",
        "thinker",
        lambda: SampleRequest(params("thinker", PROMPT, max_tokens=40, stop=["e"], ignore_eos=True)),
        slow=True,
        fixture="omni_checkpoint",
        name="qwen2_5_omni-thinker-stop",
    ),
    Case(
        "qwen2_5_omni",
        "thinker",
        lambda: SampleRequest(params("thinker", PROMPT, verbatim="It is as far as the eye can see, and a mile more.")),
        slow=True,
        fixture="omni_checkpoint",
        name="qwen2_5_omni-thinker-verbatim",
    ),
    Case("qwen2_5_omni", "talker", spoken_by_qwen, refused=BAD_SPEECH, slow=True, fixture="omni_checkpoint"),
    Case(
        "qwen2_5_omni",
        "code2wav",
        coded_by_qwen,
        refused=BAD_SOUND,
        options={"solver": "euler", "steps": 1},
        slow=True,
        fixture="omni_checkpoint",
    ),
    Case("qwen3_omni", "talker", spoken_by_qwen3, refused=BAD_SPEECH, slow=True, fixture="qwen3_checkpoint"),
    Case("qwen3_omni", "code2wav", framed_by_qwen, refused=BAD_SOUND[1:], slow=True, fixture="qwen3_checkpoint"),
    Case("qwen3_omni", "thinker", seen_and_heard, refused=BAD_PARTS, slow=True, fixture="qwen3_checkpoint"),
    Case(
        "qwen3_omni",
        "thinker",
        lambda: SampleRequest(params("thinker", PROMPT, max_tokens=40, stop=["e"], ignore_eos=True)),
        slow=True,
        fixture="qwen3_checkpoint",
        name="qwen3_omni-thinker-stop",
    ),
    Case(
        "qwen3_omni",
        "thinker",
        lambda: SampleRequest(params("thinker", PROMPT, verbatim="It is as far as the eye can see, and a mile more.")),
        slow=True,
        fixture="qwen3_checkpoint",
        name="qwen3_omni-thinker-verbatim",
    ),
    Case("smol", "thinker", lambda: SampleRequest(params("thinker", PROMPT, max_tokens=12, sampling=SAMPLING, ignore_eos=True)), slow=True),
    Case("smol", "talker", lambda: SampleRequest(params("talker"), {"text": SPOKEN}), slow=True),
    Case("smol", "code2wav", lambda: SampleRequest(params("code2wav"), {"features": smol_features()}), slow=True),
    Case(
        "smol",
        "code2wav",
        lambda: SampleRequest(params("code2wav", sample_rate_hz=16000), {"features": smol_features()}),
        slow=True,
        name="smol-code2wav-16000",
    ),
)
