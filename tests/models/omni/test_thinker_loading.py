"""A part that a checkpoint lacks or has too much is named, and a file that any version of Transformers saved is read: of Thinkers, and of
their processors' settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from helpers import lengths
from helpers.checkpoints import Weights, change_json, change_weights, changed, in_blocks, linked
from helpers.omni_reference import OmniReference, Qwen3Reference
from omnistage.engine.attention import choose_backend
from omnistage.engine.devices import ONE_RANK, Distributed
from omnistage.engine.results import fixed_results
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.encoders.preparing import read_pictures
from omnistage.models.encoders.starting import Preparation, encoded_rows
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import thinker as qwen2_5_thinker
from omnistage.models.qwen3_omni import thinker as qwen3_thinker
from omnistage.models.qwen3_omni.config import read_thinker_config
from omnistage.models.qwen3_omni.talker_config import read_talker_config
from omnistage.models.qwen3_omni.thinker import WEIGHTS, load_thinker, read_decoder
from omnistage.models.qwen3_omni.wave.config import read_wave_config
from omnistage.models.registry import load, recognise
from omnistage.models.reports import LoadError
from omnistage.models.tiny import omni
from omnistage.models.tiny.qwen3_omni import PREPROCESSOR

ATTENTION = "thinker.model.layers.0.self_attn.q_proj.weight"
EXPERT = "thinker.model.layers.1.mlp.experts.3.up_proj.weight"

QWEN2_5, QWEN3 = "qwen2_5_omni", "qwen3_omni"
THINKERS: Mapping[str, tuple[str, Any]] = {QWEN2_5: ("omni_checkpoint", qwen2_5_thinker), QWEN3: ("qwen3_checkpoint", qwen3_thinker)}
"""By family: the fixture of its checkpoint, and the module of its Thinker."""

BLOCK = (32, 48)
"""The block of numbers with the same scale: some blocks are whole."""


@pytest.fixture
def copied(qwen3_checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed."""
    return linked(qwen3_checkpoint, tmp_path)


@pytest.fixture
def copied_2_5(omni_checkpoint: Path, tmp_path: Path) -> Path:
    return linked(omni_checkpoint, tmp_path)


