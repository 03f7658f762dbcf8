"""The Thinker with media: the same tokens after a resume; what it keeps of media, and when."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import lengths, media_files
from helpers.checkpoints import change_json
from helpers.models import said, text_pieces
from omnistage.models.conversation import Media, Part, Streamed, Turn
from omnistage.models.encoders.reader import OTHERS
from omnistage.models.encoders.thinker import MAX_MEDIA, MEDIA_FIELD
from omnistage.models.interface import BadRequest, FinishReason, Piece, Sampling, TensorRows, TextPiece, TextRequest, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker, load_thinker

DRAWN = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05, presence_penalty=0.2)
TOKENS = 24


def loaded(folder: Path, **settings: object) -> Qwen2_5Thinker:
    return load_thinker(folder, LoadOptions(path=folder, dtype="float32", **settings))  # type: ignore[arg-type]


def picture(seed: int, height: int = 60, width: int = 80) -> Media:
    return Media("image/png", media_files.picture(seed, height, width))


def sound(seed: int) -> Media:
    return Media("audio/flac", media_files.sound(seed, form="FLAC"))


def film(seed: int) -> Media:
    return Media("video/mp4", media_files.film(seed, sound_s=2), use_audio=True)


def asked(seed: int, *parts: Part, tokens: int = TOKENS) -> TextRequest:
    return TextRequest((Turn("user", (*parts, "What is this?")),), seed=seed, sampling=DRAWN, max_tokens=tokens, ignore_eos=True)


def questions(seed: int) -> list[TextRequest]:
    """One of each kind, twice over."""
    kinds: list[tuple[Part, ...]] = [(), (picture(seed),), (sound(seed),), (film(seed),)]
    return [asked(seed + n, *kinds[n % 4]) for n in range(8)]


async def tokens(thinker: Qwen2_5Thinker, request: TextRequest) -> tuple[int, ...]:
    return tokens_of(await text_pieces(thinker, request))


def tokens_of(pieces: Sequence[TextPiece | TensorRows]) -> tuple[int, ...]:
    return tuple(token_id for piece in pieces if isinstance(piece, TextPiece) for token_id in piece.token_ids)


@lengths.rounds(6, 50)
async def test_it_goes_on_after_any_token(thinker: Qwen2_5Thinker, rounds: int, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(rounds):
        request = source.choice(questions(seed))
        whole = await tokens(thinker, request)
        cut = source.randrange(1, TOKENS)
        assert await tokens(thinker, replace(request, history=whole[:cut])) == whole[cut:]


@pytest.mark.parametrize("is_given", [False, True], ids=["an answer", "text that is given"])
async def test_a_history_becomes_text_on_a_thread(
    thinker: Qwen2_5Thinker, is_given: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is, others run meanwhile."""
    piece, threads = thinker.tokenizer.piece, list[str]()

    def noted(token_id: int) -> bytes:
        threads.append(threading.current_thread().name)
        return piece(token_id)

    text = "All that was said and heard before. " * 40
    ids = thinker.tokenizer.encode(text)
    answer = replace(asked(seed, tokens=len(ids)), history=ids, finished=FinishReason.LENGTH)
    request = TextRequest((), seed, verbatim=text, history=ids) if is_given else answer
    monkeypatch.setattr(thinker.tokenizer, "piece", noted)
    async with aclosing(said(thinker, request, {"text": 0} if is_given else {"prompt": 0})) as pieces:
        assert [piece async for piece in pieces]
    assert threads == ["tokenizer"] * len(ids)


async def rows(
    thinker: Qwen2_5Thinker, request: TextRequest, ports: Sequence[str] = ("text", "prompt", "hidden")
) -> tuple[int, dict[str, np.ndarray]]:
    """Tokens of the prompt that were found computed, and the rows of each port. ports: those that are wanted."""
    found, made = 0, dict[str, list[np.ndarray]]()
    async with aclosing(said(thinker, request, dict.fromkeys(ports, 0))) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece):
                assert "text" in ports
                found += piece.cached_tokens
            elif len(piece.rows):
                made.setdefault(piece.port, []).append(piece.rows.copy())
    return found, {port: np.concatenate(parts) for port, parts in made.items()}


