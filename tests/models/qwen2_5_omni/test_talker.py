"""The Talker: when it speaks, that it waits without holding others up, says the same beside others and after any cut, what it refuses."""

from __future__ import annotations

import asyncio
import pickle
import random
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.checkpoints import change_json
from helpers.models import ROW_PORTS, RowInputs
from helpers.waiting import until
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.conversation import Turn
from omnistage.models.interface import BadRequest, Frames, Sampling, SpeechRequest, TensorRows, TextPiece, TextRequest, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import read_talker_config
from omnistage.models.qwen2_5_omni.talker import Qwen2_5Talker, load_talker
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker
from omnistage.models.qwen2_5_omni.voices import VoiceSizes, read_voices

DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05)
FRAMES = 60
ENDLESS = Sampling(logit_bias=dict.fromkeys((8292, 8294), -100.0))


def asked(seed: int, tokens: int = 20, words: str = "What is it?") -> TextRequest:
    return TextRequest((Turn("user", (words,)),), seed=seed, sampling=Sampling(temperature=1), max_tokens=tokens, ignore_eos=True)


def speech(seed: int, voice: str = "", frames: int = FRAMES) -> SpeechRequest:
    return SpeechRequest(seed, voice, DRAWN, max_frames=frames)


async def rows_of(thinker: Qwen2_5Thinker, request: TextRequest) -> list[TensorRows]:
    wanted = {"text": 0, **dict.fromkeys(ROW_PORTS, 0)}
    async with aclosing(thinker.generate(await thinker.prepare(request), inputs_of(), wanted)) as pieces:
        return [piece async for piece in pieces if isinstance(piece, TensorRows)]


async def spoken(talker: Qwen2_5Talker, rows: list[TensorRows], request: SpeechRequest) -> list[int]:
    line = RowInputs()
    for piece in rows:
        line.put(piece)
    return [code for frames in await all_of(talker.speak(await talker.prepare(request), line.inputs(), {"codes": 0})) for code in frames]


async def all_of(frames: AsyncGenerator[Frames, None]) -> list[list[int]]:
    async with aclosing(frames):
        return [made.rows[:, 0].tolist() async for made in frames]


async def test_the_row_of_a_token_comes_with_the_next_token(thinker: Qwen2_5Thinker, seed: int) -> None:
    """So the first one is there with two tokens, the eleventh with twelve; later only where a character is not whole."""
    tokens, rows, log = 0, 0, list[tuple[int, int]]()
    request = asked(seed, 40)
    async with aclosing(thinker.generate(await thinker.prepare(request), inputs_of(), {"text": 0, "hidden": 0})) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece):
                log.append((tokens, rows))
                tokens += len(piece.token_ids)
            else:
                rows += len(piece.rows)
    assert log[0] == (0, 0) and len(log) > 2
    late = [before - 1 - after for before, after in log[1:]]
    assert min(late) == 0 and late.count(0) > len(late) // 2 and (tokens, rows) == (40, 39)


def joined(rows: list[TensorRows]) -> list[TensorRows]:
    """The rows of each port in one piece, those of the answer last."""
    parts = {port: [piece.rows for piece in rows if piece.port == port and len(piece.rows)] for port in ROW_PORTS}
    return [TensorRows(port, np.concatenate(parts[port]), last=True) for port in ROW_PORTS]


def in_parts(rows: list[TensorRows], source: random.Random) -> list[TensorRows]:
    """The same rows in other pieces, those of each port in order, ports in any order."""
    parts = dict[str, list[TensorRows]]()
    for whole in joined(rows):
        cuts = sorted(source.sample(range(1, len(whole.rows)), min(source.randrange(6), len(whole.rows) - 1)))
        pieces = np.split(whole.rows, cuts)
        parts[whole.port] = [TensorRows(whole.port, piece, last=number == len(cuts)) for number, piece in enumerate(pieces)]
    order = [port for port, pieces in parts.items() for _ in pieces]
    source.shuffle(order)
    return [parts[port].pop(0) for port in order]


WORDS = "What is it, and what else? " * 12
"""A text of more rows than a few pages have."""