def change_config(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    change_json(folder / "config.json", how)


def refused(folder: Path) -> str:
    with pytest.raises((LoadError, ValueError)) as told:
        load(recognise(folder), "thinker", LoadOptions(path=folder, dtype="float32"))
    return str(told.value)


TEXT, EYES, EARS = (f"thinker_config.{part}_config" for part in ("text", "vision", "audio"))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (f"{TEXT}.mlp_only_layers", [1], "layers without experts"),
        (f"{TEXT}.decoder_sparse_step", 2, "layers without experts"),
        (f"{TEXT}.num_experts_per_tok", 11, "'num_experts_per_tok' is 11, of 10 experts"),
        (f"{TEXT}.num_experts", None, "lacks 'num_experts'"),
        (f"{TEXT}.moe_intermediate_size", 0, "'moe_intermediate_size' is 0"),
        (f"{TEXT}.hidden_act", "gelu", "'hidden_act' is 'gelu', and only 'silu'"),
        (f"{TEXT}.rope_scaling", {"rope_type": "yarn", "mrope_section": [6, 5, 5]}, "'yarn'"),
        (f"{TEXT}.rope_scaling", {"rope_type": "default", "mrope_section": [6, 5]}, "is [6, 5]: "),
        (f"{TEXT}.rope_theta", 0, "'rope_theta' is 0.0, which must be 1 or more"),
        (f"{TEXT}.rope_theta", 1e-300, "'rope_theta' is 1e-300, which must be 1 or more"),
        (f"{TEXT}.rope_scaling", {"mrope_section": [6, 5, 5], "rope_theta": -1e6}, "'rope_theta' is -1000000.0, which must be 1 or more"),
        (f"{TEXT}.rms_norm_eps", -1e-6, "'rms_norm_eps' is -1e-06, which must be 0 or more"),
        (f"{TEXT}.attention_bias", True, "lacks the weight thinker.model.layers.0.self_attn.q_proj.bias"),
        (f"{TEXT}.hidden_size", 161, "rows of the Thinker have 161"),
        (f"{EYES}.deepstack_visual_indexes", [0, 4], "layers from 0 to 3"),
        (f"{EYES}.deepstack_visual_indexes", [2, 2], "each one once"),
        (f"{EYES}.rope_parameters", {"rope_type": "default"}, "positions of the type 'default' are not supported, only the axial ones"),
        (f"{EYES}.deepstack_visual_indexes", "all", "lacks the list 'deepstack_visual_indexes'"),
        (f"{EYES}.spatial_merge_size", None, "lacks 'spatial_merge_size'"),
        (f"{EYES}.hidden_act", "relu", "only 'gelu_pytorch_tanh'"),
        (f"{EYES}.num_heads", 3, "is not 3 heads of a multiple of 4"),
        (f"{EYES}.num_position_embeddings", 64, "pos_embed"),
        (f"{EARS}.n_window", 40, "chunks of 10 rows: only chunks of 13"),
        (f"{EARS}.n_window_infer", 99, "'n_window_infer' is 99: it must be twice 'n_window' or more, 100"),
        (f"{EARS}.max_source_positions", 12, "'max_source_positions' is 12, and a chunk has 13 rows"),
        (f"{EARS}.num_mel_bins", 80, "128 mel bins, the model was made for 80"),
        (f"{EARS}.downsample_hidden_size", 25, "conv2d1"),
        ("talker_config.accept_hidden_layer", 5, "'accept_hidden_layer' is 5, and the Thinker has 4 layers"),
        ("im_start_token_id", 3, "the chat template begins no turn of a user with 'im_start_token_id' 3"),
        ("user_token_id", 3, "and 'user_token_id' 3 of config.json"),
        ("user_token_id", None, "lacks 'user_token_id'"),
        ("thinker_config.audio_end_token_id", "x", "'audio_end_token_id' is 'x', which is no int"),
        ("thinker_config.audio_start_token_id", 1 << 20, "1048576 for audio_start"),
        ("thinker_config.audio_end_token_id", -1, "-1 for audio_end"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantized by gptq are not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_told(copied: Path, path: str, value: object, told: str) -> None:
    change_config(copied, lambda values: changed(values, {path: value}))
    assert told in refused(copied)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (f"{TEXT}.use_sliding_window", True, "sliding windows"),
        (f"{TEXT}.rope_scaling.rope_type", "yarn", "'yarn'"),
        (f"{EYES}.depth", "two", "'depth'"),
        ("thinker_config.audio_token_index", None, "lacks 'audio_token_id'"),
        ("thinker_config.quantization_config", {"quant_method": "gptq", "bits": 4}, "quantized by gptq are not supported"),
    ],
)
def test_a_config_of_qwen2_5_that_does_not_fit_is_told(copied_2_5: Path, path: str, value: object, told: str) -> None:
    change_config(copied_2_5, lambda values: changed(values, {path: value}))
    assert told in refused(copied_2_5)


def test_a_checkpoint_of_another_family_is_refused(copied: Path) -> None:
    with pytest.raises(LoadError, match="is a 'qwen3_omni_moe', not a 'qwen2_5_omni'"):
        load(QWEN2_5, "thinker", LoadOptions(path=copied, dtype="float32"))


@pytest.mark.parametrize(
    ("file", "told"), [("vocab.json", "; vocab.json would do as well"), ("merges.txt", "; merges.txt would do as well")]
)
def test_a_folder_without_a_whole_tokenizer_is_refused(copied: Path, file: str, told: str) -> None:
    (copied / file).unlink()
    assert f"{copied / 'tokenizer.json'} is missing" in refused(copied) and told in refused(copied)


def test_ids_of_media_that_are_the_same_are_told(copied: Path) -> None:
    change_config(copied, lambda values: values["thinker_config"].update(image_token_id=values["thinker_config"]["audio_token_id"]))
    assert "the token ids of media must differ, and be 0 to " in refused(copied)


