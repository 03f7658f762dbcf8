"""Weights that a checkpoint has in fewer bits become what the libraries that pack them make of them, or are refused by name; and weights
that are kept as they are in the files are memory of the files: two processes have them once, and the kernel says so."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

from helpers import lengths
from helpers.checkpoints import in_blocks
from helpers.pipes import receive, running
from omnistage.models.checkpoint.files import BadCheckpoint, Config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.checkpoint.weights import Weights, load_weights
from omnistage.models.memory import mapped_bytes, memory_texts
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS
from omnistage.models.reports import bytes_told

NAME = "layers.0.mlp.up_proj.weight"
SCALES = f"{NAME}_scale_inv"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

Tensors = dict[str, torch.Tensor]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written(folder: Path, tensors: Tensors, said: object, **others: object) -> Path:
    """said: what its config says of quantization; None: nothing. others: files of JSON, by their names without the end."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({} if said is None else {"quantization_config": said}))
    for name, values in others.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def read(folder: Path, *names: str) -> Tensors:
    """These weights, or all; there may be no others."""
    with Weights(folder) as weights:
        made = {name: weights.need(name) for name in names or weights.header}
        weights.check_read()
        assert {name: stored.shape for name, stored in weights.header.items()} == {name: tuple(made[name].shape) for name in made}
    return made


# Floats of 8 bits with scales of blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 96), (16, 32)), ((3, 64, 96), (16, 32)), ((70, 45), (16, 32)), ((300, 200), (128, 128)), ((5, 7), (128, 1 << 50))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_become_what_transformers_makes_of_them(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, seed: int, tmp_path: Path
) -> None:
    """Whole blocks and parts of some, of one weight and of experts that lie together; beside weights that are as they are."""
    weight, plain = drawn(seed, *shape), drawn(seed + 1, 3, 5)
    stored = in_blocks(NAME, weight, block)
    stored[SCALES] = stored[SCALES].to(dtype)
    made = read(written(tmp_path, {**stored, "norm.weight": plain}, {**FP8, "weight_block_size": list(block)}))
    assert made.keys() == {NAME, "norm.weight"} and torch.equal(made["norm.weight"], plain)
    values, scales = stored.values()
    assert torch.equal(made[NAME], _dequantize_fp8_weight(values, scales.float(), [min(of, 512) for of in block], torch.float32))
    if not shape[-2] % block[0] and not shape[-1] % block[1]:
        assert torch.equal(made[NAME], Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32))
    torch.testing.assert_close(made[NAME], weight, rtol=0.08, atol=0.02)


def test_one_expert_of_many_is_unpacked_alone(seed: int, tmp_path: Path) -> None:
    """The scales of another one are no numbers, which nobody notices who does not read it."""
    name = "layers.0.mlp.experts.down_proj"
    stored = in_blocks(name, drawn(seed, 4, 32, 48), (16, 16))
    stored[f"{name}_scale_inv"][2] = torch.nan
    with Weights(written(tmp_path, stored, {**FP8, "weight_block_size": [16, 16]})) as weights:
        one = weights.read(name, 1)
        assert one is not None and one.shape == (32, 48)
        assert torch.equal(one, _dequantize_fp8_weight(stored[name][1], stored[f"{name}_scale_inv"][1], [16, 16], torch.float32))
        with pytest.raises(BadCheckpoint, match="has numbers that are not finite"):
            weights.read(name, 2)


def test_blocks_of_the_usual_size_need_not_be_said(seed: int, tmp_path: Path) -> None:
    stored = in_blocks(NAME, drawn(seed, 130, 129), (128, 128))
    assert read(written(tmp_path, stored, FP8)).keys() == {NAME}