async def test_a_conversation_is_read_while_it_comes(thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, seed: int) -> None:
    """Whole pages, as soon as their rows are there and it is known where all stand."""
    prompt, places, hidden = joined(await rows_of(thinker, asked(seed, words=WORDS)))
    whole = await spoken(talker, [prompt, places, hidden], replace(speech(seed), scope="whole"))
    count, line, before = len(prompt.rows), RowInputs(), talker.engine.stats().rows
    assert count > 100
    line.put(TensorRows("prompt", prompt.rows[:70]))
    async with aclosing(talker.speak(await talker.prepare(replace(speech(seed), scope="parts")), line.inputs(), {"codes": 0})) as frames:
        first = asyncio.ensure_future(anext(frames))
        line.put(places)
        for come in (70, 95, 96):
            line.put(TensorRows("prompt", prompt.rows[line.rows["prompt"] : come]))
            await until(lambda come=come: talker.engine.stats().rows - before == come // PAGE_ROWS * PAGE_ROWS)  # type: ignore[misc]
        line.put(TensorRows("prompt", prompt.rows[96:], last=True))
        line.put(hidden)
        made = [await first, *[each async for each in frames]]
    assert np.concatenate([each.rows[:, 0] for each in made]).tolist() == whole


@lengths.rounds(6, 60)
async def test_however_the_rows_come_it_says_the_same(
    thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, omni_checkpoint: Path, rounds: int, seed: int
) -> None:
    """Many at once, in a cache that has not room for all of them, and beside one whose rows stop coming until the others have its pages."""
    small = load_talker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32", kv_cache_bytes=1024 * row_bytes(talker)))
    source = random.Random(seed)
    answers = [await rows_of(thinker, asked(seed + n, 10, WORDS * times)) for n, times in enumerate((3, 3, 1, 2, 1, 3))]
    assert sum(len(piece.rows) for piece in answers[0] if piece.port == "prompt") > 512
    expected = [await spoken(talker, rows, speech(seed, frames=20)) for rows in answers]

    async def check(number: int) -> None:
        line, n = RowInputs(), number % len(answers)
        pieces, request = in_parts(answers[n], source), replace(speech(seed, frames=20), scope=str(number))
        if number == 0:
            prompt, places, hidden = joined(answers[n])
            pieces = [places, TensorRows("prompt", prompt.rows[:-1]), TensorRows("prompt", prompt.rows[-1:], last=True), hidden]
        speaking = asyncio.create_task(all_of(small.speak(await small.prepare(request), line.inputs(), {"codes": 0})))
        for piece in pieces:
            if number == 0 and len(piece.rows) == 1:
                await until(lambda: small.engine.stats().preempted == 1)
            line.put(piece)
            await asyncio.sleep(source.random() * 0.02)
        assert [code for made in await speaking for code in made] == expected[n]

    for first in range(0, rounds, 6):
        await asyncio.gather(*map(check, range(first, first + 6)))
    assert small.engine.stats().preemptions > 0 and small.engine.stats().pages_used == 0
    await small.close()


@lengths.drawn_cells(1, "end", ["closed", "cut short", "bad"])
@lengths.drawn_cells(2, "share", [0.0, 0.3, 1.0])
async def test_an_opening_that_does_not_end_leaves_nothing(
    thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, end: str, share: float, seed: int
) -> None:
    """share: of the rows of the conversation that had come."""
    prompt, places, hidden = joined(await rows_of(thinker, asked(seed, words=WORDS)))
    line, rows = RowInputs(), prompt.rows[: round(share * len(prompt.rows))]
    line.put(places)
    line.put(TensorRows("prompt", rows, last=share == 1))
    request, before = replace(speech(seed), scope=f"{end} {share}"), talker.engine.stats().rows
    speaking = asyncio.create_task(all_of(talker.speak(await talker.prepare(request), line.inputs(), {"codes": 0})))
    await until(lambda: talker.engine.stats().rows - before == len(rows) // PAGE_ROWS * PAGE_ROWS)
    if end == "closed":
        speaking.cancel()
        await asyncio.wait([speaking])
    else:
        if end == "bad":
            line.put(TensorRows("prompt", np.concatenate([prompt.rows, prompt.rows[:1]])))
        else:
            line.end()
        with pytest.raises(BadRequest, match="give each row one" if end == "bad" else "ended before the last one"):
            await speaking
    stats = talker.engine.stats()
    assert (stats.pages_used, stats.waiting, stats.running, stats.starved) == (0, 0, 0, 0)
    assert await spoken(talker, [prompt, places, hidden], request) == await spoken(talker, [prompt, places, hidden], speech(seed))


def in_places(talker: Qwen2_5Talker, places: np.ndarray[Any, Any]) -> list[TensorRows]:
    rows = np.zeros((len(places), talker.config.row_size), np.float32)
    return [
        TensorRows("places", places.astype(np.int32), last=True),
        TensorRows("prompt", rows, last=True),
        TensorRows("hidden", rows, last=True),
    ]


def upto(last: int) -> np.ndarray[Any, Any]:
    """40 places of a conversation that ends in this one, as a film has them."""
    return np.repeat(np.linspace(0, last, 40)[:, None], 3, axis=1)


@pytest.mark.parametrize("frames", [0, 5, 11, 50])
async def test_speech_has_as_many_frames_as_there_are_places_for(talker: Qwen2_5Talker, frames: int, seed: int) -> None:
    """Places outrun their rows. The voice, the first code and each further one but the last need one."""
    context = talker.engine.spec.context
    for left in (12, 3, 2):
        request = replace(speech(seed, frames=frames), sampling=ENDLESS)
        codes = await spoken(talker, in_places(talker, upto(context - 1 - left)), request)
        assert len(codes) == min(frames or left - 1, left - 1)


@pytest.mark.parametrize("past", [-5, 0, 1, 1000])
@pytest.mark.parametrize("frames", [0, 20])
async def test_places_beyond_the_context_are_refused(talker: Qwen2_5Talker, past: int, frames: int, seed: int) -> None:
    places = upto(talker.engine.spec.context - 2 + past) if past >= 0 else upto(past)
    for history in (None, np.array([[7]], np.uint32)):
        with pytest.raises(BadRequest, match="places" if past >= 0 else "positions must lie between 0 and") as refused:
            await spoken(talker, in_places(talker, places), replace(speech(seed, frames=frames), history=history))
        assert refused.value.field == "thinker.messages"
    assert talker.engine.stats().pages_used == 0


def row_bytes(talker: Qwen2_5Talker) -> int:
    """The bytes of the keys and values of a row, and of the row that was given."""
    return page_bytes(talker.engine.spec) // PAGE_ROWS + talker.config.row_size * talker.engine.spec.dtype.itemsize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_rows_that_were_given_are_counted_with_keys_and_values(omni_checkpoint: Path, dtype: str) -> None:
    usual = load_talker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype=dtype))
    told = int(usual.info.settings["kv_cache_bytes"].partition(",")[0])
    assert usual.engine.stats().pages_total == told // row_bytes(usual) // PAGE_ROWS
    room = 2048 * row_bytes(usual)
    small = load_talker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype=dtype, kv_cache_bytes=room))
    assert small.engine.stats().pages_total == 2048 // PAGE_ROWS
    assert "for 2048 tokens" in small.info.settings["kv_cache_bytes"] and "2048 of the" in small.info.settings["context"]
    await small.close()
    await usual.close()