@pytest.mark.parametrize(
    ("checkpoint", "name", "surplus"),
    [
        ("copied_2_5", "thinker.visual.patch_embed.proj.weight", "thinker.visual.surprise.weight"),
        ("copied_2_5", "thinker.audio_tower.proj.weight", "thinker.model.layers.0.self_attn.o_proj.bias"),
        ("copied", EXPERT, EXPERT.replace(".3.", ".10.")),
    ],
)
def test_a_weight_that_is_missing_misshapen_or_that_nobody_reads_is_named(
    request: pytest.FixtureRequest, checkpoint: str, name: str, surplus: str
) -> None:
    folder, taken = request.getfixturevalue(checkpoint), Weights()

    def without(weights: Weights) -> Weights:
        taken[name] = weights.pop(name)
        return weights

    change_weights(folder, without)
    shape = [*taken[name].shape]
    assert f"lacks the weight {name}" in refused(folder)
    _change_one(folder, {name: taken[name][1:]})
    assert f"{name} is {[shape[0] - 1, *shape[1:]]}, and by config.json it is {shape}" in refused(folder)
    _change_one(folder, {name: taken[name], surplus: taken[name].clone()})
    assert f"1 weights that this model does not, the first is {surplus}" in refused(folder)


@lengths.drawn_cells(2, "name", ["mlp.gate", "mlp.experts.3.down_proj", "self_attn.o_proj", "self_attn.k_proj"])
def test_a_bias_that_the_config_does_not_speak_of_is_named(copied: Path, name: str) -> None:
    change_weights(copied, lambda weights: weights | {f"thinker.model.layers.1.{name}.bias": torch.zeros(2)})
    assert f"1 weights that this model does not, the first is thinker.model.layers.1.{name}.bias" in refused(copied)


@lengths.long_form(
    "models/omni/test_thinker_loading.py::test_a_bias_that_the_config_does_not_speak_of_is_named",
    unkept="biases that the config speaks of are read",
)
def test_biases_of_attention_are_there_where_the_config_says_so(copied: Path, qwen3_checkpoint: Path) -> None:
    change_config(copied, lambda values: changed(values, {f"{TEXT}.attention_bias": True}))
    products = ("q_proj", "k_proj", "v_proj", "o_proj")
    biases = Weights()

    def biased(weights: Weights) -> Weights:
        names = [name for name in weights if name.startswith("thinker.model.layers.") and name.split(".")[-2] in products]
        biases.update({name.replace(".weight", ".bias"): torch.ones(len(weights[name])) for name in names})
        return weights | biases

    change_weights(copied, biased)
    assert not all(map(torch.equal, results(copied), results(qwen3_checkpoint)))
    _change_one(copied, {name: bias[1:].clone() for name, bias in biases.items() if "layers.1.self_attn.o_proj" in name})
    assert "o_proj.bias' is [159], and by the config it is [160]" in refused(copied)


def _change_one(folder: Path, more: Weights, whole: Weights | None = None) -> None:
    """whole: all that was there before; None: what is there."""
    path = folder / "model.safetensors"
    weights = (load_file(path) if whole is None else whole) | more
    path.unlink()
    save_file(weights, path, {"format": "pt"})


def together(weights: Weights) -> Weights:
    """The weights of all experts of a layer as one, and the names that Transformers 5 has in memory."""
    made = {name: value for name, value in weights.items() if ".experts." not in name}
    for prefix in dict.fromkeys(name.partition(".experts.")[0] for name in weights if ".experts." in name):
        count = sum(name.startswith(f"{prefix}.experts.") and name.endswith(".down_proj.weight") for name in weights)
        every = [f"{prefix}.experts.{expert}" for expert in range(count)]
        made[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([weights[f"{one}.{part}_proj.weight"] for part in ("gate", "up")]) for one in every]
        )
        made[f"{prefix}.experts.down_proj"] = torch.stack([weights[f"{one}.down_proj.weight"] for one in every])
    begins = {"thinker.model.": "thinker.model.language_model.", "thinker.visual.": "thinker.model.visual."}
    begins["thinker.audio_tower."] = "thinker.model.audio_tower."
    return {
        next((new + name.removeprefix(old) for old, new in begins.items() if name.startswith(old)), name): value
        for name, value in made.items()
    }


def results(folder: Path, family: str = QWEN3) -> list[torch.Tensor]:
    """The results for fixed tokens, pictures and sounds."""
    _, thinker = THINKERS[family]
    config = thinker.read_thinker_config(folder)
    parts = thinker.WEIGHTS.read_parts(folder, config, torch.float32, torch.device("cpu"))
    made = fixed_results(parts.decoder, parts.decoder.logits, choose_backend(parts.decoder.spec).backend)
    return [*made, *encoded_rows(parts, read_pictures(folder, config.vision).colours)[1]]