BAD: dict[str, tuple[dict[str, Any] | None, dict[str, tuple[torch.dtype, tuple[int, ...]] | None], str]] = {
    "no mark": (None, {}, "1 weights are of F8_E4M3, the first is layers.0.mlp.up_proj.weight: quantized weights are not supported"),
    "no scales": (FP8, {SCALES: None}, "1 weights are of F8_E4M3"),
    "scales of exponents": (FP8, {SCALES: (torch.float8_e8m0fnu, (2, 1))}, "2 weights are of F8_E4M3, F8_E8M0"),
    "scales of other blocks": (FP8, {SCALES: (torch.float32, (3, 1))}, "its scales are [3, 1], and blocks of [128, 128] have [2, 1]"),
    "one scale": (FP8, {SCALES: (torch.float32, ())}, "its scales are [], and blocks"),
    "no blocks": ({**FP8, "weight_block_size": [128, 0]}, {}, "'weight_block_size' is [128, 0], which must be two numbers above 0"),
    "one number": ({**FP8, "weight_block_size": [128]}, {}, "'weight_block_size' is [128], which"),
    "scales of nothing": (FP8, {"norm.weight_scale_inv": (torch.float32, (1, 1))}, "the first is norm.weight_scale_inv"),
    "scales of activations": (FP8, {"norm.activation_scale": (torch.float32, (1,))}, "the first is norm.activation_scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(name: str, seed: int, tmp_path: Path) -> None:
    said, changes, told = BAD[name]
    stored: dict[str, torch.Tensor | None] = {**in_blocks(NAME, drawn(seed, 130, 60), (128, 128))}
    stored |= {key: change and torch.zeros(change[1]).to(change[0]) for key, change in changes.items()}
    written(tmp_path, {key: tensor for key, tensor in stored.items() if tensor is not None}, said)
    with pytest.raises(BadCheckpoint, match=re.escape(told)):
        read(tmp_path, NAME)


# Weights that compressed-tensors writes -------------------------------------------------------------------------------------------------

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
ROUNDED: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
"""The scheme of activations, which are left as they are here."""

WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4 in groups": ("pack-quantized", INT4, None),
    "int4 with zeros": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "int4 by channel": ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}, None),
    "int8 in groups": ("pack-quantized", {**INT4, "num_bits": 8}, None),
    "int8": ("int-quantized", {**FLOAT8, "type": "int"}, {**ROUNDED, "type": "int"}),
    "fp8 by channel": ("float-quantized", FLOAT8, ROUNDED),
    "fp8 of one scale": ("float-quantized", {**FLOAT8, "strategy": "tensor"}, ROUNDED),
    "fp8 in blocks": ("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [32, 16]}, ROUNDED),
}


def said_of(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def packed(**weights: object) -> dict[str, Any]:
    """The scheme of numbers of 4 bits in groups, with changes."""
    return said_of("pack-quantized", {**INT4, **weights})


def scales_of(weight: torch.Tensor, args: dict[str, Any]) -> Tensors:
    """The scales of one weight."""
    rows, columns = weight.shape
    sides: dict[str, Any] = {"group": (1, args.get("group_size")), "channel": (1, columns), "tensor": (rows, columns)}
    height, width = {**sides, "block": args.get("block_structure")}[args["strategy"]]
    parts = weight.unfold(0, height, height).unfold(1, width, width)
    low, high = parts.amin((-2, -1)), parts.amax((-2, -1))
    most = 448.0 if args["type"] == "float" else 2.0 ** (args["num_bits"] - 1) - 1
    if args["symmetric"]:
        made = {"weight_scale": torch.maximum(-low, high) / most}
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)  # Zero is among what can be said, as in the library: else its place has more bits.
        scale = (high - low) / (2 ** args["num_bits"] - 1)
        made = {"weight_scale": scale, "weight_zero_point": (-most - 1 - (low / scale).round()).to(torch.int8)}
    return {name: value.flatten() if args["strategy"] == "tensor" else value for name, value in made.items()}


def compressed(weight: torch.Tensor, said: dict[str, Any]) -> Tensors:
    """As the library writes it."""
    quantization: Any = pytest.importorskip("compressed_tensors.quantization", reason="the extra compressed is not installed")
    from compressed_tensors.compressors import BaseCompressor

    (scheme,) = quantization.QuantizationConfig.model_validate(said).config_groups.values()
    packer: Any = BaseCompressor.get_value_from_registry(said["format"])
    made: Tensors = packer.compress({"weight": weight, **scales_of(weight, said["config_groups"]["group_0"]["weights"])}, scheme)
    return {f"{NAME.removesuffix('weight')}{name}": value for name, value in made.items()}