async def test_text_that_is_given_has_the_rows_of_an_answer(thinker: Qwen2_5Thinker, seed: int) -> None:
    """As if the model had thought of it: its Talker says it in the same way."""
    text = "Up is down, é and \U0001f600 too: " * 9
    ids = thinker.tokenizer.encode(text)
    given = TextRequest(asked(seed).turns, seed, verbatim=text, stop=("down",))
    pieces = [piece async for piece in said(thinker, given, {"text": 0, "prompt": 0, "hidden": 0})]
    heard = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    assert (heard, tokens_of(pieces)) == (text, ids)
    assert {piece.port for piece in pieces if isinstance(piece, TensorRows) and piece.last} == {"prompt", "hidden"}
    answer = replace(asked(seed), history=ids, finished=FinishReason.STOP, max_tokens=len(ids) + 1)
    ports = ("prompt", "hidden")
    (_, expected), (_, made) = await rows(thinker, answer, ports), await rows(thinker, given, ports)
    assert len(made["hidden"]) == len(ids)
    assert all(np.array_equal(made[port], expected[port]) for port in ports)
    rest = [piece async for piece in said(thinker, replace(given, history=ids[:5]), {"text": 5, "hidden": 3})]
    hidden = np.concatenate([piece.rows for piece in rest if isinstance(piece, TensorRows) and len(piece.rows)])
    assert tokens_of(rest) == ids[5:] and np.array_equal(hidden, expected["hidden"][3:])


@pytest.mark.parametrize("end", ["no room", "a stop string", "an end"])
async def test_the_token_that_was_drawn_last_has_a_row_only_where_an_end_was_drawn(thinker: Qwen2_5Thinker, end: str, seed: int) -> None:
    """As the published Talker has it; nothing more is drawn for the sake of a row, and an answer that goes on has the same rows."""
    free = await text_pieces(thinker, asked(seed))
    ids, text = tokens_of(free), "".join(piece.text for piece in free)
    request = asked(seed)
    if end == "a stop string":
        request = replace(request, stop=(text[12:15],))
    elif end == "an end":  # One that is drawn as a bias has it.
        bias = dict.fromkeys(thinker.tokenizer.ends, 100.0)
        request = replace(request, ignore_eos=False, min_tokens=7, sampling=replace(DRAWN, logit_bias=bias))
    drawn = thinker.engine.stats().items
    pieces = [piece async for piece in said(thinker, request, {"text": 0, "hidden": 0})]
    came, reason = tokens_of(pieces), [piece for piece in pieces if isinstance(piece, TextPiece)][-1].finish_reason
    hidden = np.concatenate([piece.rows for piece in pieces if isinstance(piece, TensorRows) and len(piece.rows)])
    if end == "no room":
        assert (came, reason) == (ids, FinishReason.LENGTH) and thinker.engine.stats().items == drawn + TOKENS
        assert len(hidden) == TOKENS - 1
    elif end == "an end":
        assert reason is FinishReason.STOP and len(hidden) == len(came) == 7
    else:
        assert reason is FinishReason.STOP and 0 < len(hidden) < len(came) < TOKENS
    finished = replace(request, history=came, finished=reason)
    assert np.array_equal((await rows(thinker, finished, ("hidden",)))[1]["hidden"], hidden)


async def test_text_that_is_given_needs_no_conversation(thinker: Qwen2_5Thinker, seed: int) -> None:
    given = TextRequest((), seed, verbatim="Hello there.")
    _, made = await rows(thinker, given, ("prompt", "hidden"))
    assert len(made["hidden"]) == len(thinker.tokenizer.encode("Hello there.")) and len(made["prompt"])


async def test_media_beside_text_that_is_given_are_refused(thinker: Qwen2_5Thinker, seed: int) -> None:
    """Nobody would look at them."""
    for part in (Media("image/png", b"this is no picture"), Streamed("media0", "image/png")):
        with pytest.raises(BadRequest, match="leave the media out") as refused:
            await thinker.prepare(replace(asked(seed, part), verbatim="Hello there."))
        assert refused.value.field == MEDIA_FIELD


async def test_media_that_come_without_a_type_are_asked_for_it(thinker: Qwen2_5Thinker, seed: int) -> None:
    with pytest.raises(BadRequest, match="media0: is not given: say what the media are, such as image/png") as refused:
        await thinker.prepare(asked(seed, Streamed("media0", "")))
    assert refused.value.field == "thinker.messages.parts.media_type"


async def test_text_that_is_given_and_has_no_room_is_refused(omni_checkpoint: Path, seed: int) -> None:
    thinker = loaded(omni_checkpoint, family={"context": 128, "medium_rows": 64})
    with pytest.raises(BadRequest, match=r"thinker.verbatim: shorten the text: it has \d+ tokens, the conversation has room for"):
        await thinker.prepare(replace(asked(seed), verbatim="zq" * 100))
    await thinker.close()