@lengths.long_form(unkept="experts may be stored together")
def test_experts_that_are_stored_together_are_those_that_are_stored_one_by_one(copied: Path, qwen3_checkpoint: Path) -> None:
    change_weights(copied, together)
    assert all(map(torch.equal, results(copied), results(qwen3_checkpoint)))
    path = "thinker.model.language_model.layers.2.mlp.experts.down_proj"
    _change_one(copied, {path: torch.zeros(11, 160, 80)})
    assert "is [11, 160, 80], and by config.json it is [10, 160, 80]" in refused(copied)


@lengths.long_form(unkept="a head counts more than a config that ties it")
def test_a_head_that_is_there_is_used_though_the_config_ties_it(copied: Path, qwen3_checkpoint: Path) -> None:
    """As Transformers 5 does it, and as it says itself."""
    change_config(copied, lambda values: values["thinker_config"].update(tie_word_embeddings=True))
    assert all(map(torch.equal, results(copied), results(qwen3_checkpoint)))


LAYOUTS: dict[str, Callable[[Weights], Weights]] = {"one by one": lambda weights: weights, "together": together}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_reads_no_experts_but_its_own(copied: Path, layout: Callable[[Weights], Weights]) -> None:
    """Those of the second rank are damaged, which only that one notices, and whoever has all of them."""
    options, config = LoadOptions(path=copied, dtype="float32"), read_thinker_config(copied)
    first, second = (Distributed(rank, 2) for rank in range(2))

    def damaged(weights: Weights) -> Weights:
        for name in weights:
            if (
                name.startswith("thinker.model.layers.")
                and ".experts." in name
                and int(name.split(".")[6]) in config.experts.of_rank(second)
            ):
                weights[name] = torch.full_like(weights[name], torch.nan)
        return layout(weights)

    change_weights(copied, damaged)
    read_decoder(copied, options, first)
    WEIGHTS.read_parts(copied, config, torch.float32, torch.device("cpu"), first)
    for group in (second, ONE_RANK):
        with pytest.raises(BadCheckpoint, match=r"experts.*has numbers that are not finite"):
            read_decoder(copied, options, group)


def test_the_first_rank_misses_experts_of_the_others(copied: Path) -> None:
    change_weights(copied, lambda weights: {name: value for name, value in weights.items() if name != EXPERT})
    config, group = read_thinker_config(copied), Distributed(0, 2)
    assert 3 not in config.experts.of_rank(group)
    with pytest.raises(BadCheckpoint, match=f"lacks the weight {EXPERT}"):
        WEIGHTS.read_parts(copied, config, torch.float32, torch.device("cpu"), group)


@lengths.one_or_all("layout", LAYOUTS)
def test_floats_of_eight_bits_are_those_that_they_stand_for(copied: Path, layout: str, seed: int) -> None:
    """In whatever way experts are stored; the other stages take no offence."""
    packed, lay_out = Weights(), LAYOUTS[lengths.draw(layout, LAYOUTS, seed)]

    def pack(weights: Weights) -> Weights:
        for name, weight in lay_out(weights).items():
            products = (".self_attn.", ".experts.")
            is_packed = name.startswith("thinker.model.") and weight.ndim > 1 and any(part in name for part in products)
            packed.update(in_blocks(name, weight, BLOCK) if is_packed else {name: weight})
        return packed

    change_weights(copied, pack)
    said = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    change_config(copied, lambda values: values.update(quantization_config=said))
    found = results(copied)
    assert read_talker_config(copied).experts.experts == 11 and read_wave_config(copied).codebooks > 1
    plain = Weights()
    for name, weight in packed.items():
        if (scales := packed.get(f"{name}_scale_inv")) is not None:
            plain[name] = _dequantize_fp8_weight(weight, scales, list(BLOCK), torch.float32)
        elif not name.endswith("_scale_inv"):
            plain[name] = weight
    _change_one(copied, {}, plain)
    change_config(copied, lambda values: values.pop("quantization_config"))
    assert all(map(torch.equal, found, results(copied)))