async def test_the_thread_that_reads_rows_is_watched(thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, seed: int) -> None:
    rows = await rows_of(thinker, asked(seed))
    before = {thread.name: thread.steps for thread in talker.threads}
    await spoken(talker, rows, speech(seed))
    stepped = {thread.name for thread in talker.threads if thread.steps > before[thread.name]}
    assert stepped == {"omnistage-engine", "rows"}


# Files ---------------------------------------------------------------------------------------------------------------------------------

Voices = dict[str, Any]


def _token(value: object) -> Callable[[Voices], object]:
    return lambda voices: voices["Ethan"].update(bos_token=value)


def _vector(value: torch.Tensor) -> Callable[[Voices], object]:
    return lambda voices: voices["Ethan"].update(cond=value)


BAD_VOICES: dict[str, tuple[Callable[[Voices], object], str]] = {
    "none": (lambda voices: voices.clear(), "has no voices"),
    "a token that there is not": (_token(1 << 20), "'bos_token' is 1048576, which is no token of the Thinker"),
    "a token that is no number": (_token("a"), "'bos_token' is a, which"),
    "no vector": (lambda voices: voices["Ethan"].pop("cond"), "has no tensor 'cond'"),
    "a vector of another size": (lambda voices: voices["Ethan"].update(cond=torch.zeros(1, 3)), r"'cond' is \[1, 3\], not \[1, 24\]"),
    "an example of another size": (lambda voices: voices["Ethan"].update(ref_mel=torch.zeros(1, 5, 7)), r"'ref_mel' is \[1, 5, 7\]"),
    "an example of nothing": (lambda voices: voices["Ethan"].update(ref_mel=torch.zeros(1, 0, 80)), r"'ref_mel' is \[1, 0, 80\]"),
    "a token of numbers without memory": (_token(torch.tensor(5, device="meta")), "'bos_token' is tensor"),
    "a vector without memory": (_vector(torch.zeros(1, 24, device="meta")), "has no tensor 'cond'"),
    "a sparse vector": (_vector(torch.zeros(1, 24).to_sparse()), "has no tensor 'cond'"),
    "a vector of another type": (_vector(torch.zeros(1, 24).to(torch.float8_e4m3fn)), "'cond' is of torch.float8_e4m3fn, not of"),
    "numbers that are none": (lambda voices: voices["Ethan"]["cond"].fill_(torch.nan), "'cond' has numbers that are not finite"),
    "no table": (lambda voices: voices.update({"Ethan": [7]}), "'Ethan' is no table"),
}


