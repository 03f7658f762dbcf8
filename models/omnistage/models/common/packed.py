"""Unpacks weights that a checkpoint stores in fewer bits, after finding which of its tensors make one weight.

Each weight is unpacked when it is read, into the type of computing, so a replica takes as much memory as with unpacked weights. Activations
are not rounded to fewer bits, though some such checkpoints were made for that. Two ways of packing are supported: 8-bit floats with a scale
for each block, as DeepSeek and Qwen publish them ("fp8"), and the format of the library compressed-tensors, which unpacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from omnistage.models.common.checkpoint import BadCheckpoint, Config
from omnistage.models.common.header import COMPRESSED, COMPUTED, FP8, QUANTIZED, Stored

Read = Callable[[str], torch.Tensor]
"""Returns the tensor of a name, as it is stored."""

_SCALE = "_scale_inv"
"""The end of a name of scales, after the name of their weight. Despite this name, numbers are multiplied by their scale."""

_BLOCK = (128, 128)
"""Rows and columns of a block with one scale, if the config does not give them."""

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
"""Supported formats of compressed-tensors: numbers times scales. Other formats have two kinds of scales, or store no zeros."""

_BITS = range(2, 9)
"""Supported numbers of bits of a number in these formats; a number of one bit would have no sign."""

_STRATEGIES = ("tensor", "channel", "group", "block")
"""Strategies of compressed-tensors that are supported. A strategy says which numbers of a weight share a scale."""

_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale")
"""Ends of the names of tensors that a packed weight may have for rounding activations; activations are not rounded here."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight. parts: the name that `unpack` uses for each of its tensors -> the tensor's name in the checkpoint. shape: of the
    unpacked weight. unpack: makes the weight from its tensors."""

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    unpack: Callable[[dict[str, torch.Tensor]], torch.Tensor]


def find_packed(header: Mapping[str, Stored], config: Config, read: Read) -> dict[str, PackedWeight]:
    """The packed weights of a checkpoint, by name; empty: its config names no supported way of packing. header: all tensors of its files.
    Raises BadCheckpoint for weights that cannot be unpacked."""
    packing = next((config.section(key) for key in QUANTIZED if config.has(key)), None)
    method = packing and packing.value("quant_method", str, "")
    if packing is not None and method == FP8:
        block = packing.values("weight_block_size", int) if packing.has("weight_block_size") else _BLOCK
        if len(block) != 2 or min(block) < 1:
            raise BadCheckpoint(f"{packing.place}: 'weight_block_size' is {list(block)}, which must be two numbers above 0")
        return dict(_find_scaled(header, block, config.place))
    if packing is not None and method == COMPRESSED:
        return dict(_find_compressed(header, packing, read))
    return {}


def no_weights(packed: Mapping[str, PackedWeight]) -> set[str]:
    """Names of tensors that are no weights of the model: parts of packed weights, and tensors that would round activations."""
    modules = [name.removesuffix("weight") if name.endswith(".weight") else f"{name}_" for name in packed]
    parts = {part for weight in packed.values() for part in weight.parts.values()}
    return parts | {f"{module}{end}" for module in modules for end in _ACTIVATIONS}


def _find_scaled(header: Mapping[str, Stored], block: Sequence[int], place: str) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for the weights of 8-bit floats with a scale for each block. block: rows and columns of a block. place: the
    file, for errors. Raises BadCheckpoint for scales that do not fit."""
    for name, stored in header.items():
        scale = header.get(name + _SCALE)
        if stored.dtype != "F8_E4M3" or scale is None or scale.dtype not in COMPUTED:
            continue
        scale_shape = (*stored.shape[:-2], *(math.ceil(size / of) for size, of in zip(stored.shape[-2:], block, strict=False)))
        if len(stored.shape) < 2 or scale.shape != scale_shape:
            mismatch = f"{name} is {list(stored.shape)}, its scales are {list(scale.shape)}"
            raise BadCheckpoint(f"{place}: {mismatch}, and blocks of {list(block)} have {list(scale_shape)}")
        yield name, PackedWeight({"weight": name, "scale": name + _SCALE}, stored.shape, partial(_unpack_scaled, block=block))


def _unpack_scaled(parts: dict[str, torch.Tensor], block: Sequence[int]) -> torch.Tensor:
    """Unpack a weight of `_find_scaled`: its numbers times the scales of their blocks, float32. block: rows and columns of a block."""
    weight = parts["weight"].float()
    (rows, columns), scale = weight.shape[-2:], parts["scale"].float()
    # Blocks may be larger than the weight.
    scale = scale.repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
    return weight * scale.repeat_interleave(min(block[1], columns), -1)[..., :columns]