@pytest.mark.parametrize(("family", "reference"), [(QWEN2_5, OmniReference), (QWEN3, Qwen3Reference)])
def test_what_transformers_saves_is_read(
    request: pytest.FixtureRequest, family: str, reference: Callable[[Path], OmniReference], tmp_path: Path
) -> None:
    """Its own spelling of config.json too, in which the rest of the folder is as before."""
    fixture, thinker = THINKERS[family]
    checkpoint = request.getfixturevalue(fixture)
    reference(checkpoint).whole.save_pretrained(tmp_path)
    for path in checkpoint.iterdir():
        if not (tmp_path / path.name).exists() and not path.name.startswith("model"):
            (tmp_path / path.name).symlink_to(path)
    assert recognise(tmp_path) == family
    saved, published = thinker.read_thinker_config(tmp_path), thinker.read_thinker_config(checkpoint)
    assert (replace(saved, speech=published.speech) if family == QWEN3 else saved) == published
    assert all(map(torch.equal, results(tmp_path, family), results(checkpoint, family)))


@lengths.drawn_cells(1, "said", [{"enable_audio_output": False}, {"talker_config": {}}, {"code2wav_config": None}], ids=str)
def test_a_checkpoint_without_a_talker_gives_text_alone(copied: Path, said: dict[str, object]) -> None:
    speaking = load_thinker(copied, LoadOptions(path=copied, dtype="float32"))
    change_config(copied, lambda values: values.update(said))
    silent = load_thinker(copied, LoadOptions(path=copied, dtype="float32"))
    assert [port.name for port in speaking.info.produces] == ["text", "prompt", "places", "hidden"]
    assert [port.name for port in silent.info.produces] == ["text"]
    for model in (speaking, silent):
        asyncio.run(model.warm_up())
        asyncio.run(model.close())


Files = Mapping[str, Any]
"""By their names without the end."""

LIMITS = {"min_pixels": 20 * 32 * 32, "max_pixels": 150 * 32 * 32}
EDGES = {"shortest_edge": 3136, "longest_edge": 12845056}
PUBLISHED = {**omni.PREPROCESSOR, **PREPROCESSOR, "merge_size": 2, "patch_size": 16, "temporal_patch_size": 2}
SHARED = {name: PUBLISHED[name] for name in PUBLISHED if name not in {"min_pixels", "max_pixels", "processor_class"}}
DONE = {f"do_{what}": True for what in ("convert_rgb", "normalize", "rescale", "resize")} | {"resample": 3, "rescale_factor": 1 / 255}


def by_4_57(limits: Mapping[str, int]) -> Files:
    """As 4.57.6 was seen to save it; where others than the published limits were asked for they stand with the tokenizer, too."""
    films = {"video_processor_type": "Qwen2VLVideoProcessor", "size": EDGES, "fps": None, "crop_size": None, "max_frames": 768}
    pictures = {**PUBLISHED, **limits}
    return {"preprocessor_config": pictures, "video_preprocessor_config": {**pictures, **DONE, **films}, "tokenizer_config": limits}


def by_5_23(limits: Mapping[str, int]) -> Files:
    """As 5.23.0 was seen to save it."""
    edges = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]} if limits else EDGES
    seen = {**SHARED, **DONE, "size": edges}
    together = {"feature_extractor": {**PUBLISHED, **limits}, "image_processor": seen, "video_processor": {**seen, "max_frames": 768}}
    return {"processor_config": {**together, "processor_class": "Qwen3OmniMoeProcessor"}, "tokenizer_config": limits}


def folder_of(checkpoint: Path, folder: Path, files: Files) -> Path:
    """The checkpoint with these files alone of its processor."""
    said = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (folder / "config.json").symlink_to(checkpoint / "config.json")
    for name, values in {"tokenizer_config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps({**said, **values} if name == "tokenizer_config" else values))
    return folder


def read(folder: Path) -> Preparation:
    return Preparation.of(folder, read_thinker_config(folder))


@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["published", "others"])
def test_what_versions_save_prepares_media_alike(qwen3_checkpoint: Path, limits: Mapping[str, int], seed: int, tmp_path: Path) -> None:
    heard = torch.randn(23_456, generator=torch.Generator().manual_seed(seed)).numpy()
    made = list[Preparation]()
    for number, files in enumerate((by_4_57(limits), by_5_23(limits))):
        (folder := tmp_path / str(number)).mkdir()
        made.append(read(folder_of(qwen3_checkpoint, folder, files)))
        theirs: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        features = theirs(heard, sampling_rate=16_000, return_tensors="np", truncation=False)["input_features"][0].T
        sound = made[-1].spectrograms(heard)
        assert torch.equal(sound, torch.from_numpy(features[: len(sound)].copy()))
    assert made[0].pictures == made[1].pictures
    found = made[0].pictures
    wanted = tuple(limits.values()) if limits else (3136, 12845056)
    assert (found.min_pixels, found.max_pixels) == wanted
    # The limits of films where nobody wants others: those of the published processor, which no file says.
    assert (found.film_min_pixels, found.film_max_pixels) == (wanted if limits else (128 * 32 * 32, 768 * 32 * 32))
    if not limits:
        assert found == read(qwen3_checkpoint).pictures