async def test_a_picture_that_is_known_is_neither_encoded_nor_read_again(thinker: Qwen2_5Thinker, omni_checkpoint: Path, seed: int) -> None:
    """And its rows have the bits that they have where nothing is kept."""
    request = asked(seed, picture(seed, 200, 300), film(seed))
    first, made = await rows(thinker, request)
    found, again = await rows(thinker, replace(request, seed=seed + 1))
    bare = loaded(omni_checkpoint, enable_cache=False)
    none, computed = await rows(bare, request)
    await bare.close()
    assert first < 64 <= found and none == 0
    for port in ("prompt", "hidden"):
        assert np.array_equal(made[port], computed[port])
    assert np.array_equal(made["prompt"], again["prompt"])
    assert made["prompt"].shape[0] > found


async def test_media_that_are_streamed_are_those_that_are_sent(thinker: Qwen2_5Thinker, seed: int) -> None:
    """However they are cut and mixed; what is known of one is known of the other."""
    source = random.Random(seed)
    sent = [picture(seed, 200, 300), sound(seed), film(seed)]
    parts = [Streamed(f"media{n}", one.media_type, one.use_audio, len(one.data)) for n, one in enumerate(sent)]
    request = asked(seed, parts[0], sent[1], parts[2])
    text = [piece async for piece in thinker.generate(await thinker.prepare(request), cut_up(sent, (0, 2), source), {"text": 0})]
    again = await text_pieces(thinker, asked(seed, *sent))
    assert tokens_of(text) == tokens_of(again)
    assert sum(piece.cached_tokens for piece in again) >= 64
    with pytest.raises(BadRequest, match="more than 67108864 bytes, the most of image/png"):
        await thinker.prepare(asked(seed, replace(parts[0], total_bytes=(64 << 20) + 1)))
    with pytest.raises(BadRequest, match=r"thinker.messages.parts.media: medium 1: "):
        broken = [Media("video/mp4", bytes(1000))]
        prepared = await thinker.prepare(asked(seed, Streamed("media0", "video/mp4")))
        async for _ in thinker.generate(prepared, cut_up(broken, (0,), source), {"text": 0}):
            pass


@pytest.mark.parametrize("background", [None, (30, 200, 90)])
async def test_a_transparent_picture_is_seen_on_its_ground_however_it_comes(
    thinker: Qwen2_5Thinker, seed: int, background: tuple[int, int, int] | None
) -> None:
    """Sent and streamed, to the row as the same picture without transparency."""
    clear = np.dstack([media_files.pixels(seed, 200, 300), np.full((200, 300), 255, np.uint8)])
    clear[50:, 100:, 3] = 0
    flat = clear[..., :3].copy()
    flat[50:, 100:] = background or (255, 255, 255)
    sent, expected = (Media("image/png", media_files.encoded(Image.fromarray(one)), background=background) for one in (clear, flat))
    streamed = asked(seed, Streamed("media0", "image/png", total_bytes=len(sent.data), background=background))
    _, on_ground = await rows(thinker, asked(seed, expected))
    _, as_sent = await rows(thinker, replace(asked(seed, sent), scope="another"))
    assert np.array_equal(as_sent["prompt"], on_ground["prompt"])
    inputs = cut_up([sent], (0,), random.Random(seed))
    pieces = [piece async for piece in thinker.generate(await thinker.prepare(streamed), inputs, {"prompt": 0})]
    assert np.array_equal(np.concatenate([piece.rows for piece in pieces if isinstance(piece, TensorRows)]), on_ground["prompt"])


async def cut_up(media: list[Media], streamed: tuple[int, ...], source: random.Random) -> AsyncIterator[Piece]:
    left = dict.fromkeys(streamed, 0)
    while left:
        number = source.choice(sorted(left))
        data = media[number].data[left[number] : left[number] + source.randint(1, 5000)]
        left[number] += len(data)
        last = left[number] == len(media[number].data)
        yield Piece(f"media{number}", left[number] - len(data), last, data)
        if last:
            del left[number]


