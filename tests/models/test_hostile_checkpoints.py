"""Checkpoints that somebody else made: loading ends, soon, with a model or with what is wrong and where"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.drawings import writable
from helpers.lengths import draw_of, some_or_all
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.header import Stored, check_finite, check_stored, check_tensors
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS
from omnistage.models.registry import load
from omnistage.models.reports import LoadError

KINDS = ("thinker", "talker", "code2wav")
CONFIGS = {
    **{f"{kind} of qwen": ("config.json", f"{kind.replace('code2wav', 'token2wav')}_config") for kind in KINDS},
    **{part: (f"{part}/config.json", "") for part in ("transformer", "vae", "text_encoder")},
    "scheduler": ("scheduler/scheduler_config.json", ""),
    **{f"{kind} of smol": (f"{kind}/config.json", "") for kind in KINDS[:2]},
}
"""The file of each part and, of a config with several, its section there."""
NUMBERS = {"huge": 10**8, "beyond": 2**40, "endless": 10**400, "many": 10**6, "none": 0, "negative": -1, "half": 1.5}
ABSURD: dict[str, object] = {**NUMBERS, "text": "7", "true": True, "null": None, "list": [1]}
CELLS = [f"{part} {absurd}" for part in CONFIGS for absurd in ABSURD]
WEIGHTS_OF = {
    **{f"{kind} of qwen": ("", prefix) for kind, prefix in zip(KINDS, ("thinker.model.", "talker.", "token2wav."), strict=True)},
    "eyes of qwen": ("", "thinker.visual."),
    "ears of qwen": ("", "thinker.audio_tower."),
    "vocoder of qwen": ("", "token2wav.code2wav_bigvgan_model."),
    "voices of qwen": ("", "token2wav.code2wav_dit_model.input_embed.spk_encoder."),
    "thinker of smol": ("thinker", "model."),  # The encoders in its file are used by nobody.
    **{f"{kind} of smol": (kind, "") for kind in KINDS[1:]},
    **{part: (part, "") for part in ("transformer", "vae", "text_encoder")},
}
"""The folder of each part's files, and how the names of its weights begin."""
KIND_OF = {"eyes": "thinker", "ears": "thinker", "vocoder": "code2wav", "voices": "code2wav"}

Copied = Callable[[str], tuple[Path, Callable[..., object]]]


@pytest.fixture
def copied(omni_checkpoint: Path, default_model: Path, tmp_path: Path) -> Copied:
    """Makes a checkpoint of a part that can be changed, and the function that loads what has the part, in a dtype."""
    folder = tmp_path / "m"

    def copy(part: str) -> tuple[Path, Callable[..., object]]:
        kind, _, family = part.partition(" of ")
        if not family:
            writable("z-image", folder)
            return folder, lambda dtype="float32": load_pipeline(folder, getattr(torch, dtype))
        # Links, which whoever changes a file replaces.
        source = omni_checkpoint if family == "qwen" else default_model
        shutil.copytree(source, folder, copy_function=lambda path, copy: Path(copy).symlink_to(Path(path).resolve()))
        name = "qwen2_5_omni" if family == "qwen" else family
        return folder, lambda dtype="auto": load(name, KIND_OF.get(kind, kind), LoadOptions(path=folder, dtype=dtype))

    return copy


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    how(values)
    path.unlink()
    path.write_text(json.dumps(values))


