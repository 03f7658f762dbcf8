"""`omnistage draw` against a real toy stack: files, previews, what a script and a person get to see, and what is refused."""

from __future__ import annotations

import asyncio
import re
import shlex
import struct
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import typer.main
from PIL import Image
from typer.testing import CliRunner

from helpers import lengths, media_files, servers
from helpers.command import omnistage
from helpers.drawings import checkpoint
from helpers.output import COMMAND, names, object_of, refusal
from helpers.peer import PlayingPeer, listening
from helpers.processes import ProcessFamily, StartedProcess
from helpers.talking import Person
from helpers.terminal import CTRL_C, terminal_after
from omnistage.cli.main import app
from omnistage.cli.make import drawing
from omnistage.cli.make.drawing_screen import MAX_COLUMNS, MAX_ROWS, cells, picture_size
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need, target_for
from omnistage.cli.wording import SHELL, word_error
from omnistage.client import AsyncOmni, Omni
from omnistage.client.connection import serve_advice
from omnistage.client.errors import BadRequestError, RequestError
from omnistage.client.options import ABOUT, DIFFUSION
from omnistage.models.tiny.makers import MAKERS
from omnistage.models.toy import formulas
from omnistage.models.toy.files import pixels_of

ROOT = Path(__file__).resolve().parents[2]

ENDS = "hint: Give a name that ends in .png, .jpg, .jpeg or .webp."
MAKE = "hint: Make it first: mkdir -p none"
OWN = """
name: own
description: Of a test.
inputs: [text, image]
outputs: [image, progress]
stages:
  - kind: diffusion
    family: FAMILY
    options: {OPTIONS}
"""


