"""Random questions to an omni model, with media of all kinds, and whether its greedy text is that of a reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from helpers import media_files
from helpers.models import text_pieces
from helpers.omni_reference import ExpectedAnswer, OmniReference
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import Sampling, TextRequest
from omnistage.models.media.decoder import MediaDecoder

TOKENS = 24
LOGPROB = 1e-4
"""By so much a logprob may differ from that of the reference."""

DISTINCT = 12
"""Different tokens that an answer has at least: one that repeats itself would hide what is wrong."""

KINDS = (
    *("text",) * 2,
    *("long text",) * 2,
    *("image",) * 3,
    *("audio",) * 3,
    *("long audio",) * 2,
    *("video",) * 2,
    *("sound in video",) * 3,
    *("images",) * 2,
    *("sounds",) * 2,
    *("videos",) * 1,
    *("everything",) * 2,
)


@dataclass(frozen=True, slots=True)
class ParityQuestion:
    kind: str
    request: TextRequest
    expected: ExpectedAnswer


def _words(source: random.Random, count: int) -> str:
    return " ".join("".join(source.choices("abcdefghijklmnopqrstuvwxyz é", k=source.randint(1, 8))) for _ in range(count))


def _picture(source: random.Random) -> Media:
    form = source.choice(("PNG", "WEBP", "BMP"))
    height, width = source.randint(20, 220), source.randint(20, 220)
    options = {"lossless": True} if form == "WEBP" else {}
    return Media(f"image/{form.lower()}", media_files.picture(source.getrandbits(30), height, width, form, **options))


def _sound(source: random.Random, least_s: float = 0.1, most_s: float = 5) -> Media:
    rate_hz = source.choice((8000, 16000, 44100))
    return Media("audio/wav", media_files.sound(source.getrandbits(30), source.uniform(least_s, most_s), rate_hz))


def _film(source: random.Random, *, heard: bool, least_s: float = 0.1) -> Media:
    frames = source.randint(4, 60)
    made = media_files.film(source.getrandbits(30), frames, sound_s=max(frames / 10 + source.uniform(-0.2, 1), least_s) if heard else 0.0)
    return Media("video/mp4", made, use_audio=heard)


def parts(kind: str, source: random.Random, least_s: float = 0.1) -> tuple[Part, ...]:
    """The parts of a question, with words between media. least_s: the least length of each of several sounds."""
    match kind:
        case "text":
            return (_words(source, source.randint(1, 20)),)
        case "long text":
            return (_words(source, 150),)
        case "image":
            return (_words(source, 3), _picture(source), _words(source, 3))
        case "audio":
            return (_sound(source), _words(source, 3))
        case "long audio":
            return (_sound(source, 20, 40), _words(source, 3))
        case "video":
            return (_film(source, heard=False), _words(source, 3))
        case "sound in video":
            return (_words(source, 2), _film(source, heard=True), _words(source, 2))
        case "images":
            return (_picture(source), *(_picture(source) for _ in range(source.randint(0, 1))), _words(source, 2), _picture(source))
        case "sounds":
            return (_sound(source, least_s), _words(source, 2), _sound(source, least_s))
        case "videos":
            return (_film(source, heard=False), _words(source, 2), _film(source, heard=False))
    return (_picture(source), _words(source, 1), _film(source, heard=True, least_s=least_s), _sound(source, least_s), _words(source, 4))


def earlier(source: random.Random) -> list[Turn]:
    """The turns of a conversation that went on for a while."""
    return [Turn("user", (_words(source, 3), _picture(source))), Turn("assistant", (_words(source, 4),))]


def turns(kind: str, source: random.Random, least_s: float = 0.1) -> tuple[Turn, ...]:
    """A conversation that ends with such a question."""
    asked = [Turn("user", parts(kind, source, least_s))]
    if source.random() < 0.4:
        asked = [*earlier(source), *asked]
    if source.random() < 0.4:
        asked = [Turn("system", (_words(source, 6),)), *asked]
    return tuple(asked)


async def requests(
    kinds: list[str], reference: OmniReference, never: frozenset[int], source: random.Random, least_s: float = 0.1
) -> list[ParityQuestion]:
    """Questions and their answers, each with enough different tokens. least_s: see parts."""
    made, decoder = list[ParityQuestion](), MediaDecoder()
    for number, kind in enumerate(kinds):
        penalty = 1.3 if number % 3 == 0 else 1.0
        while True:
            conversation = turns(kind, source, least_s)
            seen = await reference.read(conversation, decoder)
            expected = reference.answer(conversation, seen, TOKENS, never, repetition_penalty=penalty)
            if len(set(expected.tokens)) >= DISTINCT:
                break
        drawn = Sampling(repetition_penalty=penalty)
        asked = TextRequest(conversation, seed=0, sampling=drawn, max_tokens=TOKENS, ignore_eos=True, logprobs=True)
        made.append(ParityQuestion(kind, asked, expected))
    await decoder.close()
    return made


async def agreement(model: MediaThinker, asked: ParityQuestion) -> int:
    """Tokens at which the model went another way than the reference, where two were almost equally good. After each it goes on from the
    token of the reference. All others are the same, and so are their logprobs."""
    history, ties = tuple[int, ...](), 0
    expected = asked.expected.tokens
    while len(history) < TOKENS:
        pieces = await text_pieces(model, replace(asked.request, history=history))
        made = [*history, *(token_id for piece in pieces for token_id in piece.token_ids)]
        told = [value for piece in pieces for value in piece.logprobs]
        assert len(made) == TOKENS == len(told) + len(history)
        differing = [place for place in range(TOKENS) if made[place] != expected[place]]
        alike = slice(len(history), differing[0] if differing else TOKENS)
        known, told = asked.expected.logprobs[alike], told[: alike.stop - alike.start]
        furthest = max((abs(mine - theirs) for mine, theirs in zip(told, known, strict=True)), default=0.0)
        assert furthest <= LOGPROB, f"{asked.kind}: {told} is not {known}, by {furthest}"
        if not differing:
            break
        place = differing[0]
        assert asked.expected.close[place], f"{asked.kind}: {made} is not {expected}, from {place} on"
        history, ties = tuple(expected[: place + 1]), ties + 1
    return ties