@pytest.mark.parametrize("way", WAYS)
def test_weights_become_what_compressed_tensors_makes_of_them(way: str, seed: int, tmp_path: Path) -> None:
    """Beside weights that it left as they are."""
    said, weight, plain = said_of(*WAYS[way]), drawn(seed, 96, 80), drawn(seed + 1, 6, 8)
    stored = compressed(weight, said)
    written(tmp_path, {**stored, "lm_head.weight": plain}, said)
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    expected: Tensors = CompressedTensorsDequantizer(tmp_path, dtype=torch.float32).process({**stored, "lm_head.weight": plain})
    made = read(tmp_path)
    assert made.keys() == expected.keys() == {NAME, "lm_head.weight"}
    assert all(torch.equal(made[name], expected[name]) for name in made)
    few = WAYS[way][1]["num_bits"] == 4
    torch.testing.assert_close(made[NAME], weight, rtol=0.08, atol=0.5 if few else 0.05)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": (said_of("nvfp4-pack-quantized", INT4), "the format 'nvfp4-pack-quantized' of compressed-tensors is not supported"),
    "no format": (said_of("", INT4), "the format '' of compressed-tensors"),
    "rotations": ({**packed(), "transform_config": {"config_groups": {"r": {}}}}, "'transform_config' of compressed-tensors"),
    "sparse": ({**packed(), "sparsity_config": {"format": "dense"}}, "'sparsity_config' of compressed-tensors"),
    "two ways": ({**packed(), "config_groups": {"a": {}, "b": {}}}, "2 ways in one checkpoint of compressed"),
    "no such bits": (packed(num_bits="four"), "num_bits"),
    "no weights": ({**packed(), "config_groups": {"a": {"targets": ["Linear"]}}}, "it does not say how weights are packed"),
    "other bits": (packed(num_bits=8), "are not numbers of 8 bits of [96, 80]"),
    "one bit": (packed(num_bits=1), "'num_bits' is 1, and numbers of 2 to 8 bits are unpacked"),
    "scales of tokens": (
        packed(strategy="attn_head", group_size=None),
        "by 'attn_head' are not supported; by tensor, channel, group, block are",
    ),
    "other groups": (packed(group_size=32), "up_proj.weight_scale is [96, 5], and a weight of [96, 80] with scales by group has [96, 3]"),
    "groups that columns do not have": (packed(group_size=17), "cannot be unpacked"),
    "zeros that are not there": (packed(symmetric=False), "up_proj.weight_zero_point is not there"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_compressed_tensors_says_that_cannot_be_is_told(name: str, seed: int, tmp_path: Path) -> None:
    said, told = WRONG[name]
    written(tmp_path, compressed(drawn(seed, 96, 80), packed()), said)
    with pytest.raises(BadCheckpoint, match=re.escape(told)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("way", "part", "shape"),
    [
        *[("int4 in groups", "weight_scale", shape) for shape in ((1, 5), (96, 1), (1, 1), (5,), (96,), ())],
        *[("int4 with zeros", "weight_zero_point", shape) for shape in ((1, 5), (12, 1), (96, 5))],
        *[("int4 by channel", "weight_scale", shape) for shape in ((1, 1), (1,), (), (80,))],
        *[("fp8 in blocks", "weight_scale", shape) for shape in ((1, 5), (3, 1), (1, 1))],
        ("fp8 by channel", "weight_scale", (1, 80)),
        ("fp8 of one scale", "weight_scale", (96, 1)),
        ("fp8 of one scale", "weight", (96,)),
        ("fp8 of one scale", "weight", (0, 80)),
    ],
    ids=str,
)
def test_scales_and_zeros_of_another_shape_are_told(way: str, part: str, shape: tuple[int, ...], seed: int, tmp_path: Path) -> None:
    """Though some can be multiplied with: each would be that of other numbers too."""
    said = said_of(*WAYS[way])
    stored = compressed(drawn(seed, 96, 80), said)
    name = f"{NAME.removesuffix('weight')}{part}"
    stored[name] = torch.ones(shape).to(stored[name].dtype)
    with pytest.raises(BadCheckpoint, match=re.escape(f"{name} is {list(shape)}, and ")):
        read(written(tmp_path, stored, said))


def test_one_scale_of_all_may_have_no_sides(seed: int, tmp_path: Path) -> None:
    said = said_of(*WAYS["fp8 of one scale"])
    stored = compressed(drawn(seed, 96, 80), said)
    made = read(written(tmp_path, stored, said))
    stored[f"{NAME}_scale"] = stored[f"{NAME}_scale"].squeeze()
    assert torch.equal(read(written(tmp_path, stored, said))[NAME], made[NAME])


def test_that_scales_are_of_groups_need_not_be_said(seed: int, tmp_path: Path) -> None:
    stored = compressed(drawn(seed, 96, 80), said := packed())
    made = read(written(tmp_path, stored, said))
    assert torch.equal(read(written(tmp_path, stored, packed(strategy=None)))[NAME], made[NAME])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_order_of_columns_is_told(dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    """The order is in the weights; config.json says nothing of it."""
    said = packed()
    stored = {**compressed(drawn(seed, 96, 80), said), f"{NAME}_g_idx": torch.arange(80).to(dtype)}
    with pytest.raises(BadCheckpoint, match="weight_g_idx"):
        read(written(tmp_path, stored, said), NAME)


def test_a_weight_that_is_there_packed_and_as_it_is_is_told(seed: int, tmp_path: Path) -> None:
    said, weight = packed(), drawn(seed, 96, 80)
    written(tmp_path, {**compressed(weight, said), NAME: weight}, said)
    with pytest.raises(BadCheckpoint, match=rf"has {re.escape(NAME)} twice, as it is and in {re.escape(NAME)}_packed"):
        read(tmp_path)


def test_a_library_that_is_not_there_is_asked_for(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", None)  # As Python has it for what cannot be imported.
    written(tmp_path, {NAME: drawn(seed, 4, 4)}, packed())
    with pytest.raises(BadCheckpoint, match=r"is not installed.*install the extra `compressed` of omnistage"):
        read(tmp_path)


@pytest.mark.parametrize("shape", [[96, 80, 1], [-96, 80], [96, 1 << 50], [96.0, 80.0], 96], ids=str)
def test_a_shape_that_packed_numbers_do_not_have_is_told(shape: Any, seed: int, tmp_path: Path) -> None:
    """Before anything is made of it."""
    stored = compressed(drawn(seed, 96, 80), said := packed())
    stored[f"{NAME}_shape"] = torch.tensor(shape)
    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight_packed is \[96, 10\], which are not numbers of 4 bits of"):
        read(written(tmp_path, stored, said))


# Either of both -------------------------------------------------------------------------------------------------------------------------


def either(way: str, weight: torch.Tensor) -> tuple[Tensors, dict[str, Any]]:
    """A packed weight, and what its config says."""
    if way == "fp8":
        return in_blocks(NAME, weight, (128, 128)), FP8
    return compressed(weight, said := said_of(*WAYS[way])), said


either_way = pytest.mark.parametrize("way", ["fp8", "int4 in groups", "fp8 by channel"])


@either_way
def test_a_weight_of_another_part_is_unpacked_too(way: str, seed: int, tmp_path: Path) -> None:
    """That a model reads all the same. The others are not missed."""
    stored, said = either(way, drawn(seed, 96, 80))
    whole = read(written(tmp_path, stored, said))
    other = {f"other.{name}": tensor for name, tensor in stored.items()}
    with Weights(written(tmp_path, {**other, "norm.weight": drawn(seed, 3)}, said), ("other.",)) as weights:
        assert weights.header.keys() == {"norm.weight"}
        weights.need("norm.weight")
        weights.check_read()
        assert torch.equal(weights.need(f"other.{NAME}"), whole[NAME])


@either_way
def test_a_net_has_its_packed_weights_by_their_own_names(way: str, seed: int, tmp_path: Path) -> None:
    """None is missing, and no part of one is a weight that it does not have."""
    stored, said = either(way, drawn(seed, 96, 80))
    written(tmp_path, {key.removeprefix("layers.0.mlp."): value for key, value in stored.items()}, said)
    net = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(80, 96, bias=False)})
    load_weights(net, tmp_path)
    with Weights(tmp_path) as weights:
        assert weights.names == {"up_proj.weight"}
        assert torch.equal(net.state_dict()["up_proj.weight"], weights.need("up_proj.weight"))


@either_way
@pytest.mark.parametrize("end", ["input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"])
def test_what_rounds_activations_is_left_out(way: str, end: str, seed: int, tmp_path: Path) -> None:
    """It is left out beside packed weights. Beside other weights nobody knows what it is, and it is named."""
    stored, said = either(way, drawn(seed, 96, 80))
    rounds = torch.ones(1, dtype=torch.int8 if "zero" in end else torch.float32)
    assert read(written(tmp_path, {**stored, f"{NAME.removesuffix('weight')}{end}": rounds}, said)).keys() == {NAME}
    written(tmp_path, {**stored, "norm.weight": drawn(seed, 3), f"norm.{end}": rounds}, said)
    with pytest.raises(BadCheckpoint, match=f"norm.{end}"):
        read(tmp_path, NAME, "norm.weight")


def test_what_rounds_activations_of_experts_together_is_left_out(seed: int, tmp_path: Path) -> None:
    """As Transformers names it."""
    name = "layers.0.mlp.experts.down_proj"
    stored = {**in_blocks(name, drawn(seed, 4, 32, 48), (128, 128)), f"{name}_activation_scale": torch.ones(4)}
    assert read(written(tmp_path, stored, FP8)).keys() == {name}


# Other ways ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["quantize_config", "quant_config"])
def test_a_file_that_says_so_is_refused(file: str, seed: int, tmp_path: Path) -> None:
    """Those of GPTQ and AWQ."""
    written(tmp_path, {NAME: drawn(seed, 4, 4)}, None, **{file: {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(BadCheckpoint, match=rf"{file}\.json.*quantized by gptq are not supported"):
        read(tmp_path)


@pytest.mark.parametrize("said", [{"quant_method": "gptq"}, {"quant_method": "awq", "bits": 4}, {"bits": 4}, "fp8"], ids=str)
@pytest.mark.parametrize("place", ["", "text_config"])
def test_a_config_that_says_another_way_is_refused(place: str, said: object) -> None:
    values = {"text_config": {}, "quantization_config": said} if not place else {place: {"quantization_config": said}}
    whole = Config(values, "config.json")
    with pytest.raises(BadCheckpoint, match=r"weights quantized by .* are not supported yet; give the checkpoint that they were made from"):
        check_plain(whole, whole.section("text_config"))


def test_a_known_way_in_another_place_is_refused() -> None:
    """Nobody would unpack it."""
    whole = Config({"text_config": {"quantization_config": FP8}}, "config.json")
    with pytest.raises(BadCheckpoint, match="quantized by fp8 are not supported"):
        check_plain(whole, whole.section("text_config"))
    check_plain(Config({"quantization_config": FP8}, "config.json"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[(name, torch.int32) for name in ("qweight", "qzeros", "g_idx", "weight_packed")],
        *[("weight", torch.int8), ("weight", torch.float8_e5m2), ("weight_scale", torch.float32), ("weight_scale_inv", torch.float32)],
    ],
    ids=str,
)
def test_what_is_packed_without_any_mark_is_named(name: str, dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    name = f"layers.0.mlp.up_proj.{name}"
    written(tmp_path, {name: torch.ones(4, 4).to(dtype), "norm.weight": drawn(seed, 3)}, None)
    with pytest.raises(BadCheckpoint, match=re.escape(name)):
        read(tmp_path, "norm.weight")


# Weights as they are in the files -------------------------------------------------------------------------------------------------------


PAGE = 4096


def shared_in(folder: Path) -> dict[str, int]:
    """The shares of a folder's files in the memory of this process that the kernel tells, in bytes: proc(5), smaps."""
    files, found, is_ours = {str(path.resolve()) for path in folder.iterdir()}, dict.fromkeys(("Size", "Rss", "Pss", "Anonymous"), 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0]:
            is_ours = line.split(maxsplit=5)[-1] in files
        elif is_ours and name in found:
            found[name] += int(value.split()[0]) << 10
    return found


def load(connection: Connection, folder: Path) -> None:
    """A replica's weights, in the type of the files; then what the kernel says of them, each time when it is asked."""
    parts = WEIGHTS.read_parts(folder, read_thinker_config(folder), torch.float32, torch.device("cpu"))
    embedding = parts.decoder._embedding
    told = {"bytes": embedding.nbytes, "sum": embedding.double().sum().item(), "told": memory_texts(folder)["shared_memory"]}
    while True:
        connection.send_bytes(json.dumps({**told, **shared_in(folder)}).encode())
        connection.recv_bytes()


@lengths.long_form(
    "models/test_weights.py::test_a_mapped_weight_is_the_one_that_is_read", unkept="two processes share the pages of the embedding"
)
def test_two_replicas_have_the_embedding_once(omni_checkpoint: Path) -> None:
    with ExitStack() as replicas:
        connections = [replicas.enter_context(running(load, omni_checkpoint))[0] for _ in range(2)]
        first = [json.loads(receive(connection)) for connection in connections]
        assert first[0]["sum"] == first[1]["sum"] != 0
        for connection in connections:
            connection.send_bytes(b"again")
            found = json.loads(receive(connection))
            size = found["bytes"]
            assert size > 64 * PAGE, "a few pages would tell nothing"
            assert size <= found["Size"] < size + 2 * PAGE, "the embedding is mapped, and nothing else of the files"
            assert found["Rss"] == found["Size"]
            assert found["Pss"] <= found["Rss"] / 2 + PAGE
            assert found["Anonymous"] == 0, "none of it is this process's own"
            assert found["told"].startswith(f"{bytes_told(found['Size'])} of weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mapped_weight_is_the_one_that_is_read(tmp_path: Path, dtype: torch.dtype, seed: int) -> None:
    """Wherever in the file it lies, and after the others have gone; a file that takes the place of this one changes nothing of it."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        f"{name}": (torch.randn(size, generator=generator) * 100).to(dtype) for name, size in (("a", (3, 5)), ("b", (4097, 3)), ("c", (1,)))
    }
    save_file({**made, "none": torch.empty(0, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    with Weights(tmp_path) as weights:
        kept = {name: weights.mapped(name) for name in ("a", "b", "c", "none")}
        assert weights.mapped("absent") is None
        weights.check_read()
    assert mapped_bytes(tmp_path) >= made["b"].nbytes
    other = tmp_path / "other"
    save_file({name: weight + 1 for name, weight in made.items()}, other)
    other.replace(tmp_path / "model.safetensors")
    for name, weight in made.items():
        found = kept[name]
        assert found is not None and torch.equal(found, weight) and found.dtype == dtype
    assert kept["none"] is not None and kept["none"].shape == (0, 4)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], made["a"] + 1)


def test_what_is_converted_is_memory_of_the_process(omni_checkpoint: Path) -> None:
    parts = WEIGHTS.read_parts(omni_checkpoint, read_thinker_config(omni_checkpoint), torch.bfloat16, torch.device("cpu"))
    assert parts.decoder.spec.dtype == torch.bfloat16
    assert shared_in(omni_checkpoint)["Size"] == mapped_bytes(omni_checkpoint) == 0
    assert memory_texts(omni_checkpoint)["shared_memory"].startswith("none")


def test_a_weight_that_is_needed_and_not_there_is_named(tmp_path: Path) -> None:
    save_file({"one": torch.arange(3.0)}, tmp_path / "model.safetensors")
    with Weights(tmp_path) as weights:
        assert weights.need("one").tolist() == [0, 1, 2]
        with pytest.raises(BadCheckpoint, match=f"{tmp_path} lacks the weight two"):
            weights.need("two")
