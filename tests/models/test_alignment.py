"""When the default Talker speaks which word: a function of the text alone, and where the sound is; and which are not spoken."""

from __future__ import annotations

import random
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hibari.g2p import G2P

from helpers import lengths
from helpers.speech import frames_of, made_of, rows_of, spoken, unspoken_of, words_of
from omnistage.models.checkpoint.files import read_config
from omnistage.models.checkpoint.weights import load_weights
from omnistage.models.interface import Alignment, BadRequest, Frames, SpeechRequest, SpokenWord
from omnistage.models.smol.code2wav import SmolCode2Wav
from omnistage.models.smol.phrase import PhraseCutter
from omnistage.models.smol.prosody import FRAME_RATE_HZ, FeatureNet, at_speed
from omnistage.models.smol.talker import SILENCE, SmolTalker
from omnistage.models.smol.waveform import SAMPLE_RATE_HZ

ROW_US = 25_000

MARKDOWN = """# A *short* list

Here are **two** tips, from [our page](https://www.example.com/tips):
- Drink 3 cups of water ☕ every day (or tea).
- Dr. Lee said so on March 3, 1999!

```
left out
```
| Name | Age |
|------|-----|
| Ann | 42 |

Write to <mailto:ann@example.com>."""
SPOKEN = [
    *("A", "short", "list"),
    *("Here", "are", "two", "tips,", "from", "our", "page"),
    *("Drink", "3", "cups", "of", "water", "every", "day", "(or", "tea)."),
    *("Dr.", "Lee", "said", "so", "on", "March 3,", "1999!"),
    *("Name", "Age", "Ann", "42"),
    *("Write", "to", "ann@example.com"),
]

PLAIN = "The rain went on all night, and nobody slept. In the morning the river had risen over the old stone bridge below our house."

PARAGRAPHS = "Morning came at last.\n\nNobody had slept at all.\n\nAll of them were glad.\n\nEvery one went home again."


def said(text: str, words: list[SpokenWord]) -> list[str]:
    return [text[word.first_character : word.first_character + word.character_count] for word in words]


def check_order(words: list[SpokenWord], rows: int) -> None:
    for word in words:
        assert 0 <= word.begin_us < word.end_us <= rows * ROW_US
    for before, after in pairwise(words):
        assert before.end_us <= after.begin_us
        assert before.first_character + before.character_count <= after.first_character


async def test_every_spoken_word_is_told_with_its_place_in_the_markdown(talker: SmolTalker) -> None:
    words = await words_of(talker, MARKDOWN)
    assert said(MARKDOWN, words) == SPOKEN
    check_order(words, len(await rows_of(talker, MARKDOWN)))


async def test_the_words_of_a_formula_are_one_at_its_place(talker: SmolTalker) -> None:
    """Even where it is so long that it is read as two phrases, and where a link or a tag could have begun before it."""
    for formula, opener in product(("$x^2 + 1$", r"\[" + " + ".join(["x^2"] * 60) + r"\]"), ("", "[", "<", "![")):
        text = f"We {opener}know {formula} now."
        words = await words_of(talker, text)
        first_of_know = 3 if opener == "<" else text.index("know")
        assert [word.first_character for word in words] == [0, first_of_know, text.index(formula), text.rindex("now")]
        check_order(words, len(await rows_of(talker, text)))


async def test_words_do_not_depend_on_the_deltas(talker: SmolTalker, seed: int) -> None:
    draw = random.Random(seed)
    whole = await words_of(talker, MARKDOWN)
    assert await words_of(talker, *MARKDOWN) == whole
    for _ in range(5):
        places = sorted(draw.sample(range(1, len(MARKDOWN)), draw.randrange(1, 20)))
        assert await words_of(talker, *[MARKDOWN[a:b] for a, b in pairwise([0, *places, len(MARKDOWN)])]) == whole


@pytest.mark.parametrize("speed", [1.0, 0.6, 1.7])
async def test_a_word_begins_with_its_first_phoneme(talker: SmolTalker, default_model: Path, speed: float) -> None:
    """By the durations that the net gives for the whole of each phrase: what is kept of the silence in front, and all phonemes before."""
    config = read_config(default_model / "talker", "hibari-talker")
    net = FeatureNet(config.value("embeddings", int), config.value("heads", int))
    load_weights(net, default_model / "talker")
    symbols, g2p, cutter = config.table("symbols", int), G2P(), PhraseCutter()
    expected, rows = [], 0
    for phrase in [*cutter.feed(PLAIN), *cutter.flush()]:
        phonemes = g2p(phrase.text)
        ids = [0, *(symbols[letter] for letter in phonemes), 0]
        with torch.inference_mode():
            slow = net.pn.durations(net.pn.text(torch.tensor(ids)))
        silence = SILENCE[phrase.pause]
        lasts = at_speed(slow, speed).tolist()
        cut, kept = max(int(slow[0]) - silence.before, 0), min(int(slow[0]), silence.before) + int(slow[1:-1].sum())
        kept += min(int(slow[-1]), silence.after)
        before = lasts[0] - round(cut / speed)
        place = 0
        for word in phonemes.split(" "):
            end = len(word.rstrip(".,"))
            expected.append([ROW_US * (rows + before + sum(lasts[1 : 1 + at])) for at in (place, place + end)])
            place += len(word) + 1
        rows += min(max(round(kept / speed), before + sum(lasts[1:-1])), before + sum(lasts[1:]))
    words = await words_of(talker, PLAIN, request=SpeechRequest(seed=0, speed=speed))
    assert said(PLAIN, words) == PLAIN.split()
    assert [[word.begin_us, word.end_us] for word in words] == expected
    assert len(await rows_of(talker, PLAIN, request=SpeechRequest(seed=0, speed=speed))) == rows


