"""Folders that Transformers saved, of every layout that it had since Qwen2.5-Omni: we make the prompts that it makes of them."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import lengths, saved_versions
from helpers.saved_processor import CONVERSATIONS, EXPECTED, HALF_READ, UNREADABLE, VARIANTS, Conversation
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.encoder import Grid, MediumExtent
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.reader import preprocessing_of
from omnistage.models.encoders.starting import MEDIUM_ROWS
from omnistage.models.media.terms import FilmPreprocessing, PicturePreprocessing, smart_resize
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen2_5_omni.encoders import rows_of_frames
from omnistage.models.qwen2_5_omni.thinker import lay_out, tokenizer_of
from omnistage.models.text.chat import ChatTemplate

CELLS = [(version, variant) for version in saved_versions.VERSIONS for variant in VARIANTS if (version[:4], variant) not in UNREADABLE]


class FolderReader:
    """The settings that a Thinker reads in a folder before its weights."""

    def __init__(self, folder: Path) -> None:
        self.config = read_thinker_config(folder)
        self.tokenizer = tokenizer_of(folder, self.config)
        self.pictures = read_pictures(folder, self.config.vision)
        self.sounds = Spectrograms(folder, self.config.audio.mel_bins, adds_silence=True)
        context = self.config.text.context
        self.asks = preprocessing_of(self.config, self.pictures, self.sounds.sample_rate_hz, MEDIUM_ROWS["cpu"], context)

    def ids(self, conversation: Conversation) -> list[int]:
        turns = [Turn(turn["role"], tuple(map(part_of, turn["parts"]))) for turn in conversation]
        media = [part for turn in conversation for part in turn["parts"] if not isinstance(part, str)]
        written = self.tokenizer.template.token_ids(turns, [kind_of(part) for part in media])
        ids: list[int] = lay_out(written, [self.extent(part) for part in media], self.config).ids.tolist()
        return ids

    def extent(self, part: dict[str, Any]) -> MediumExtent:
        kind, vision = kind_of(part), self.config.vision
        sound = rows_of_frames(self.sounds.frames(part.get("sound", part.get("audio", 0))))
        ask = self.asks.of(kind, use_audio="sound" in part)
        if isinstance(ask, PicturePreprocessing):
            height, width = part["image"]
            height, width = smart_resize(height, width, ask.factor, ask.min_pixels, ask.max_pixels)
            return MediumExtent(Grid(1, height // vision.patch_size, width // vision.patch_size))
        if isinstance(ask, FilmPreprocessing):
            count, height, width = part["video"]
            height, width = smart_resize(height, width, ask.factor, ask.min_pixels, ask.frame_pixels(count))
            grid = Grid(-(-count // vision.frames), height // vision.patch_size, width // vision.patch_size)
            return MediumExtent(grid, vision.frames * ask.told_frame_s(count, 1 / ask.fps), sound if "sound" in part else 0)
        return MediumExtent(sound=sound)


def kind_of(part: dict[str, Any]) -> str:
    return next(kind for kind in ("image", "audio", "video") if kind in part)


def part_of(part: Any) -> Part:
    return part if isinstance(part, str) else Media(f"{kind_of(part)}/x", b"", use_audio="sound" in part)


def check(version: str, variant: str, files: saved_versions.Variant, folder: Path) -> None:
    saved_versions.write(files, folder)
    reader, expected = FolderReader(folder), files[EXPECTED]
    assert [reader.pictures.min_pixels, reader.pictures.max_pixels] == expected["pixels"]
    assert [list(reader.pictures.colours.mean), list(reader.pictures.colours.std)] == expected["colours"]
    half = (version[:4], variant) in HALF_READ
    for conversation, runs in zip(CONVERSATIONS, expected["prompts"], strict=True):
        if half and any("video" in part for turn in conversation for part in turn["parts"]):
            continue
        ids = [token_id for run in runs for token_id in ([run] if isinstance(run, int) else [run[0]] * run[1])]
        assert reader.ids(conversation) == ids, conversation


@pytest.mark.parametrize(("version", "variant"), CELLS)
def test_prompts_are_those_of_the_version_that_saved_the_folder(version: str, variant: str, tmp_path: Path) -> None:
    check(version, variant, saved_versions.kept(version)[variant], tmp_path)


@lengths.rounds(0, 1)
@pytest.mark.parametrize("version", saved_versions.VERSIONS)
def test_what_is_kept_of_a_version_is_what_it_saves(version: str, rounds: int, tmp_path: Path) -> None:
    """The long form installs the version."""
    kept = saved_versions.kept(version)
    assert kept.keys() == {variant for each, variant in CELLS if each == version}
    if rounds:
        made = saved_versions.saved_by(version)
        assert made == kept
        for variant, files in made.items():
            (tmp_path / variant).mkdir()
            check(version, variant, files, tmp_path / variant)


# Where things may stand ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_versions.source(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "folder"))


def any_settings(source: random.Random) -> dict[str, Any]:
    """Settings of pictures: limits by old names and new ones, by both, by none, with nulls, and colours or none."""
    names = {"shortest_edge": source.randint(1000, 5000), "longest_edge": source.randint(6000, 9000)}
    limits = {"min_pixels": source.randint(2000, 6000), "max_pixels": source.randint(6000, 20_000)}
    settings: dict[str, Any] = {"size": source.choice([names, None])}
    settings |= {name: source.choice([None, limit]) for name, limit in limits.items()}
    settings |= {name: [source.choice([0.25, 0.5, 1]) for _ in range(3)] for name in ("image_mean", "image_std")}
    return {name: value for name, value in settings.items() if source.random() < 0.7}


def test_settings_of_pictures_are_those_that_transformers_reads(folder: Path, seed: int) -> None:
    """Wherever they stand, and in whichever way."""
    source, config = random.Random(seed), read_thinker_config(folder)
    for _ in range(60):
        old, new = (any_settings(source) if source.random() < 0.7 else None for _ in range(2))
        old = {} if old is None and new is None else old
        (folder / "preprocessor_config.json").unlink(missing_ok=True)
        if old is not None:
            (folder / "preprocessor_config.json").write_text(json.dumps(old))
        together = {"processor_class": "Qwen2_5OmniProcessor"} | ({} if new is None else {"image_processor": new})
        (folder / "processor_config.json").write_text(json.dumps(together))
        theirs: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        ours = read_pictures(folder, config.vision)
        told = (old, new)
        assert (ours.min_pixels, ours.max_pixels) == (theirs.size.shortest_edge, theirs.size.longest_edge), told
        assert (list(ours.colours.mean), list(ours.colours.std)) == (list(theirs.image_mean), list(theirs.image_std)), told


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        ({"size": {"min_pixels": 5000, "max_pixels": 6000}}, (5000, 6000)),
        ({"size": {"min_pixels": 5000, "max_pixels": 6000}, "min_pixels": 5, "max_pixels": 6}, (5, 6)),
        ({"size": {"min_pixels": 5000, "max_pixels": 6000, "shortest_edge": 50, "longest_edge": 60}}, (50, 60)),
        ({"size": {"shortest_edge": None, "longest_edge": None}, "min_pixels": 5, "max_pixels": 6}, (5, 6)),
        ({"min_pixels": 7, "size": None}, (7, 28 * 28 * 1280)),
    ],
)
def test_limits_in_the_words_of_older_versions_are_read(folder: Path, settings: dict[str, Any], pixels: tuple[int, int]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    found = read_pictures(folder, read_thinker_config(folder).vision)
    assert (found.min_pixels, found.max_pixels) == pixels


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": {"shortest_edge": 5}}, "size lacks 'longest_edge'"),
        ({"size": {"height": 5, "width": 5}}, "size lacks 'shortest_edge'"),
        ({"size": 5}, "lacks the object 'size'"),
        ({"min_pixels": 0}, "must be above 0"),
        ({"min_pixels": 5001, "max_pixels": 5000}, "'min_pixels' is 5001 and 'max_pixels' 5000: "),
        ({"max_pixels": "many"}, "'max_pixels' is 'many'"),
        ({"do_normalize": False}, "'do_normalize' is false, which is not supported"),
        ({"rescale_factor": 1.0}, "only 'resample' 3 and 'rescale_factor' 1/255"),
        ({"resample": 2}, "only 'resample' 3"),
        ({"image_std": [1.0, 0.0, 1.0]}, "3 numbers each, the latter above 0"),
        ({"image_mean": [0.5]}, "3 numbers each"),
        ({"merge_size": 3}, "'merge_size' is 3, the model was made for 2"),
    ],
)
def test_settings_that_cannot_be_kept_to_are_told(folder: Path, settings: dict[str, Any], told: str) -> None:
    """In either file."""
    config = read_thinker_config(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadCheckpoint, match=re.escape(told)):
        read_pictures(folder, config.vision)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    with pytest.raises(BadCheckpoint, match=re.escape(told)):
        read_pictures(folder, config.vision)
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_pictures(folder, config.vision)


def test_films_that_want_other_colours_than_pictures_are_refused(folder: Path) -> None:
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"image_mean": [0.0, 0.0, 0.0]}))
    with pytest.raises(BadCheckpoint, match="films have another 'image_mean'"):
        read_pictures(folder, read_thinker_config(folder).vision)


def test_the_chat_template_is_the_one_that_transformers_takes(folder: Path, seed: int) -> None:
    """From whichever of the places where it may be."""
    source, config = random.Random(seed), read_thinker_config(folder)
    for _ in range(60):
        places: dict[str, Any] = {
            "processor_config.json": {"chat_template": source.choice(["a", {"default": "b", "rag": "c"}, None])},
            "chat_template.json": {"chat_template": "d"},
            "chat_template.jinja": "é",
        }
        kept = {name: content for name, content in places.items() if source.random() < 0.5}
        for name in places:
            (folder / name).unlink(missing_ok=True)
        saved_versions.write(kept, folder)
        found, _ = Qwen2_5OmniProcessor.get_processor_dict(folder, local_files_only=True)
        theirs = found.get("chat_template")
        if theirs is None:
            theirs = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
        theirs = theirs["default"] if isinstance(theirs, dict) else theirs
        turns = [Turn("user", ("x",))]
        wanted = ChatTemplate(theirs, tokenizer_of(folder, config).added, tokenizer_of(folder, config).encode, config.ids.kinds)
        assert tokenizer_of(folder, config).template.token_ids(turns, []) == wanted.token_ids(turns, []), kept


def test_of_several_templates_of_a_tokenizer_the_default_one_is_taken(folder: Path) -> None:
    (folder / "chat_template.json").unlink()
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "usual"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    tokenizer = tokenizer_of(folder, read_thinker_config(folder))
    assert tokenizer.template.token_ids([Turn("user", ("x",))], []) == list(tokenizer.encode("usual"))
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        tokenizer_of(folder, read_thinker_config(folder))


@pytest.mark.parametrize(("said", "ends"), [(None, 1), ([], 1), (7, 2), ([7, 100_000], 2)])
def test_ends_are_those_that_the_head_can_draw(folder: Path, said: Any, ends: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert len(tokenizer_of(folder, read_thinker_config(folder)).ends) == ends
    for wrong in ("seven", True, [7, "x"], -1):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(BadCheckpoint, match="must be an id, or a list of ids"):
            tokenizer_of(folder, read_thinker_config(folder))
