"""A part that a checkpoint lacks or has too much is named, and a Thinker takes its share of the memory that is free. Folders that
Transformers saved, of every layout since Qwen2.5-Omni, make the prompts that it makes."""

from __future__ import annotations

import json
import mmap
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import lengths, saved_versions
from helpers.checkpoints import change_json
from helpers.saved_processor import CONVERSATIONS, EXPECTED, HALF_READ, UNREADABLE, VARIANTS, Conversation
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.encoder import Grid, MediumExtent
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.reader import preprocessing_of
from omnistage.models.encoders.starting import DECODERS, MEDIUM_ROWS, MIN_MEDIUM_ROWS, PASS_FRAMES, PASS_PATCHES, PASS_SHARE, Sizes
from omnistage.models.media.terms import FilmPreprocessing, PicturePreprocessing, smart_resize
from omnistage.models.memory import MIN_CONTEXT, CacheSize, free_bytes, private_bytes
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import AudioConfig, ThinkerConfig, VisionConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.encoders import rows_of_frames
from omnistage.models.qwen2_5_omni.family import THINKER
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5PromptRows, load_thinker, tokenizer_of
from omnistage.models.registry import loading_texts
from omnistage.models.reports import LoadError, bytes_told
from omnistage.models.smol import thinker as smol
from omnistage.models.text.chat import ChatTemplate

GIB = 1 << 30
ROW_BYTES = 36 << 10
"""Keys and values of one token of the 3B, in bfloat16."""


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises((LoadError, ValueError)) as told:
        load_thinker(folder, LoadOptions(path=folder, dtype="float32", **settings))
    return str(told.value)


def test_a_folder_without_a_chat_template_is_named(copied: Path) -> None:
    change_json(copied / "chat_template.json", dict.clear)
    change_json(copied / "tokenizer_config.json", lambda values: values.pop("chat_template", None))
    assert "no chat template" in refused(copied)


def test_a_dtype_that_no_thinker_computes_in_is_told(omni_checkpoint: Path, default_model: Path) -> None:
    for load, folder in ((load_thinker, omni_checkpoint), (smol.load_thinker, default_model / "thinker")):
        with pytest.raises(LoadError, match="dtype must be one of bfloat16, float32, got 'float16'"):
            load(folder, LoadOptions(path=folder, dtype="float16"))


def test_options_that_cannot_be_are_told(omni_checkpoint: Path) -> None:
    assert "unknown options ['speed'] of the thinker of qwen2_5_omni" in refused(omni_checkpoint, family={"speed": 1})
    assert "option context of the thinker of qwen2_5_omni is -1" in refused(omni_checkpoint, family={"context": -1})
    assert "option decoders of the thinker of qwen2_5_omni is 'two'" in refused(omni_checkpoint, family={"decoders": "two"})
    assert "room for" in refused(omni_checkpoint, kv_cache_bytes=1000)
    assert "give more, or a smaller context" in refused(omni_checkpoint, kv_cache_bytes=1 << 20, family={"context": 32768})


# Sizes ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(omni_checkpoint: Path) -> ThinkerConfig:
    return read_thinker_config(omni_checkpoint)


def sizes(config: ThinkerConfig, free: int, sessions: int = 64, **settings: Any) -> Sizes:
    options = LoadOptions(max_sessions=sessions, **settings)
    wanted = THINKER.from_settings(options.family)
    cache = CacheSize.choose(options, row_bytes=ROW_BYTES, context=config.text.context, user_context=wanted.context, free=free)
    return Sizes.choose(config, wanted, options, cache)


