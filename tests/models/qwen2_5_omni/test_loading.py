"""A part that a checkpoint lacks or has too much is named, and a Thinker takes its share of the memory that is free."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_json
from omnistage.models.checkpoint.files import check_files
from omnistage.models.encoders.preparing import Spectrograms, read_pictures
from omnistage.models.encoders.reader import preprocessing_of
from omnistage.models.encoders.starting import DECODERS, MEDIUM_ROWS, MIN_MEDIUM_ROWS, PASS_FRAMES, PASS_PATCHES, PASS_SHARE, Sizes
from omnistage.models.media.terms import PicturePreprocessing
from omnistage.models.memory import MIN_CONTEXT, CacheSize, free_bytes, private_bytes
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import AudioConfig, ThinkerConfig, VisionConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.family import ThinkerOptions
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS, load_thinker
from omnistage.models.registry import FAMILIES, loading_texts, recognise
from omnistage.models.reports import LoadError, bytes_told
from omnistage.models.smol import thinker as smol

GIB = 1 << 30
ROW_BYTES = 36 << 10
"""Keys and values of one token of the 3B, in bfloat16."""


def change_weights(folder: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The weights of the first shard."""
    index = folder / "model.safetensors.index.json"
    shard = sorted(set(json.loads(index.read_text())["weight_map"].values()))[0]
    weights = load_file(folder / shard)
    how(weights)
    (folder / shard).unlink()
    save_file(weights, folder / shard, {"format": "pt"})

    def listed(values: dict[str, Any]) -> None:
        others = {name: file for name, file in values["weight_map"].items() if file != shard}
        values["weight_map"] = others | dict.fromkeys(weights, shard)

    change_json(index, listed)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises((LoadError, ValueError)) as told:
        load_thinker(folder, LoadOptions(path=folder, dtype="float32", **settings))
    return str(told.value)


@pytest.mark.parametrize("inner", [True, False], ids=["of the Thinker", "of all"])
def test_quantized_weights_are_refused_by_name(copied: Path, inner: bool) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    change_json(copied / "config.json", lambda config: (config["thinker_config"] if inner else config).update(quantized))
    assert "quantized by gptq are not supported" in refused(copied)


def test_a_weight_that_is_missing_or_that_nobody_reads_is_named(copied: Path) -> None:
    change_weights(copied, lambda weights: weights.pop("thinker.visual.blocks.0.attn.q.weight"))
    assert "thinker.visual.blocks.0.attn.q.weight" in refused(copied)
    change_weights(copied, lambda weights: weights.update({"thinker.visual.blocks.0.attn.q.weight": torch.zeros(64, 64)}))
    change_weights(copied, lambda weights: weights.update({"thinker.visual.surprise.weight": torch.zeros(2)}))
    assert "has 1 weights that this model does not, the first is thinker.visual.surprise.weight" in refused(copied)
    bias = "thinker.model.layers.0.self_attn.o_proj.bias"
    change_weights(copied, lambda weights: (weights.pop("thinker.visual.surprise.weight"), weights.update({bias: torch.ones(2)})))
    assert f"has 1 weights that this model does not, the first is {bias}" in refused(copied)


@pytest.mark.parametrize(
    ("file", "how", "told"),
    [
        ("config.json", lambda v: v["thinker_config"]["text_config"].update(use_sliding_window=True), "sliding windows"),
        ("config.json", lambda v: v["thinker_config"]["text_config"]["rope_scaling"].update(rope_type="yarn", type="yarn"), "'yarn'"),
        ("config.json", lambda v: v["thinker_config"].pop("audio_token_index"), "audio_token_i"),
        ("config.json", lambda v: v["thinker_config"].update(audio_start_token_id=1 << 20), "1048576 for audio_start"),
        ("config.json", lambda v: v["thinker_config"].update(audio_end_token_id=-1), "-1 for audio_end"),
        (
            "config.json",
            lambda v: v["thinker_config"].update(audio_end_token_id=v["thinker_config"]["audio_start_token_id"]),
            "must differ",
        ),
        ("config.json", lambda v: v["thinker_config"]["text_config"].update(rope_theta=0), "'rope_theta' is 0.0"),
        ("config.json", lambda v: v["thinker_config"]["vision_config"].update(depth="two"), "'depth'"),
        ("preprocessor_config.json", lambda v: v.update(patch_size=16), "'patch_size' is 16"),
        ("preprocessor_config.json", lambda v: v.update(feature_size=80), "80 mel bins"),
        ("chat_template.json", lambda v: v.clear(), "no chat template"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_named(copied: Path, file: str, how: Callable[[dict[str, Any]], object], told: str) -> None:
    change_json(copied / file, how)
    if file == "chat_template.json":
        change_json(copied / "tokenizer_config.json", lambda values: values.pop("chat_template", None))
    assert told in refused(copied)


def test_what_transformers_writes_is_read_too(copied: Path, omni_checkpoint: Path) -> None:
    """Its own spelling of the config, and a checkpoint in one file in another type."""
    published = read_thinker_config(omni_checkpoint)

    def spelt(config: dict[str, Any]) -> None:
        text = config["thinker_config"]["text_config"]
        text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
        for name in ("image", "audio", "video"):
            config["thinker_config"][f"{name}_token_id"] = config["thinker_config"].pop(f"{name}_token_index")

    change_json(copied / "config.json", spelt)
    index = copied / "model.safetensors.index.json"
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights = {name: weight.half() for shard in shards for name, weight in load_file(copied / shard).items()}
    for path in (index, *(copied / shard for shard in shards)):
        path.unlink()
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    pictures = read_pictures(copied, published.vision)
    settings = json.loads((copied / "preprocessor_config.json").read_text())
    (copied / "preprocessor_config.json").unlink()
    parts_of_it = dict.fromkeys(("image_processor", "feature_extractor", "video_processor"), settings)
    (copied / "processor_config.json").write_text(json.dumps(parts_of_it))
    check_files(copied, "", FAMILIES["qwen2_5_omni"].models["thinker"].files)
    assert read_pictures(copied, published.vision) == pictures
    Spectrograms(copied, published.audio.mel_bins, adds_silence=True)  # It is there.
    assert read_thinker_config(copied) == published
    assert recognise(copied) == "qwen2_5_omni"
    parts = WEIGHTS.read_parts(copied, published, torch.float32, torch.device("cpu"))
    assert parts.decoder.spec.dtype == torch.float32


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
    wanted = ThinkerOptions.from_settings(options.family)
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
PUBLISHED_EARS = AudioConfig(32, 1280, 5120, 20, 128, 1500, 2048, 100)


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