@pytest.fixture(scope="module")
def film_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router in front of a toy that draws."""
    with servers.toy_address(tmp_path_factory.mktemp("film"), "toy-film") as address:
        yield address


def draw(*words: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return omnistage("draw", *words, text=text)


def test_a_picture_and_a_line_of_figures(film_address: str, tmp_path: Path) -> None:
    out = tmp_path / "hill.png"
    out.write_bytes(b"an older one, which goes")
    done = draw("-", "--out", out, "--size", "40x24", "--steps", "8", "--seed", "5", "--address", film_address, text="a hill")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    *steps, figures = done.stderr.splitlines()
    assert steps == [f"step {step} of 8" for step in (2, 4, 6, 8)]
    for part in (f"wrote {out} · 40×24 pixels · ", " s · 8 steps · ", "seed 5"):
        assert part in figures
    with Omni(address=film_address) as omni:
        (expected,) = omni.draw("a hill", width=40, height=24, steps=8, seed=5).pictures
    assert out.read_bytes() == expected.data
    assert names(tmp_path) == ["hill.png"]


def test_layers_of_several_pictures_and_previews_are_files_and_one_object(film_address: str, tmp_path: Path) -> None:
    words = ("a hill", "--out", tmp_path / "hill.PNG", "--layers", "2", "--count", "2", "--previews", "2", "--steps", "4")
    done = draw(*words, "--json", "--address", film_address)
    told = object_of(done)
    assert done.stderr == ""
    assert list(told) == ["files", "previews", "e2e_s", "steps", "seed", "pipeline", "failovers", "drew", "notes"]
    assert [(Path(file["path"]).name, file["result"], file["layer"], file["width"]) for file in told["files"]] == [
        (f"hill-{result + 1}-layer-{layer}.PNG", result, layer, 32) for result in (0, 1) for layer in (0, 1)
    ]
    assert [Path(path).name for path in told["previews"]] == ["hill-preview-02.PNG", "hill-preview-04.PNG"]
    assert (told["steps"], told["pipeline"], told["failovers"]) == (4, "toy-film", [])
    assert names(tmp_path) == sorted(Path(path).name for path in [*(file["path"] for file in told["files"]), *told["previews"]])
    first, second = (pixels_of((tmp_path / f"hill-1-layer-{layer}.PNG").read_bytes()).astype(np.int64) for layer in (0, 1))
    assert np.array_equal(formulas.layer(first, 1), second)


def test_a_picture_to_start_from_and_a_folder_for_previews(film_address: str, tmp_path: Path) -> None:
    shown, previews = tmp_path / "shown", tmp_path / "previews"
    shown.mkdir()
    previews.mkdir()
    common = ("a hill", "--seed", "1", "--address", film_address)
    assert draw(*common, "--out", shown / "before.png").returncode == 0
    words = ("--image", shown / "before.png", "--previews", "1", "--preview-dir", previews, "--negative", "rain", "--guidance", "2")
    assert draw(*common, "--out", shown / "after.png", *words).returncode == 0
    assert (names(shown), names(previews)) == (["after.png", "before.png"], ["after-preview-06.png"])
    assert (shown / "before.png").read_bytes() != (shown / "after.png").read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "x.gif"], ["error: --out x.gif: only PNG, JPEG and WebP can be written", ENDS]),
        (["--out", "none/x.png"], ["error: --out none/x.png: its folder does not exist", MAKE]),
        (["--out", "x.png", "--image", "none.png"], ["error: --image: cannot read none.png: No such file or directory"]),
        (["--out", "x.png", "--image", "words.txt"], ["error: --image: words.txt is text/plain, not a picture"]),
        (["--out", "x.png", "--previews", "1", "--preview-dir", "none"], ["error: --preview-dir none: there is no such folder", MAKE]),
        (["--out", "x.jpg"], ["error: --out: toy-film makes image/png of this request; ask for that or leave it out"]),
        (["--out", "x.png", "--width", "400"], ["error: --width: toy-film makes at most 256"]),
        (["--out", "x.png", "--size", "400x16"], ["error: --size: toy-film makes at most 256"]),
        (["--out", "x.png", "--pipeline", "smol"], ["error: no pipeline 'smol'; this router has toy-film"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(film_address: str, tmp_path: Path, words: list[str], told: list[str]) -> None:
    (tmp_path / "words.txt").write_text("words")
    assert refusal("draw", "a hill", *words, "--address", film_address, folder=tmp_path) == told
    assert names(tmp_path) == ["words.txt"]


def test_a_picture_without_a_name_gets_one_of_its_prompt(film_address: str, tmp_path: Path) -> None:
    """And no file that is there is replaced: not one of several, no layer, no preview."""
    common = ("draw", "A red circle", "--steps", "2", "--size", "8x8", "--address", film_address)
    (tmp_path / "Red-Circle.PNG").write_bytes(b"mine")
    for number, words in enumerate([(), ("--count", "2"), ("--layers", "2", "--previews", "1"), ("--json",)], 2):
        done = omnistage(*common, *words, folder=tmp_path)
        assert done.returncode == 0 and f"red-circle-{number}" in done.stderr + done.stdout, done.stderr
    ends = ["2", "3-1", "3-2", "4-layer-0", "4-layer-1", "4-preview-02", "5"]
    assert names(tmp_path) == ["Red-Circle.PNG", *(f"red-circle-{end}.png" for end in ends)]
    assert (tmp_path / "Red-Circle.PNG").read_bytes() == b"mine"


def test_calls_at_once_with_one_prompt_write_a_file_each(film_address: str, tmp_path: Path) -> None:
    command = [*COMMAND, "draw", "A red circle", "--address", film_address]
    with ExitStack() as stack:
        calls = [stack.enter_context(StartedProcess([*command, "--seed", str(seed)], cwd=tmp_path)) for seed in range(3)]
        assert [call.wait(100) for call in calls] == [0, 0, 0]
    assert names(tmp_path) == ["red-circle-2.png", "red-circle-3.png", "red-circle.png"]
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 3


def test_a_folder_where_nothing_can_be_written_is_told_before_anything_is_drawn(film_address: str) -> None:
    error, hint = refusal("draw", "A hill", "--address", "127.0.0.1:1", folder=Path("/proc/self"))
    assert error.startswith("error: hill.png cannot be written: ") and hint == "hint: Say where it goes: --out FOLDER/hill.png"


@pytest.mark.parametrize("size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_terminal_shows_the_name_that_a_picture_got(
    film_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLORTERM", raising=False)
    terminal = terminal_after("draw", "a photo of a cat wearing a hat", "--seed", "123456789", "--address", film_address, size=size)
    first, *others = terminal.lines
    assert first.startswith("wrote photo-of-a-cat-wearing-a-hat.png") and "seed 123456789" in " ".join(others or [first])
    assert all(len(line) < size[0] for line in terminal.lines) and not any(line.endswith("·") for line in terminal.lines)
    assert names(tmp_path) == ["photo-of-a-cat-wearing-a-hat.png"]


def test_a_pipeline_without_pictures_names_those_that_draw(toy_address: str, tmp_path: Path) -> None:
    for words, last in (
        (("--pipeline", "toy"), "hint: Give another --pipeline: diffusers or picture or toy-film or toy-picture."),
        (("--address", toy_address), f"error: toy does not draw; no other pipeline of this router does; {serve_advice('image')}"),
    ):
        assert refusal("draw", "a hill", "--out", tmp_path / "x.png", *words)[-1] == last


@pytest.mark.parametrize(
    ("field", "sized", "line"),
    [
        ("layers", False, ("--layers: no", "")),
        ("negative_prompt", False, ("--negative: no", "")),
        ("media_type", False, ("--out: no", "")),
        ("width", False, ("--width: no", "")),
        ("width", True, ("--size: no", "")),
        ("images", False, ("--image: no", drawing.NEEDS_A_PICTURE)),
    ],
)
async def test_a_refusal_names_what_was_typed_and_has_a_hint_where_it_adds_something(
    toy_address: str, field: str, sized: bool, line: tuple[str, str]
) -> None:
    error = BadRequestError.of(f"diffusion.{field}", "no")
    error.metadata = {"field": f"diffusion.{field}"}
    order = drawing.DrawingOrder("a hill", None, {}, as_json=False, images=(), sized=sized)
    async with AsyncOmni(address=toy_address) as omni:
        with pytest.raises(RequestError) as refused:
            async with order.refusals(omni, ""):
                raise error
    assert word_error(refused.value) == line


def test_a_question_that_is_drawn_says_how_pictures_are_kept(film_address: str) -> None:
    done = omnistage("ask", "a hill", "--seed", "4", "--address", film_address)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "toy-film drew a picture of this; omnistage draw PROMPT --out F.png keeps what it draws\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out", "c.wav"], "--out: toy-film gives image, video, audio, progress, not 'text'"),
        (["--text-only"], "--text-only: toy-film gives image, video, audio, progress, not 'text'"),
        (["--voice", "Ann"], "--voice: is for text and sound, and toy-film only draws"),
        (["--max-tokens", "5", "--pipeline", "toy-film"], "--max-tokens: is for text and sound, and toy-film only draws"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_question_with_what_no_drawing_takes_is_pointed_to_draw(film_address: str, tmp_path: Path, words: list[str], told: str) -> None:
    error, hint = refusal("ask", "a hill", *words, "--address", film_address, folder=tmp_path)
    assert told in error and hint.startswith("hint: It only draws: `omnistage draw PROMPT --out F.png`")
    assert names(tmp_path) == []


def test_a_question_to_a_stack_that_only_draws_starts_none() -> None:
    for command, hint in (("ask", "hint: It only draws: `omnistage draw PROMPT --out F.png`"), ("say", "hint: Give another --pipeline")):
        assert hint in "\n".join(refusal(command, "a hill", "--pipeline", "toy-film"))


def test_ask_writes_no_picture() -> None:
    hint = "hint: A picture: `omnistage draw PROMPT --out hill.PNG`."
    assert refusal("ask", "a hill", "--out", "hill.PNG") == ["error: --out hill.PNG: ask writes sound", hint]


def test_a_blank_prompt_is_told_how_one_looks(film_address: str, tmp_path: Path) -> None:
    hint = 'hint: Give the words, such as "a red heart on blue", or - for those of standard input.'
    lines = refusal("draw", " ", "--out", tmp_path / "x.png", "--address", film_address)
    assert lines == ["error: the text is empty", hint]


COMMON = "--steps 5 --guidance 2.5 --negative rain --option eta=0.5 --option prompt_2=a=b"
OF_PICTURES = "--size 64x48 --step-cache 0.5 --sigmas 1,0.5 --image F --mask F --control F --background #202020"
FIELDS = {"prompt": "a hill", "steps": 5, "guidance_scale": 2.5, "negative_prompt": "rain", "options": {"eta": "0.5", "prompt_2": "a=b"}}
OF_PICTURES_FIELDS = FIELDS | {"width": 64, "height": 48, "step_cache": 0.5, "sigmas": [1, 0.5]}
EVERY_OPTION: dict[str, tuple[str, dict[str, object]]] = {
    "draw": (
        f"{OF_PICTURES} --count 2 --layers 3 --previews 4 --preview-side 32 --strength 0.6 --out x.webp",
        {**OF_PICTURES_FIELDS, "results": 2, "layers": 3, "previews": 4, "preview_side": 32, "strength": 0.6, "media_type": "image/webp"},
    ),
    "film": (
        f"{OF_PICTURES} --frames 9 --seconds 0.5 --fps 12.5 --guidance-2 1.5 --flow-shift 3 --codec h264 --out x.mp4",
        {
            **OF_PICTURES_FIELDS,
            "frames": 9,
            "duration_s": 0.5,
            "frames_per_second": 12.5,
            "guidance_scale_2": 1.5,
            "flow_shift": 3,
            "media_type": 'video/mp4; codecs="avc1"',
        },
    ),
    "sound": ("--seconds 2.5 --begin 0.5 --out x.wav", {**FIELDS, "duration_s": 2.5, "begin_s": 0.5}),
}
"""By the command: words that type every option, and the fields of the request that they set, but for those that are pictures."""


async def test_every_field_can_be_typed(tmp_path: Path) -> None:
    """The router is none of ours: what it was asked is looked at, and it answers in words and sound."""
    (tmp_path / "F").write_bytes(media_files.picture(1))
    fields = set[str]()
    for command, (words, expected) in EVERY_OPTION.items():
        peer = PlayingPeer()
        async with listening(peer) as wire:
            line = f"{COMMON} {words} --address {wire.address}".split()
            done = await asyncio.to_thread(omnistage, command, "a hill", *line, folder=tmp_path)
        assert done.stderr.startswith("wrote " if command == "sound" else "error: the drawing ended without a "), done.stderr
        (request,) = peer.requests
        assert set(request.outputs) == {{"draw": "image", "film": "video", "sound": "audio"}[command], "progress"}
        values = {field.name: value for field, value in request.diffusion.ListFields()}
        fields |= values.keys()
        (images, *guides) = ([*values.pop("images", ())], values.pop("mask_image", None), values.pop("control_image", None))
        assert [(image.data, image.background) for image in images] == [(media_files.picture(1), "#202020")] * (command != "sound")
        assert all(guide.data == media_files.picture(1) for guide in guides if guide is not None)
        values["options"] = dict(values["options"])
        if "sigmas" in values:
            values["sigmas"] = list(values["sigmas"])
        assert values == expected
    assert {ABOUT[name].name for name in DIFFUSION} <= fields, "a new option is to be typed here too"


def test_every_field_that_is_refused_is_told_by_the_option_that_set_it() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [option for name in ("draw", "film", "sound") for option in commands[name].params]
    typed = {name for option in options for name in (option.opts or [option.name])}
    assert {SHELL.name_of(f"diffusion.{name}") for name in (*(ABOUT[name].name for name in DIFFUSION), "prompt", "images")} - {
        "PROMPT"
    } <= typed


def test_make_tiny_names_all_that_it_can_make() -> None:
    told = CliRunner().invoke(app, ["make-tiny", "--help"], terminal_width=200).output
    documented = (ROOT / "docs" / "command.md").read_text()
    for name, maker in MAKERS.items():
        assert re.search(rf"{re.escape(name)}[,.]", told) and f"`{name}`" in documented
        assert all(size in told for size in maker.sizes)


def test_a_terminal_shows_the_steps_and_the_newest_picture(film_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    words = ("draw", "a hill", "--out", str(tmp_path / "x.png"), "--previews", "3", "--size", "20x16", "--address", film_address)
    terminal = terminal_after(*words, size=(300, 30))
    assert b"step 3 of 6" in terminal.written
    *picture, figures = terminal.lines
    assert picture == ["▀" * 20] * 8, "the last one stands where the others stood"
    assert figures.startswith("wrote ")
    assert terminal.written.count(b"\x1b[8A") == 3


def test_a_terminal_without_colours_shows_the_steps_alone(film_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM", raising=False)
    words = ("draw", "a hill", "--out", str(tmp_path / "x.png"), "--previews", "3", "--address", film_address)
    terminal = terminal_after(*words, size=(300, 30))
    assert "━".encode() in terminal.written and "▀".encode() not in terminal.written
    (figures,) = terminal.lines
    assert figures.startswith("wrote ")


def test_ctrl_c_ends_the_drawing_and_its_stack(family: ProcessFamily, tmp_path: Path) -> None:
    pipeline = tmp_path / "slow.yaml"
    pipeline.write_text(OWN.replace("FAMILY", "toy-film").replace("OPTIONS", "interval_s: 0.1"))
    words = ("draw", "a hill", "--out", str(tmp_path / "x.png"), "--steps", "1000", "--pipeline", str(pipeline))
    terminal_after(*words, size=(100, 30), meanwhile=Person(("step 2 of 1000", CTRL_C)), code=130)
    assert names(tmp_path) == ["slow.yaml"]
    assert family.wait_ended() == []


@lengths.long_form(
    "models/diffusers/test_default_picture.py::test_a_picture_follows_its_prompt",
    "cli/test_draw.py::test_a_picture_and_a_line_of_figures",
    unkept="the words of `make demo-draw` are enough",
)
def test_the_demo_draws_with_nothing_but_its_words(family: ProcessFamily, tmp_path: Path) -> None:
    """`make demo-draw` types no more than a prompt, a file and a seed."""
    dry = subprocess.run(["make", "--dry-run", "--no-print-directory", "demo-draw"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    command, *words = shlex.split(dry.stdout.splitlines()[-1])
    assert command.endswith("/omnistage") and words[0] == "draw" and not {"--pipeline", "--model", "--address"} & set(words)
    done = omnistage(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["demo.png"] and " · pipeline picture · seed 7" in done.stderr
    with Image.open(tmp_path / "demo.png") as image:
        shown = np.asarray(image.convert("RGB"))
    assert shown.shape == (128, 128, 3) and shown[2, 2].argmax() == 2, "on blue"
    left = shown[:, :64].astype(int)
    assert ((left[..., 0] > 150) & (left[..., 1:].max(axis=-1) < 100)).sum() > 100, "a red heart on the left"
    assert family.wait_ended() == []


def test_the_default_takes_no_picture(tmp_path: Path) -> None:
    (tmp_path / "before.png").write_bytes(media_files.picture(1))
    error, hint = refusal("draw", "make it night", "--out", tmp_path / "x.png", "--image", tmp_path / "before.png")
    assert error == "error: picture takes text, not image"
    other = "a checkpoint of diffusers that takes image, such as Qwen-Image-Edit (its folder, or OWNER/NAME)"
    assert hint == f"hint: Give another --pipeline: {other} or toy-film."
    assert names(tmp_path) == ["before.png"]


@lengths.long_form(
    "cli/test_draw.py::test_layers_of_several_pictures_and_previews_are_files_and_one_object",
    "models/diffusers/test_model.py::test_layers_of_each_of_several_results_stay_together",
    "cli/test_draw.py::test_a_refusal_names_what_was_typed_and_has_a_hint_where_it_adds_something",
)
def test_a_checkpoint_makes_layers_of_a_picture_and_needs_one(family: ProcessFamily, tmp_path: Path) -> None:
    (tmp_path / "poster.png").write_bytes(media_files.picture(2, 64, 64))
    folder = checkpoint("qwen-image-layered")
    layout = target_for(Need(["text", "image"], ["image"], "diffusion"), None, str(folder)).at
    assert isinstance(layout, Layout) and layout.names == "diffusers"
    assert layout.pipelines[0].stages[0].checkpoint == str(folder)
    small = tmp_path / "small.yaml"  # A stage draws twice before it serves, and 640 pixels wide where nothing is said.
    small.write_text(OWN.replace("FAMILY", "diffusers").replace("OPTIONS", "condition_area: 4096"))
    words = ("--layers", "2", "--steps", "2", "--guidance", "1", "--seed", "4", "--json", "--out", tmp_path / "parts.png")
    with Omni(model_path=folder, pipeline=str(small)) as omni:
        refused = draw("its parts", *words, "--address", omni.address)
        done = draw("its parts", *words, "--image", tmp_path / "poster.png", "--address", omni.address)
    error, hint = refused.stderr.splitlines()
    assert error.startswith("error: --image: ") and error.endswith("edits one picture, and none came")
    assert hint == "hint: It changes a picture: give one with --image F."
    told = object_of(done)
    assert [(Path(file["path"]).name, file["result"], file["layer"], file["width"], file["height"]) for file in told["files"]] == [
        ("parts-layer-0.png", 0, 0, 32, 32),
        ("parts-layer-1.png", 0, 1, 32, 32),
    ]
    assert (told["pipeline"], told["steps"], told["seed"]) == ("own", 2, 4)
    assert names(tmp_path) == ["parts-layer-0.png", "parts-layer-1.png", "poster.png", "small.yaml"]
    layers = []
    for file in told["files"]:
        with Image.open(file["path"]) as image:
            assert (image.format, image.mode) == ("PNG", "RGBA")
            layers.append(np.asarray(image))
    assert layers[0].std() > 5 and not np.array_equal(layers[0], layers[1])
    assert family.wait_ended() == []


def test_a_picture_larger_than_pillow_reads_has_no_size_and_no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1 << 20)
    data = bytearray(media_files.encoded(Image.new("L", (1, 1))))
    data[16:24] = struct.pack(">II", 30_000, 30_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    assert picture_size(bytes(data)) is None and cells(bytes(data), 80, 24) == []


def test_cells_have_two_pixels_each() -> None:
    data = media_files.encoded(Image.fromarray(np.array([[[255, 0, 0]], [[0, 255, 0]], [[0, 0, 255]]], np.uint8)))
    assert picture_size(data) == (1, 3)
    assert cells(data, 80, 24) == ["\x1b[38;2;255;0;0;48;2;0;255;0m▀\x1b[0m", "\x1b[38;2;0;0;255;49m▀\x1b[0m"]


@pytest.mark.parametrize(
    ("size", "columns", "rows", "shown"), [((640, 480), 200, 60, (48, 18)), ((100, 900), 80, 24, (5, 24)), ((9, 9), 4, 9, (4, 2))]
)
def test_cells_keep_to_their_place_and_to_the_shape(size: tuple[int, int], columns: int, rows: int, shown: tuple[int, int]) -> None:
    lines = cells(media_files.encoded(Image.new("RGB", size)), columns, rows)
    assert ([line.count("▀") for line in lines], len(lines)) == ([shown[0]] * shown[1], shown[1])
    assert shown[0] <= MAX_COLUMNS and shown[1] <= MAX_ROWS


def test_what_is_transparent_is_grey_and_what_is_no_picture_is_not_shown() -> None:
    assert cells(media_files.encoded(Image.new("RGBA", (1, 2), (255, 0, 0, 0))), 1, 1) == ["\x1b[38;2;96;96;96;48;2;96;96;96m▀\x1b[0m"]
    assert (cells(b"no picture", 48, 24), picture_size(b"no picture")) == ([], None)
    assert cells(media_files.encoded(Image.new("RGB", (4, 4))), 48, 0) == []