def _find_compressed(header: Mapping[str, Stored], packing: Config, read: Read) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for the weights in the format of compressed-tensors. packing: the config's section about packing. read: reads a
    tensor. Raises BadCheckpoint for tensors that are missing or do not fit."""
    scheme, decompress, names = _read_scheme(packing)
    bits = scheme.weights.num_bits
    for root, stored in header.items():
        module, _, first = root.rpartition(".")
        if first != names[0] or stored.dtype in COMPUTED or f"{module}.weight_scale" not in header:
            continue
        parts = {name: f"{module}.{name}" for name in names}
        if missing := sorted(name for name in parts.values() if name not in header):
            raise BadCheckpoint(f"{packing.place}: {root} is packed, and {missing[0]} is not there")
        shape = stored.shape
        if "weight_shape" in parts:
            shape_entry = header[parts["weight_shape"]]
            shape = tuple(read(parts["weight_shape"]).tolist()) if shape_entry.shape == (2,) and shape_entry.dtype in ("I32", "I64") else ()
            if len(shape) != 2 or min(shape) < 1 or stored.shape != (shape[0], math.ceil(shape[1] * bits / 32)):
                raise BadCheckpoint(
                    f"{packing.place}: {root} is {list(stored.shape)}, which are not numbers of {bits} bits of {list(shape)}"
                )
        _check_scales(scheme.weights, {name: header[part].shape for name, part in parts.items()}, shape, f"{packing.place}: {module}")
        yield f"{module}.weight", PackedWeight(parts, shape, partial(_unpack_compressed, decompress, scheme, shape, root))


def _check_scales(args: Any, parts: Mapping[str, tuple[int, ...]], shape: tuple[int, ...], place: str) -> None:
    """Raises BadCheckpoint for scales or zeros whose shape does not fit the weight, because torch would apply some of them to the wrong
    numbers. args: how the library packs weights. parts: shapes of the tensors of one weight, by name. shape: of the unpacked weight. place:
    the module, for errors."""
    if len(shape) != 2 or min(shape) < 1:
        raise BadCheckpoint(f"{place}.weight is {list(shape)}, and only weights of rows and columns are unpacked")
    rows, columns = shape
    sides = {"tensor": shape, "channel": (1, columns), "group": (1, args.group_size), "block": args.block_structure}
    strategy = next(name for name in sides if name == args.strategy)  # As a string: the library may have an equal member of an Enum.
    height, width = sides[strategy]
    scales = (math.ceil(rows / height), math.ceil(columns / width))
    expected = {"weight_scale": scales, "weight_zero_point": scales}
    if "weight_packed" in parts and strategy in ("channel", "group"):
        expected["weight_zero_point"] = (math.ceil(rows * args.num_bits / 32), scales[1])  # Packed along the rows, into 32 bits.
    for name in expected.keys() & parts.keys():
        part_shape = parts[name]
        if part_shape != expected[name] and not (strategy == "tensor" and part_shape in ((), (1,))):
            requirement = f"a weight of {list(shape)} with scales by {strategy} has {list(expected[name])}"
            raise BadCheckpoint(f"{place}.{name} is {list(part_shape)}, and {requirement}")


def _read_scheme(packing: Config) -> tuple[Any, Callable[[dict[str, torch.Tensor], Any], dict[str, torch.Tensor]], tuple[str, ...]]:
    """(how weights are packed, the library's function that unpacks a weight, the names of the weight's tensors). packing: as in
    `_find_compressed`. Raises BadCheckpoint for an unsupported way."""
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
    except ModuleNotFoundError as error:
        advice = "such weights are unpacked by the package compressed-tensors: install the extra `compressed` of omnistage"
        raise BadCheckpoint(f"{packing.place}: {error.name} is not installed; {advice}") from None
    form = packing.value("format", str, "")
    groups = packing.section("config_groups")
    for feature, is_there in (
        (f"the format {form[:80]!r}", form not in _FORMATS),
        (f"{len(groups.raw)} ways in one checkpoint", len(groups.raw) != 1),
        *((f"{key!r}", bool(packing.raw.get(key))) for key in ("transform_config", "sparsity_config", "kv_cache_scheme")),
    ):
        if is_there:
            raise BadCheckpoint(
                f"{packing.place}: {feature} of compressed-tensors is not supported; {', '.join(_FORMATS)} are, for all weights"
            )
    try:
        scheme = next(iter(QuantizationConfig.model_validate(dict(packing.raw)).config_groups.values()))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadCheckpoint(f"{packing.place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    compressor = BaseCompressor.get_value_from_registry(form)
    if scheme.weights is None:
        raise BadCheckpoint(f"{packing.place}: it does not say how weights are packed")
    if (bits := scheme.weights.num_bits) not in _BITS:
        raise BadCheckpoint(f"{packing.place}: 'num_bits' is {bits}, and numbers of {_BITS[0]} to {_BITS[-1]} bits are unpacked")
    if (strategy := scheme.weights.strategy) not in _STRATEGIES:
        raise BadCheckpoint(f"{packing.place}: scales by {strategy!r} are not supported; by {', '.join(_STRATEGIES)} are")
    return scheme, compressor.decompress, compressor.compression_param_names(scheme)


def _unpack_compressed(
    decompress: Callable[[dict[str, torch.Tensor], Any], dict[str, torch.Tensor]],
    scheme: Any,
    shape: tuple[int, ...],
    root: str,
    parts: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Unpack a weight of `_find_compressed` with the library's `decompress`. shape: of the unpacked weight. root: name of its packed
    tensor, for errors. Raises BadCheckpoint."""
    try:
        weight = decompress(parts, scheme)["weight"]
    except (RuntimeError, ValueError, IndexError) as error:  # torch's errors for shapes that do not fit.
        raise BadCheckpoint(f"{root} cannot be unpacked: {error}") from error
    if weight.shape != shape:
        raise BadCheckpoint(f"{root} becomes {list(weight.shape)}, and says that it is {list(shape)}")
    return weight