@pytest.mark.parametrize(("patch_size", "merge"), [(16, 3), (8, 2), (14, 2)])
def test_bounds_of_a_film_are_pixels_whatever_the_patches_are(qwen3_checkpoint: Path, patch_size: int, merge: int, tmp_path: Path) -> None:
    vision = replace(read_thinker_config(qwen3_checkpoint).vision, patch_size=patch_size, merge=merge)
    files = {"preprocessor_config": {**PUBLISHED, "patch_size": patch_size, "merge_size": merge}}
    found = read_pictures(folder_of(qwen3_checkpoint, tmp_path, files), vision)
    assert (found.film_min_pixels, found.film_max_pixels) == (128 * 32 * 32, 768 * 32 * 32)


WRONG = [
    ("feature_size", 80, "80 mel bins, the model was made for 128"),
    ("feature_size", None, "80 mel bins, the model was made for 128"),
    ("feature_size", "many", "'feature_size' is 'many', which is no int"),
    ("sampling_rate", 8000, "'sampling_rate' is 8000, and only the published 16000 is supported"),
    ("hop_length", 0, "'hop_length' is 0, and only the published 160 is supported"),
    ("n_fft", 1 << 40, "'n_fft' is 1099511627776, and only the published 400"),
    ("dither", 0.5, "'dither' is not 0"),
    ("patch_size", 14, "'patch_size' is 14, the model was made for 16"),
    ("merge_size", 3, "'merge_size' is 3, the model was made for 2"),
    ("image_mean", [0.5, 0.5], "'image_mean' and 'image_std' must be 3 numbers"),
    ("image_std", [0.5, 0.0, 0.5], "'image_mean' and 'image_std' must be 3 numbers"),
    ("do_rescale", False, "'do_rescale' is false"),
    ("do_normalize", False, "'do_normalize' is false, which is not supported"),
    ("rescale_factor", 1.0, "only 'resample' 3 and 'rescale_factor' 1/255"),
    ("resample", 2, "only 'resample' 3"),
    ("size", {"shortest_edge": 5}, "size lacks 'longest_edge'"),
    ("size", {"height": 5, "width": 5}, "size lacks 'shortest_edge'"),
    ("size", {"shortest_edge": 0, "longest_edge": 5}, "must be above 0"),
    ("size", {"shortest_edge": 5001, "longest_edge": 5000}, "'min_pixels' is 5001 and 'max_pixels' 5000: "),
]


@pytest.mark.parametrize("by", [by_4_57, by_5_23])
@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_setting_that_does_not_fit_is_told(qwen3_checkpoint: Path, by: Any, name: str, value: object, told: str, tmp_path: Path) -> None:
    files = by({})
    for part in (files.get("preprocessor_config"), *files.get("processor_config", {}).values()):
        if isinstance(part, dict):
            part[name] = value
            for bound in ("min_pixels", "max_pixels") if name == "size" else ():  # By these older names they would count more.
                part.pop(bound, None)
    with pytest.raises(BadCheckpoint, match=told):
        read(folder_of(qwen3_checkpoint, tmp_path, files))


@pytest.mark.parametrize("missing", ["image_processor", "feature_extractor"])
def test_a_part_that_nobody_describes_is_told(qwen3_checkpoint: Path, missing: str, tmp_path: Path) -> None:
    together = {name: part for name, part in by_5_23({})["processor_config"].items() if name != missing}
    with pytest.raises(BadCheckpoint, match=rf"neither preprocessor_config\.json nor processor_config\.json with an? '{missing}'"):
        read(folder_of(qwen3_checkpoint, tmp_path, {"processor_config": together}))