def change_weights(path: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = {name: value.clone() for name, value in load_file(path).items()}
    how(weights)
    path.unlink()
    save_file(weights, path, {"format": "pt"})


def matrix_of(part: str, folder: Path) -> tuple[Path, str]:
    """The file of a checkpoint with a matrix of a part, and its name."""
    below, prefix = WEIGHTS_OF[part]
    for path in sorted((folder / below).glob("*.safetensors")):
        for name, value in load_file(path).items():
            if name.startswith(prefix) and value.ndim > 1:
                return path, name
    raise AssertionError(part)


# Numbers of configs --------------------------------------------------------------------------------------------------------------------


def numbers(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers stand, at any depth; of a list its first."""
    inner = values.items() if isinstance(values, dict) else enumerate(values[:1]) if isinstance(values, list) else ()
    for key, value in inner:
        yield from numbers(value, (*at, key))
    if isinstance(values, int | float) and not isinstance(values, bool):
        yield at


def put(values: Any, at: Sequence[Any], value: object) -> None:
    for key in at[:-1]:
        values = values[key]
    values[at[-1]] = value


@some_or_all("cell", CELLS, 4)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Libraries warn of what they are told.
def test_loading_ends_whatever_a_config_says(cell: str, seed: int, copied: Copied) -> None:
    """One of its numbers, chosen by the seed, is an absurd one."""
    part, _, absurd = draw_of(cell, CELLS, 4, "configs").rpartition(" ")
    folder, loads = copied(part)
    file, section = CONFIGS[part]
    places = [at for at in numbers(json.loads((folder / file).read_text())) if not section or at[0] == section]
    at = places[seed % len(places)]
    print(file, at)
    change(folder / file, lambda values: put(values, at, ABSURD[absurd]))
    try:
        loads()  # A number that only a request uses, or that means as much.
    except LoadError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize(
    ("part", "place", "value"),
    [
        *[("transformer", "n_layers", value) for value in (10**8, 10**6)],
        *[("vae", "layers_per_block", value) for value in (10**8, 10**6)],
        ("code2wav of qwen", "token2wav_config.dit_config.enc_res2net_scale", 10**7),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_library_builds_no_more_than_the_files_have(part: str, place: str, value: int, copied: Copied) -> None:
    folder, loads = copied(part)
    change(folder / CONFIGS[part][0], lambda values: put(values, place.split("."), value))
    told = rf"{'' if 'qwen' in part else f'{part}: '}(its files have \d+ weights, and by config.json|'{place}' is {value})"
    with pytest.raises(BadCheckpoint, match=told):
        loads()


@pytest.mark.parametrize(
    "place",
    [
        *[f"text_config.{field}" for field in ("num_hidden_layers", "hidden_size", "num_key_value_heads")],
        *[f"vision_config.{field}" for field in ("depth", "spatial_merge_size", "patch_size")],
        *[f"audio_config.{field}" for field in ("encoder_layers", "n_window")],
    ],
)
@pytest.mark.parametrize("value", [2**40, 10**5, 0])
def test_sizes_of_a_thinker_are_those_of_its_weights(place: str, value: int, copied: Copied) -> None:
    folder, _ = copied("thinker of qwen")
    change(folder / "config.json", lambda values: put(values, ["thinker_config", *place.split(".")], value))
    with pytest.raises(ValueError) as told:
        WEIGHTS.read_parts(folder, read_thinker_config(folder), torch.float32, torch.device("cpu"))
    assert isinstance(told.value, LoadError) or place.startswith("text_config"), "the engine knows nothing of checkpoints"


# Numbers of weights ---------------------------------------------------------------------------------------------------------------------


@some_or_all("part", WEIGHTS_OF, 4)
@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
def test_weights_that_are_no_numbers_are_refused(part: str, value: float, copied: Copied) -> None:
    part = draw_of(part, WEIGHTS_OF, 4, f"weights {value}")
    folder, loads = copied(part)
    file, name = matrix_of(part, folder)
    change_weights(file, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    with pytest.raises(BadCheckpoint, match="has numbers that are not finite") as told:
        loads()
    assert name in str(told.value)


@pytest.mark.parametrize(
    ("numbers", "dtype", "computed", "is_good"),
    [
        ([1e39], torch.float64, torch.float32, False),
        ([-1e39, 0], torch.float64, torch.float32, False),
        ([-1e39, 0], torch.float64, torch.float64, True),
        ([torch.finfo(torch.float32).min], torch.float32, torch.float32, True),
        ([0, torch.finfo(torch.float32).max], torch.float32, torch.bfloat16, False),
        ([3.3e38, -3.3e38], torch.float32, torch.bfloat16, True),
        ([70000], torch.bfloat16, torch.float16, False),
        ([65504], torch.float16, torch.float16, True),
        ([math.inf], torch.float16, torch.float32, False),
        ([1, math.nan, -1], torch.bfloat16, torch.bfloat16, False),
        ([], torch.float32, torch.float32, True),
        ([2**40], torch.int64, torch.bfloat16, True),
    ],
)
def test_what_counts_is_what_is_computed_with(numbers: list[float], dtype: torch.dtype, computed: torch.dtype, is_good: bool) -> None:
    """float32 computes with no 1e39, nor bfloat16 with the largest of float32; no type of a whole number has one that is none."""
    tensor = torch.tensor(numbers, dtype=dtype)
    if is_good:
        check_finite(tensor, "w", "F", computed)
    else:
        with pytest.raises(BadCheckpoint, match="F: w has numbers that are not finite"):
            check_finite(tensor, "w", "F", computed)


@pytest.mark.parametrize("part", ["thinker of qwen", "talker of qwen", "transformer"])
def test_the_largest_number_of_float32_is_a_weight_where_that_is_computed_in(part: str, copied: Copied) -> None:
    """As bfloat16 it would be infinite."""
    folder, loads = copied(part)
    file, name = matrix_of(part, folder)

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = weights[name].float()
        weights[name].view(-1)[-1:].fill_(torch.finfo(torch.float32).max)

    change_weights(file, enlarge)
    loads("float32")
    with pytest.raises(BadCheckpoint, match="has numbers that are not finite") as told:
        loads("bfloat16")
    assert name in str(told.value)


def masked(model: torch.nn.Module, **masks: torch.Tensor) -> torch.nn.Module:
    for name, mask in masks.items():
        model.register_buffer(name, mask)
    return model


def test_a_mask_may_be_infinite_and_a_weight_not(tmp_path: Path) -> None:
    least = torch.full((4,), torch.finfo(torch.float32).min)
    check_tensors(masked(torch.nn.Linear(2, 2), mask=torch.full((4,), -math.inf), least=least), tmp_path)
    check_tensors(masked(torch.nn.Linear(2, 2), mask=least.to(torch.bfloat16)), tmp_path)
    with pytest.raises(BadCheckpoint, match="mask has numbers that are not finite"):
        check_tensors(masked(torch.nn.Linear(2, 2), mask=torch.tensor([0, math.nan])), tmp_path)
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, -math.inf)
    with pytest.raises(BadCheckpoint, match="weight has numbers that are not finite"):
        check_tensors(model, tmp_path)


# Packed weights -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        *[("thinker of qwen", dtype) for dtype in (torch.int32, torch.float8_e4m3fn)],
        *[("transformer", dtype) for dtype in (torch.int8, torch.uint8, torch.float8_e5m2, torch.int16)],
        *[("code2wav of qwen", torch.int8), ("text_encoder", torch.int32)],
    ],
    ids=str,
)
def test_packed_weights_are_refused_by_name_with_nothing_in_the_config(part: str, dtype: torch.dtype, copied: Copied) -> None:
    folder, loads = copied(part)
    file, name = matrix_of(part, folder)
    packed = name.replace(".weight", ".qweight")
    change_weights(file, lambda weights: weights.update({packed: weights.pop(name).mul(0).to(dtype)}))
    if part.endswith("qwen"):
        index = folder / "model.safetensors.index.json"
        change(index, lambda values: values["weight_map"].update({packed: values["weight_map"].pop(name)}))
    with pytest.raises(BadCheckpoint, match="quantized weights are not supported yet; give the checkpoint") as told:
        loads()
    assert packed in str(told.value)


REPORT: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": []}


def test_whole_numbers_are_packed_weights_only_where_weights_should_be(tmp_path: Path) -> None:
    """The model that is loaded decides, whatever its library puts in front of the names."""
    model = masked(torch.nn.Sequential(masked(torch.nn.Linear(2, 2), places=torch.zeros(2, dtype=torch.int32))))

    def check(report: dict[str, list[str]] = REPORT, /, **stored: str) -> None:
        check_stored({name.replace("__", "."): Stored(dtype, (2,)) for name, dtype in stored.items()}, model, report, tmp_path)

    for dtype in ("I8", "U8", "I16", "I32", "U32", "I64", "BOOL"):
        for name in ("0__places", "model__0__places", "places"):
            check(**{name: dtype}, **{"0__weight": "F32", "0__bias": "BF16"})
        check({"missing_keys": [], "unexpected_keys": ["0.order"]}, **{"0__order": dtype, "0__weight": "F32"})
        for name in ("0__weight", "model__0__weight", "0__bias"):
            with pytest.raises(BadCheckpoint, match=f"1 weights are of {dtype}, the first is .*: quantized weights are not supported"):
                check(**{name: dtype})
    for report in (REPORT, {"missing_keys": ["0.weight"], "unexpected_keys": ["0.qweight"]}):
        with pytest.raises(BadCheckpoint, match=r"of I32, the first is 0\.qweight: quantized weights"):
            check(report, **{"0__qweight": "I32", "0__places": "I32"})


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_whole_numbers_that_a_model_has_no_place_for_are_nothing_to_it(part: str, copied: Copied) -> None:
    folder, loads = copied(part)
    file, name = matrix_of(part, folder)
    change_weights(file, lambda weights: weights.update(order=torch.arange(4, dtype=torch.int32), seen=torch.ones(4, dtype=torch.uint8)))
    loads()
    change_weights(file, lambda weights: weights.update({name: torch.zeros_like(weights[name], dtype=torch.int8)}))
    with pytest.raises(BadCheckpoint, match="quantized weights are not supported yet") as told:
        loads()
    assert name in str(told.value)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        *[(f"{kind} of qwen", "") for kind in KINDS],
        *[("thinker of qwen", f"thinker_config.{inner}.") for inner in ("text_config", "vision_config", "audio_config")],
        ("talker of qwen", "talker_config."),
        ("code2wav of qwen", "token2wav_config.dit_config."),
        ("text_encoder", "text_config."),
    ],
)
def test_a_config_that_says_so_anywhere_is_refused_by_the_method(part: str, place: str, copied: Copied) -> None:
    def say(values: dict[str, Any]) -> None:
        for key in place.split(".")[:-1]:
            values = values.setdefault(key, {})
        values["quantization_config"] = {"quant_method": "awq"}

    folder, loads = copied(part)
    change(folder / CONFIGS[part][0], say)
    with pytest.raises(BadCheckpoint, match="quantized by awq are not supported yet"):
        loads()


# Names and files beside the weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["thinker", "talker"])
def test_names_of_modules_of_newer_libraries_are_read(kind: str, copied: Copied) -> None:
    def new(name: str) -> str:
        # Those that the others are parts of come last.
        for after, before in sorted(RENAMED.items(), key=lambda one: -len(one[1])):
            if name.startswith(before):
                return after + name.removeprefix(before)
        return name

    folder, _ = copied(f"{kind} of qwen")
    for path in sorted(folder.glob("*.safetensors")):
        weights = load_file(path)
        path.unlink()
        save_file({new(name): value for name, value in weights.items()}, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    change(index, lambda values: values.update(weight_map={new(name): file for name, file in values["weight_map"].items()}))
    assert load("qwen2_5_omni", kind, LoadOptions(path=folder)).info.name == f"m{'-talker' if kind == 'talker' else ''}"


def test_a_flag_that_drawing_does_not_follow_is_refused_by_name(tmp_path: Path) -> None:
    folder = writable("qwen-image", tmp_path / "m")
    change(folder / "transformer/config.json", lambda values: values.update(guidance_embeds=True))
    with pytest.raises(LoadError, match="'guidance_embeds' is True, which drawing here does not follow"):
        load("diffusers", "diffusion", LoadOptions(path=folder))


def test_a_file_of_weights_that_nobody_reads_is_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = writable("z-image", tmp_path / "m")
    save_file({"lora_A.weight": torch.zeros(2, 2)}, folder / "pytorch_lora_weights.safetensors")
    with caplog.at_level(logging.WARNING):
        load_pipeline(folder, torch.float32)
    assert "not read, and without effect: pytorch_lora_weights.safetensors" in caplog.text


# Voices ---------------------------------------------------------------------------------------------------------------------------------


def _repeated(path: Path) -> None:
    voices = torch.load(path, weights_only=True)
    voice = next(iter(voices.values()))
    voice["ref_mel"] = torch.zeros(1, 1, 1).expand(1, 10**11, voice["ref_mel"].shape[2])
    path.unlink()
    torch.save(voices, path)


def _rewritten(path: Path, compression: int, last_bytes: int | None = None) -> None:
    """The same archive, of whose largest tensor there are so many bytes."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    largest = max((name for name in parts if "/data/" in name), key=lambda name: len(parts[name]))
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in parts.items():
            archive.writestr(name, data[:last_bytes] if name == largest else data)


def _deflated(path: Path) -> None:
    _rewritten(path, zipfile.ZIP_DEFLATED)


def _said_larger(path: Path) -> None:
    """A description by which a tensor goes on behind what the file has of it."""
    _rewritten(path, zipfile.ZIP_STORED, 4)


def _of_another_time(path: Path) -> None:
    voices = torch.load(path, weights_only=True)
    path.unlink()
    torch.save(voices, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("how", [_repeated, _deflated, _said_larger, _of_another_time])
@pytest.mark.parametrize("part", ["talker of qwen", "code2wav of qwen"])
def test_voices_have_the_numbers_that_they_say(part: str, how: Callable[[Path], None], copied: Copied) -> None:
    folder, loads = copied(part)
    how(folder / "spk_dict.pt")
    with pytest.raises(BadCheckpoint, match=r"spk_dict\.pt"):
        loads()


def _make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ENDLESS: dict[str, Callable[[Path], None]] = {
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a hole of a terabyte": _make_hole,
}


@pytest.mark.parametrize("how", ENDLESS)
@pytest.mark.parametrize("part", ["thinker of qwen", "vae"])
def test_a_file_that_never_ends_is_refused_by_name(part: str, how: str, seed: int, copied: Copied) -> None:
    """Whatever file it is, and whoever reads it: our code, or a library that reads a tokenizer."""
    folder, loads = copied(part)
    path = random.Random(seed).choice(sorted(path for path in folder.rglob("*.json") if path.is_file()))
    print(path)
    path.unlink()
    ENDLESS[how](path)
    with pytest.raises(BadCheckpoint, match=re.escape(str(path))):
        loads() if part == "thinker of qwen" else load("diffusers", "diffusion", LoadOptions(folder))