async def test_a_word_after_a_pause_begins_where_sound_begins(talker: SmolTalker, code2wav: SmolCode2Wav) -> None:
    """In the samples that are heard; before the first word there is silence only."""
    words = await words_of(talker, PARAGRAPHS)
    samples = (await spoken(talker, code2wav, PARAGRAPHS))[:, 0]
    assert len(samples) == len(await rows_of(talker, PARAGRAPHS)) * SAMPLE_RATE_HZ // FRAME_RATE_HZ
    hop = SAMPLE_RATE_HZ // 200
    loudness = np.sqrt(np.square(samples[: len(samples) // hop * hop].reshape(-1, hop)).mean(1))
    ends = [0, *(word.end_us for word in words)]
    first = [number for number, word in enumerate(said(PARAGRAPHS, words)) if word in ("Morning", "Nobody", "All", "Every")]
    assert len(first) == 4
    for number in first:
        quiet_from = ends[number] // 5000 + (10 if number else 0)  # 50 ms for the word before to fade.
        rises = quiet_from + int(np.argmax(loudness[quiet_from:] > 0.1 * loudness.max()))
        assert abs(rises * 5 - words[number].begin_us / 1000) <= 100, (number, rises * 5, words[number])


async def test_sound_is_the_same_with_words_and_without(talker: SmolTalker) -> None:
    both = await made_of(talker, MARKDOWN, wanted={"features": 0, "alignment": 0})
    assert np.array_equal(np.concatenate([one.rows for one in both if isinstance(one, Frames)]), await rows_of(talker, MARKDOWN))
    assert [word for one in both if isinstance(one, Alignment) for word in one.words] == await words_of(talker, MARKDOWN)
    assert not any(isinstance(one, Alignment) for one in await made_of(talker, MARKDOWN, wanted={"features": 0}))
    assert not any(isinstance(one, Frames) for one in await made_of(talker, MARKDOWN, wanted={"alignment": 0}))


async def test_words_come_no_later_than_their_frames(talker: SmolTalker) -> None:
    rows = told = 0
    for one in await made_of(talker, MARKDOWN, wanted={"features": 0, "alignment": 0}):
        if isinstance(one, Frames):
            rows += len(one.rows)
            assert one.finish_reason is not None or told > (rows - len(one.rows)) * ROW_US
        elif one.words:
            assert one.words[0].begin_us >= rows * ROW_US
            told = one.words[-1].end_us


@pytest.mark.parametrize("limit", [1, 60, 100, 300])
async def test_what_is_not_spoken_is_not_told(talker: SmolTalker, limit: int) -> None:
    whole = await words_of(talker, MARKDOWN)
    cut = await words_of(talker, MARKDOWN, request=SpeechRequest(seed=0, max_frames=limit))
    heard = [word for word in whole if word.begin_us < limit * ROW_US]
    assert [word.begin_us for word in cut] == [word.begin_us for word in heard]
    assert [word.end_us for word in cut] == [min(word.end_us, limit * ROW_US) for word in heard]


@pytest.mark.parametrize("text", ["", "😀🎉", "```\ncode\n```", "...", "\n\n", "| | |"])
async def test_a_text_without_a_word_has_none(talker: SmolTalker, text: str) -> None:
    assert await made_of(talker, text, wanted={"alignment": 0}) == [Alignment((), last=True)]


async def test_words_go_on_at_any_word_with_rows_or_without(talker: SmolTalker, seed: int) -> None:
    draw = random.Random(seed)
    whole, rows = await words_of(talker, MARKDOWN), await rows_of(talker, MARKDOWN)
    for first in (0, len(whole), *(draw.randrange(len(whole)) for _ in range(4))):
        assert await words_of(talker, MARKDOWN[:30], MARKDOWN[30:], first=first) == whole[first:]
        row = draw.randrange(len(rows))
        made = await made_of(talker, MARKDOWN, wanted={"features": row, "alignment": first})
        assert [word for one in made if isinstance(one, Alignment) for word in one.words] == whole[first:]
        assert np.array_equal(np.concatenate([one.rows for one in made if isinstance(one, Frames)]), rows[row:])
    with pytest.raises(BadRequest, match=r"^resume\.positions: "):
        await words_of(talker, MARKDOWN, first=len(whole) + 1)


PIECES = (*"ab A1.!?;:,' \n\n#*_-`~[]()<>|\\/=é😀", "10 km ", "Dr. ", "March 3, ", "hello ", "1/2 ", "the ", "IV ", "No. 5 ", "% ")


@lengths.rounds(40, 1000)
async def test_in_any_text_words_come_in_their_order(talker: SmolTalker, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    for _ in range(rounds):
        text = "".join(draw.choices(PIECES, k=draw.randrange(80)))
        words = await words_of(talker, text)
        assert await words_of(talker, *text) == words
        check_order(words, len(await rows_of(talker, text)))
        assert all(word.strip() == word != "" for word in said(text, words)), text


@pytest.mark.parametrize("unit", ["extraordinary", "x", "7", "(", "a|"])
async def test_a_word_without_an_end_is_told_in_parts(talker: SmolTalker, unit: str) -> None:
    text = unit * (600 // len(unit))
    words = await words_of(talker, text)
    check_order(words, len(await rows_of(talker, text)))
    assert bool(words) == unit.isalnum() or unit == "a|"


# Words that are not spoken -----------------------------------------------------------------------------------------------------------


TEXT = "Hello 你好. 🙂\n\n🎉 And 世界, or ∯ so\n- ✨\n\nthe end 🙃"
RUNS = ["你好", "🙂", "🎉", "世界", "∯", "✨", "🙃"]


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        *[(text, ["🙂"]) for text in ("🙂", "🙂\n\nHello.", "Hello. 🙂", "Hello.\n\n🙂\n\nHello.", "Hello, 🙂, hello.")],
        ("Hello :-( there :), hello; (5) :D", [":-(", ":)", ":D"]),
        ("| one | 🙂 |\n|---|---|\n| 🎉 | two |", ["🙂", "🎉"]),
        ("你好世界" * 60, ["你好世界" * 50, "你好世界" * 10]),
        ("# 🙂\n**🎉** [✨](https://example.com/你好) ![🙃](x.png)", ["🙂", "🎉", "✨", "🙃"]),
        ("Say:\n```\n你好\n```\n<b>Hello</b> [there](https://example.com/世界).", []),
    ],
)
async def test_each_kind_of_cut_tells_what_is_not_spoken(talker: SmolTalker, text: str, runs: list[str]) -> None:
    """Marks that Markdown leaves out were not to be read, and are not told."""
    assert await unspoken_of(talker, text) == runs


async def test_what_is_not_spoken_is_that_of_the_whole_text_wherever_speech_goes_on(talker: SmolTalker, seed: int) -> None:
    """However the text comes; also where nothing is wanted any more, or the times of words alone."""
    whole = len(await rows_of(talker, TEXT))
    for first in (0, random.Random(seed).randrange(whole), whole):
        assert await unspoken_of(talker, TEXT, features=first) == RUNS
    assert await unspoken_of(talker, TEXT, alignment=0) == RUNS
    assert await unspoken_of(talker, TEXT) == await unspoken_of(talker, *TEXT) == RUNS
    assert await made_of(talker, TEXT, wanted={}) == []


async def test_what_is_not_spoken_after_the_last_frame_is_not_counted(talker: SmolTalker) -> None:
    first, second = "Hello 你好 there.", "🙂 And 世界 so on."
    begun = len(await rows_of(talker, first))
    for most, runs in ((1, ["你好"]), (begun, ["你好"]), (begun + 1, ["你好", "🙂", "世界"])):
        request = SpeechRequest(seed=0, max_frames=most)
        assert await unspoken_of(talker, f"{first} {second}", request=request, features=0) == runs, most


GIVEN = "# *Hello* _you_ \\<b>there</b> [x](y)\nand more\n```\nText | 世界 |\n```"


async def test_plain_text_has_no_markdown(talker: SmolTalker) -> None:
    plain = SpeechRequest(seed=0, plain=True)
    assert "世界" in await unspoken_of(talker, GIVEN, request=plain)
    assert "世界" not in await unspoken_of(talker, GIVEN)
    spoken = await rows_of(talker, "5 * 3 # 2", request=plain)
    assert not np.array_equal(spoken, await rows_of(talker, "5 3 2", request=plain))
    assert len(await frames_of(talker, "```\ncode\n```", request=plain)) > 1


async def test_places_of_words_in_plain_text_are_those_of_what_was_given(talker: SmolTalker) -> None:
    text = "**Hello**\n\n  <i>you</i> ``and`` me"
    told = said(text, await words_of(talker, text, request=SpeechRequest(seed=0, plain=True)))
    for word in ("Hello", "you", "and", "me"):
        assert any(word in one for one in told), told