@pytest.mark.parametrize(("change", "told"), BAD_VOICES.values(), ids=BAD_VOICES)
def test_voices_that_do_not_fit_are_named(copied: Path, change: Callable[[Voices], object], told: str) -> None:
    path = copied / "spk_dict.pt"
    voices = torch.load(path, weights_only=True)
    change(voices)
    path.unlink()
    torch.save(voices, path)
    refused(copied, told)


def test_a_table_of_voices_that_is_none_is_told(copied: Path) -> None:
    whole = (path := copied / "spk_dict.pt").read_bytes()
    path.unlink()
    for data in (b"", b"no table", whole[: len(whole) // 2], b"cos\nsystem\n(S'true'\ntR."):
        path.write_bytes(data)
        refused(copied, "cannot be read as a table of voices")
    torch.save([1, 2], path)
    refused(copied, "has no voices")
    path.unlink()
    refused(copied, "spk_dict.pt")


def test_a_table_of_voices_that_ends_in_the_middle_of_a_number_is_told(copied: Path) -> None:
    path = copied / "spk_dict.pt"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, pickle.PROTO + b"\x02" + pickle.BININT + b"\x01" if name.endswith("/data.pkl") else data)
    refused(copied, "cannot be read as a table of voices: unpack requires a buffer of 4 bytes")


@pytest.mark.filterwarnings("ignore")  # what a damaged file names may be deprecated
def test_a_table_of_voices_that_is_damaged_is_told_or_read(copied: Path, seed: int) -> None:
    """Wherever the damage is. Nothing but BadCheckpoint is raised."""
    path, source, config = copied / "spk_dict.pt", random.Random(seed), read_talker_config(copied)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (table,) = [name for name in files if name.endswith("/data.pkl")]
    path.unlink()
    outcomes = list[bool]()
    for _ in range(400):
        data = bytearray(files[table])
        for place in source.sample(range(len(data)), source.randint(1, 4)):
            data[place] = source.randrange(256)
        with zipfile.ZipFile(path, "w") as archive:
            for name, whole in files.items():
                archive.writestr(name, bytes(data) if name == table else whole)
        try:
            outcomes.append(bool(read_voices(copied, VoiceSizes(config.speaker_size, config.mel_bins, 1 << 20))))
        except BadCheckpoint:
            outcomes.append(False)
    assert outcomes.count(False) > 100


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda values: values.update(enable_talker=False), "this checkpoint has no Talker"),
        (lambda values: values.pop("talker_config"), "this checkpoint has no Talker"),
        (lambda values: values.pop("token2wav_config"), "this checkpoint has no Talker"),
        (lambda values: values.update(enable_talker="no"), "'enable_talker' is 'no', which is no bool"),
        (lambda values: values["talker_config"].update(embedding_size=77), "'embedding_size' is 77"),
        (lambda values: values["talker_config"].update(tts_codec_mask_token_id=9999), "there is no item 9999"),
        (lambda values: values["talker_config"].pop("tts_text_end_token_id"), "lacks 'tts_text_end_token_id'"),
        (lambda values: values["talker_config"].update(tts_text_end_token_id=1 << 20), "'tts_text_end_token_id' is 1048576"),
    ],
)
def test_a_config_that_does_not_fit_is_told(copied: Path, edit: Callable[[dict[str, Any]], object], told: str) -> None:
    change_json(copied / "config.json", edit)
    refused(copied, told)


def refused(folder: Path, told: str) -> None:
    with pytest.raises(BadCheckpoint, match=told):
        load_talker(folder, LoadOptions(path=folder, dtype="float32"))