def test_what_is_free_decides(config: ThinkerConfig) -> None:
    large, small, tight = (sizes(config, free) for free in (64 * GIB, 8 * GIB, GIB // 2))
    assert large.cache.kv_bytes == 64 * 4096 * ROW_BYTES, "no more than all sessions have a use for"
    assert small.cache.kv_bytes == int(0.4 * 8 * GIB)
    assert tight.cache.kv_bytes == int(0.4 * GIB / 2)
    assert large.cache.context == small.cache.context == config.text.context
    assert tight.cache.context == 4096 < config.text.context and tight.cache.kv_bytes < 8192 * ROW_BYTES
    assert f"{tight.cache.context} of the {config.text.context}" in tight.reasons["context"]
    assert large.feature_bytes == 2 * GIB > small.feature_bytes > tight.feature_bytes > 0
    assert large.pass_patches == PASS_PATCHES["cpu"] > tight.pass_patches and tight.medium_rows == 512
    assert large.medium_rows == MEDIUM_ROWS["cpu"]
    assert large.decoders == DECODERS
    with pytest.raises(LoadError, match=f"{MIN_CONTEXT} are the least; free some memory"):
        sizes(config, 10 << 20)


def test_replicas_with_about_as_much_memory_have_the_same_context(config: ThinkerConfig) -> None:
    """The context decides when an answer ends. A context that somebody asks for is taken as it is where there is room."""
    contexts = [sizes(config, free << 20).cache.context for free in range(90, 3000, 7)]
    assert sorted(set(contexts)) == [1 << power for power in range(10, 16)] and contexts == sorted(contexts)
    assert sizes(config, GIB, family={"context": 5000}).cache.context == 5000
    assert sizes(config, GIB, sessions=1, family={"context": 5001}).cache.kv_bytes >= 157 * 32 * ROW_BYTES, "whole pages"
    assert sizes(config, GIB, family={"context": 500}).cache.context == 500
    with pytest.raises(LoadError, match="room for 480 tokens of one conversation, 500 are the least"):
        sizes(config, int(490 * ROW_BYTES / 0.4), family={"context": 500})


PUBLISHED_EYES = VisionConfig(32, 1280, 3420, 16, 14, 2, 2, 2048, 3, 10_000.0, 112, frozenset({7, 15, 23, 31}))
PUBLISHED_EARS = AudioConfig(32, 1280, 5120, 20, 128, 1500, 2048, 200, 1600, 25.0)


@pytest.mark.parametrize("is_published", [False, True])
def test_a_pass_of_an_encoder_has_the_memory_that_is_told(config: ThinkerConfig, omni_checkpoint: Path, is_published: bool) -> None:
    """The largest picture that there may be is one piece: it is counted in the same unit, and so are some chunks of sound."""
    if is_published:
        config = replace(config, vision=PUBLISHED_EYES, audio=PUBLISHED_EARS)
    pictures = read_pictures(omni_checkpoint, config.vision)
    for free in (GIB // 8, GIB, 3 * GIB, 8 * GIB, 64 * GIB):
        chosen = sizes(config, free)
        ask = preprocessing_of(config, pictures, 16_000, chosen.medium_rows, chosen.cache.context).of("image")
        assert isinstance(ask, PicturePreprocessing)
        assert ask.max_pixels // config.vision.patch_size**2 <= chosen.pass_patches <= PASS_PATCHES["cpu"]
        assert config.audio.piece <= chosen.pass_frames <= PASS_FRAMES["cpu"]
        patch, frame = config.vision.patch_bytes, config.audio.frame_bytes
        largest = max(chosen.pass_patches * patch, chosen.pass_frames * frame)
        assert chosen.reasons["encoder_memory"].startswith(f"{bytes_told(largest)}, for {chosen.pass_patches} patches")
        least = max(MIN_MEDIUM_ROWS * config.vision.unit * patch, config.audio.piece * frame)
        assert largest <= max(int(free * PASS_SHARE), least)
    asked = sizes(config, GIB, family={"medium_rows": 4000})
    assert asked.medium_rows == 4000 and asked.pass_patches == 4 * 4000, "whoever asks for more gets it, and is told what it takes"


@pytest.mark.parametrize(
    ("free", "family", "is_told"), [(GIB // 64, {}, True), (64 * GIB, {}, False), (GIB // 64, {"medium_rows": 64}, False)]
)
def test_a_default_that_has_no_memory_is_told_in_the_log(config: ThinkerConfig, free: int, family: dict[str, int], is_told: bool) -> None:
    config = replace(config, vision=PUBLISHED_EYES, audio=PUBLISHED_EARS)
    with structlog.testing.capture_logs() as lines:
        chosen = sizes(config, free, family={"context": 512, **family}, kv_cache_bytes=GIB)
    assert [line["medium_rows"] for line in lines if line["event"] == "medium_rows.small"] == ([chosen.medium_rows] if is_told else [])


def test_what_is_asked_for_is_taken(config: ThinkerConfig) -> None:
    family = {"context": 4096, "medium_rows": 300, "feature_cache_bytes": 77, "decoders": 5}
    asked = sizes(config, 8 * GIB, family=family, kv_cache_bytes=GIB, max_batch_tokens=99)
    assert (asked.cache.context, asked.medium_rows, asked.feature_bytes, asked.decoders) == (4096, 300, 77, 5)
    assert (asked.cache.kv_bytes, asked.batch_rows) == (GIB, 99)
    assert sizes(config, 8 * GIB, enable_cache=False).feature_bytes == 0
    assert sizes(config, 8 * GIB, sessions=1).cache.kv_bytes == config.text.context * ROW_BYTES, "one whole context at least"


def test_a_share_of_what_is_free_is_told_and_one_that_is_too_small_refused(config: ThinkerConfig, omni_checkpoint: Path) -> None:
    alone, shared = (sizes(config, GIB, memory_share=share).reasons["free_memory"] for share in (1.0, 0.25))
    assert (alone, shared) == ("1 GiB after the weights", "1 GiB after the weights, with 0.25 of the memory for this server")
    told = "kv_cache_bytes 0: room for 0 tokens of one conversation, 1024 are the least; free some memory, or give it a larger memory_share"
    assert told in refused(omni_checkpoint, memory_share=1e-6)
    assert loading_texts("qwen2_5_omni", "thinker", LoadOptions(memory_share=0.25))["memory_share"] == "0.25"
    assert loading_texts("qwen2_5_omni", "thinker", LoadOptions())["memory_share"] == "1 (default)"


def test_memory_is_measured() -> None:
    before, free = private_bytes(), free_bytes("cpu")
    with mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE) as held:  # From the system: a heap may hand out what it holds already.
        held.write(bytes(100 << 20))
        assert private_bytes() - before >= 99 << 20
    assert 0 < free < 1 << 44


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
        ids: list[int] = Qwen2_5PromptRows(self.config).lay_out(written, [self.extent(part) for part in media]).ids.tolist()
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
