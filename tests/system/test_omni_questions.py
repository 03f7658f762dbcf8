"""The use of a checkpoint of an omni model by a person: a stack for its folder, questions about pictures, sounds and films, in Python and
on the command line. Its weights are random, so words mean nothing; equal questions have equal logprobs, others have not."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers import lengths
from helpers.command import omnistage
from helpers.media_files import film, picture, samples, sound
from helpers.omni_family import OmniFamily
from omnistage.cli.stack.pipelines import layout_for
from omnistage.client import Answer, BadRequestError, NotSpokenError, Omni, RequestError, Video

pytestmark = lengths.long_form(
    "client/test_media.py::test_a_file_is_what_it_was_however_it_is_handed_over",
    "client/test_media.py::test_samples_arrive_as_they_are",
    "models/qwen2_5_omni/test_thinker.py::test_what_was_asked_otherwise_is_not_found",
    "models/qwen2_5_omni/test_thinker.py::test_media_that_cannot_be_read_are_told_and_the_next_is_answered",
    "cli/test_attached.py::test_media_stand_before_the_words_in_the_order_given",
    "cli/test_attached.py::test_what_cannot_be_read_is_named",
    "cli/test_layouts.py::test_sound_is_refused_with_the_reason",
    "cli/test_status.py::test_bytes_are_written_for_people",
)

TOKENS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, data in (
        ("cat.png", picture(1)),
        ("dog.jpg", picture(2, form="JPEG")),
        ("question.wav", sound(1, subtype="FLOAT")),
        ("clip.mp4", film(1, sound_s=2.0)),
        ("silent.mp4", film(1)),
        ("broken.png", picture(1)[:200]),
    ):
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def name(omni_family: OmniFamily) -> str:
    return omni_family.name


@pytest.fixture(scope="module")
def omni(omni_folder: Path, name: str) -> Iterator[Omni]:
    with Omni(model_path=omni_folder, pipeline=f"{name}-text", max_sessions=4) as omni:
        yield omni


def ask(omni: Omni, *content: Any, **media: Any) -> Answer:
    turn = {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content), **media}
    return omni.chat([turn], max_tokens=TOKENS, ignore_eos=True, temperature=0, logprobs=True)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(source: object) -> dict[str, object]:
    return {"type": "image", "image": source}


def test_a_picture_is_the_same_however_it_is_handed_over(omni: Omni, files: Path) -> None:
    path = files / "cat.png"
    answer = ask(omni, "What is this?", images=[str(path)])
    assert answer["content"]
    assert len(answer.logprobs) == len(answer.token_ids) == TOKENS
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    for again in (
        ask(omni, {"type": "image_url", "image_url": {"url": url}}, text("What is this?")),
        ask(omni, image(Image.open(path)), text("What is this?")),
        ask(omni, image(io.BytesIO(path.read_bytes())), text("What is this?")),
    ):
        assert (again.text, again.logprobs) == (answer.text, answer.logprobs)
    assert ask(omni, "What is this?", images=[files / "dog.jpg"]).logprobs != answer.logprobs
    assert ask(omni, text("What is this?"), image(path)).logprobs != answer.logprobs
    assert ask(omni, "What is this?").logprobs != answer.logprobs


def test_a_sound_is_the_same_as_a_file_and_as_samples(omni: Omni, files: Path) -> None:
    answer = ask(omni, "What is said?", audios=[files / "question.wav"])
    heard = samples(1)
    assert ask(omni, "What is said?", audios=[(heard, 16_000)]).logprobs == answer.logprobs
    assert ask(omni, "What is said?", audios=[(np.negative(heard[::-1]), 16_000)]).logprobs != answer.logprobs


def test_a_film_is_seen_and_heard_where_that_is_asked(omni: Omni, files: Path) -> None:
    clip, silent = files / "clip.mp4", files / "silent.mp4"
    seen, heard = ask(omni, "And?", videos=[clip]), ask(omni, "And?", videos=[Video(clip, use_audio=True)])
    assert seen.logprobs != heard.logprobs
    part = {"type": "video", "video": clip, "use_audio": True}
    assert ask(omni, part, text("And?")).logprobs == heard.logprobs
    assert ask(omni, "And?", videos=[silent]).text
    with pytest.raises(BadRequestError, match="there is no sound in it"):
        ask(omni, "And?", videos=[Video(silent, use_audio=True)])


def test_what_is_broken_is_told_and_the_next_question_is_answered(omni: Omni, files: Path) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(omni, "What?", images=[files / "cat.png", files / "broken.png"])
    (field,) = caught.value.fields
    assert (field.field, field.description.partition(": ")[0]) == ("conversation[0].images[1]", str(files / "broken.png"))
    assert (
        caught.value.message.startswith(f"conversation[0].images[1]: {files / 'broken.png'}: ") and caught.value.metadata["medium"] == "2"
    )
    said = {"role": "user", "content": [image(files / "cat.png"), text("What?")]}
    with pytest.raises(BadRequestError, match=r"^conversation\[1\].content\[1\].image: (?!medium)") as caught:
        omni.chat([said, {"role": "user", "content": [text("And?"), image((files / "broken.png").read_bytes())]}])
    assert ask(omni, "What?", images=[files / "cat.png"]).text


def test_it_answers_in_text_and_says_that_it_has_no_voice(omni: Omni, name: str) -> None:
    (pipeline,) = omni.pipelines()
    assert (pipeline.name, pipeline.inputs, pipeline.outputs) == (f"{name}-text", ("text", "image", "audio", "video"), ("text",))
    assert ask(omni, "Hello").audio is None
    with pytest.raises(NotSpokenError, match=f"{name}-text: it has no Talker"):
        omni.say("Good morning.")
    with pytest.raises(BadRequestError, match=f"{name}-text gives text, not 'audio'"):
        omni.generate("Hello", outputs=["text", "audio"])


def test_the_command_asks_about_pictures_sounds_and_films(omni: Omni, files: Path, name: str) -> None:
    media = ("--image", "cat.png", "--video", "clip.mp4", "--audio", "question.wav", "--image", "dog.jpg", "--video-sound")
    greedy = ("--max-tokens", str(TOKENS), "--temperature", "0", "--json")
    done = omnistage("ask", "What is this?", *media, "--system", "Be brief.", *greedy, "--address", omni.address, folder=files)
    assert (done.returncode, done.stderr) == (0, "")
    content = [
        image(files / "cat.png"),
        {"type": "video", "video": files / "clip.mp4", "use_audio": True},
        {"type": "audio", "audio": files / "question.wav"},
        image(files / "dog.jpg"),
        text("What is this?"),
    ]
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    told = json.loads(done.stdout)
    assert told["text"] == omni.chat(turns, max_tokens=TOKENS, temperature=0).text
    assert (told["pipeline"], told["audio_s"], told["ttfa_s"]) == (f"{name}-text", 0, None)


def test_the_command_names_the_file_that_is_broken(omni: Omni, files: Path) -> None:
    done = omnistage(
        "ask", "What?", "--image", "cat.png", "--audio", "question.wav", "--image", "broken.png", "--address", omni.address, folder=files
    )
    assert (done.returncode, done.stdout) == (1, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: --image: broken.png: ") and "medium" not in error


def test_status_tells_what_memory_was_taken_for_people_and_for_scripts(omni: Omni, files: Path) -> None:
    (replica,) = json.loads(omnistage("status", "--json", "--address", omni.address, folder=files).stdout)["replicas"]
    number = re.match(r"\d+(?=, for \d+ tokens)", replica["settings"]["kv_cache_bytes"])
    assert number and int(number[0]) >= 1 << 20
    assert {"private_memory", "shared_memory"} <= replica["settings"].keys()
    shown = omnistage("status", "-v", "--address", omni.address, folder=files).stdout
    told = re.search(r"kv_cache_bytes ([\d.]+) ([KMG])iB, for \d+ tokens", shown)
    assert told and float(told[1]) * (1 << 10 * (1 + "KMG".index(told[2]))) == pytest.approx(int(number[0]), rel=1e-2)
    assert re.search(r"feature_cache_bytes [\d.]+ [KMG]iB", shown)


def test_a_checkpoint_may_be_named_in_the_place_of_a_pipeline(omni_folder: Path, name: str) -> None:
    """No more stages are started than what is asked for needs."""
    folder = str(omni_folder)
    for outputs, pipeline in (
        ([], name),
        (["text"], f"{name}-text"),
        (["text", "codes"], f"{name}-codes"),
        (["codes"], f"{name}-codes"),
        (["audio"], name),
        (["text", "audio"], name),
    ):
        assert layout_for(folder, ["text", "image", "audio", "video"], outputs).names == pipeline
    with pytest.raises(RequestError, match=f"{name} gives text, audio, not codes"):
        layout_for(folder, ["text"], ["audio", "codes"])


def test_the_command_says_that_there_is_no_voice_where_sound_was_asked_for(omni: Omni, files: Path, name: str) -> None:
    for words, told in (
        (("ask", "x", "--out", "x.wav"), f"error: --out: {name}-text gives text, not 'audio': it has no Talker"),
        (("say", "x", "--out", "x.wav"), f"error: nothing of this text could be spoken by {name}-text: it has no Talker"),
    ):
        done = omnistage(*words, "--address", omni.address, folder=files)
        assert done.returncode == 1
        error, hint = done.stderr.splitlines()
        assert (error, hint[:6]) == (told, "hint: ")
        assert not (files / "x.wav").exists()