async def test_what_was_asked_otherwise_is_not_found(thinker: Qwen2_5Thinker, omni_checkpoint: Path, seed: int) -> None:
    """Another picture, other sizes of pictures, another ground, the film without its sound, another kind of medium, another client."""
    one = film(seed)

    def digest(part: Media, scope: str = "", thinker: Qwen2_5Thinker = thinker) -> bytes:
        return thinker.reader.medium(part, part.data, part.digest, scope=scope, client="").digest

    small = loaded(omni_checkpoint, family={"medium_rows": 600})
    assert small.info.revision != thinker.info.revision
    digests = [
        digest(one),
        digest(one, "other"),
        digest(replace(one, use_audio=False)),
        digest(replace(one, media_type="image/png")),
        digest(replace(one, background=(0, 0, 0))),
        digest(replace(one, media_type="image/png", background=(0, 0, 0))),
        digest(film(seed + 1)),
        digest(one, thinker=small),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(replace(one)) == digests[0]
    await small.close()
    await rows(thinker, asked(seed, picture(seed, 200, 300)))
    found, _ = await rows(thinker, asked(seed, picture(seed + 1, 200, 300)))
    assert found < 64


async def test_a_question_that_is_given_up_while_media_are_read_leaves_nothing(thinker: Qwen2_5Thinker, seed: int) -> None:
    source = random.Random(seed)
    whole = await tokens(thinker, asked(seed, film(seed)))
    for n in range(8):
        task = asyncio.create_task(tokens(thinker, asked(seed, film(seed + n), picture(seed + n), tokens=20_000)))
        await asyncio.sleep(source.uniform(0, 0.3))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        load = thinker.load()
        assert (load.queued, load.kv_pages_used) == (0, 0)
    assert await tokens(thinker, asked(seed, film(seed))) == whole


async def test_who_waits_for_media_is_counted_as_waiting(thinker: Qwen2_5Thinker, seed: int) -> None:
    """Those that are read, and those that are not even begun."""
    count = OTHERS + 3
    prepared = [await thinker.prepare(asked(seed, picture(seed + n), tokens=2)) for n in range(count)]
    runs = [thinker.generate(one, inputs_of(), {"text": 0}) for one in prepared]
    tasks = [asyncio.create_task(anext(run)) for run in runs]
    await asyncio.sleep(0)
    assert thinker.load().queued == count
    await asyncio.gather(*tasks)
    assert thinker.load().queued == 0
    for run in runs:
        await run.aclose()


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (Media("image/png", b"no picture"), "medium 1"),
        (Media("image/jpeg", media_files.picture(1, form="JPEG")[:-400]), "medium 1"),
        (Media("audio/wav", media_files.sound(1, 0.0005)), "too short"),
        (Media("audio/wav", media_files.picture(1)), "medium 1"),
        (Media("video/mp4", media_files.film(1), use_audio=True), "sound"),
    ],
    ids=["nothing", "truncated", "short", "picture as sound", "silent film"],
)
async def test_media_that_cannot_be_read_are_told_and_the_next_is_answered(
    thinker: Qwen2_5Thinker, part: Media, told: str, seed: int
) -> None:
    with pytest.raises(BadRequest, match=told) as refused:
        await tokens(thinker, asked(seed, part))
    assert refused.value.field == MEDIA_FIELD
    assert len(await tokens(thinker, asked(seed, picture(seed)))) == TOKENS


async def test_a_token_that_is_in_no_answer_is_in_no_history(copied: Path, seed: int) -> None:
    """Special ones, those that only end an answer, and what the checkpoint says that ends one, though it is text."""
    change_json(copied / "generation_config.json", lambda generation: generation.update(eos_token_id=[300]))
    thinker = loaded(copied)
    special = thinker.tokenizer.special.values()
    assert 300 not in special and thinker.tokenizer.ends & set(special)
    for token_id in {300, *special, *thinker.tokenizer.ends}:
        with pytest.raises(BadRequest, match=rf"resume.history: token {token_id} is in no answer"):
            await thinker.prepare(replace(asked(seed), history=(301, token_id, 302)))
    await thinker.prepare(replace(asked(seed), history=(301, 302)))
    await thinker.close()


@lengths.long_form(
    "models/qwen2_5_omni/test_loading.py::test_replicas_with_about_as_much_memory_have_the_same_context",
    unkept="another context is another revision",
)
async def test_where_an_answer_ends_elsewhere_it_does_not_go_on(omni_checkpoint: Path, seed: int) -> None:
    """Replicas whose contexts differ, by options or by the memory that is free, have unlike revisions."""
    models = [loaded(omni_checkpoint, family={"context": context, "medium_rows": 64}) for context in (300, 320)]
    ends = [len(await tokens(thinker, asked(seed, tokens=1000))) for thinker in models]
    assert ends[0] < ends[1] and models[0].info.revision != models[1].info.revision
    for thinker in models:
        await thinker.close()


async def test_a_prompt_that_is_too_long_is_told_before_it_is_encoded(omni_checkpoint: Path, seed: int) -> None:
    thinker = loaded(omni_checkpoint, family={"context": 1024})
    with pytest.raises(BadRequest, match="has room for"):
        await tokens(thinker, asked(seed, *(film(seed + n) for n in range(3))))
    with pytest.raises(BadRequest, match=f"at most {MAX_MEDIA} media"):
        await tokens(thinker, asked(seed, *[picture(seed)] * (MAX_MEDIA + 1)))
    answer = await text_pieces(thinker, asked(seed, picture(seed), tokens=2000))
    assert answer[-1].finish_reason is FinishReason.LENGTH
    await thinker.close()
