"""Reads the weights of a checkpoint, and checks that every weight of the model is there, in its shape, and no other.

Weights lie in model.safetensors, or in the shards that model.safetensors.index.json lists. A tensor is a view of the file until it is
copied. A weight with fewer bits in the files is unpacked when it is read, into the type of computing, so a replica takes as much memory as
with unpacked weights. Activations are not rounded to fewer bits, though some such checkpoints were made for that. Two ways of packing are
supported: 8-bit floats with a scale for each block, as DeepSeek and Qwen publish them ("fp8"), and the format of the library
compressed-tensors, which unpacks it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omnistage.models.checkpoint.files import WEIGHTS, WEIGHTS_INDEX, BadCheckpoint, Config, json_object
from omnistage.models.checkpoint.header import (
    COMPRESSED,
    COMPUTED,
    FP8,
    QUANTIZED,
    Stored,
    check_finite,
    check_says_unpacked,
    check_unpacked,
    tell_unread,
    weights_in,
)

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
    if packing is None:
        return {}
    method = packing.value("quant_method", str, "")
    if method == FP8:
        block = packing.values("weight_block_size", int) if packing.has("weight_block_size") else _BLOCK
        if len(block) != 2 or min(block) < 1:
            raise BadCheckpoint(f"{packing.place}: 'weight_block_size' is {list(block)}, which must be two numbers above 0")
        return dict(_find_scaled(header, block, config.place))
    return dict(_find_compressed(header, packing, read)) if method == COMPRESSED else {}


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
        scale_shape = (*stored.shape[:-2], *(math.ceil(size / of_block) for size, of_block in zip(stored.shape[-2:], block, strict=False)))
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
        module, _, ending = root.rpartition(".")
        # The first of the names is that of the packed numbers.
        if ending != names[0] or stored.dtype in COMPUTED or f"{module}.weight_scale" not in header:
            continue
        parts = {name: f"{module}.{name}" for name in names}
        if missing := sorted(name for name in parts.values() if name not in header):
            raise BadCheckpoint(f"{packing.place}: {root} is packed, and {missing[0]} is not there")
        shape = stored.shape
        if "weight_shape" in parts:
            shape_entry = header[parts["weight_shape"]]
            has_two_numbers = shape_entry.shape == (2,) and shape_entry.dtype in ("I32", "I64")
            shape = tuple(read(parts["weight_shape"]).tolist()) if has_two_numbers else ()
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
    from pydantic import ValidationError

    form = packing.value("format", str, "")
    groups = packing.section("config_groups")
    for feature, is_unsupported in (
        (f"the format {form[:80]!r}", form not in _FORMATS),
        (f"{len(groups.raw)} ways in one checkpoint", len(groups.raw) != 1),
        *((f"{key!r}", bool(packing.raw.get(key))) for key in ("transform_config", "sparsity_config", "kv_cache_scheme")),
    ):
        if is_unsupported:
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


NO_NAMES: Mapping[str, str] = MappingProxyType({})

_OWN_FILES = ("quantize_config.json", "quant_config.json")
"""Files in which GPTQ and AWQ write how they pack weights, in addition to config.json or instead of it."""

_UNPACKED_TO = "F32"
"""The type of packed weights in `Weights.header`."""

ShapedNeed = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Returns the weight of this name and shape. Raises BadCheckpoint."""


class Weights:
    """The weights in a folder, by name; their files are open during a `with`. It records which weights were read.

    others: beginnings of the names of weights for parts that the model does not have. renamed: beginning of a name in some files -> the
    beginning used here. computed: the type that the model computes in."""

    def __init__(
        self, directory: Path, others: tuple[str, ...] = (), renamed: Mapping[str, str] = NO_NAMES, *, computed: torch.dtype = torch.float32
    ) -> None:
        self.directory = directory
        self._computed = computed
        self._others, self._renamed = others, renamed
        self._files = ExitStack()
        self._shards: dict[str, safe_open] = {}
        self._stored: Mapping[str, _Place] = {}
        self.header: Mapping[str, Stored] = {}
        """Type and shape of each weight that does not belong to another part, by name."""
        self._checked: set[tuple[str, int | None]] = set()
        """Name and index of each weight that was read."""
        self._foreign_names: set[str] = set()
        """Names of the weights that another process reads."""
        self._packed: Mapping[str, PackedWeight] = {}

    def __enter__(self) -> Weights:
        """Raises BadCheckpoint for a missing or damaged file, for an index that does not fit its shards, and for packed weights that
        `packed` cannot unpack; OSError for a file that cannot be read."""
        try:
            self._unpack(self._open())
            check_unpacked(self.header, self.directory)
            tell_unread(self.directory, [self.directory / shard for shard in self._shards])
        except BaseException:
            self._files.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights except those of other parts; a packed weight has its name after unpacking."""
        return frozenset(self.header)

    def read(self, name: str, index: int | None = None) -> torch.Tensor | None:
        """The weight of a name; None: there is none. index: read only this entry of the first axis, such as one of all experts; None: the
        whole weight. Raises BadCheckpoint for a weight that is damaged or of no type for computing."""
        packed = self._packed.get(name)
        if packed is None and name not in self._stored:
            return None
        if packed is None:
            path, tensor = self._place(name)[0], self._tensor(name, index)
        else:
            path, tensor = self.directory, packed.unpack({key: self._tensor(part, index) for key, part in packed.parts.items()})
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise BadCheckpoint(f"{path}: {name} is of {tensor.dtype}, which is no type of a weight")
        if (name, index) not in self._checked:  # Checked once; if a backend of products is refused, all weights are read a second time.
            check_finite(tensor, name, path, self._computed)
            self._checked.add((name, index))
        return tensor

    def _tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor of a weight as it is stored. index: as in `read`."""
        path, shard, stored = self._place(name)
        with _naming_file(path):
            part = shard.get_slice(stored) if index is not None else None  # type: ignore[no-untyped-call]
            tensor: torch.Tensor = shard.get_tensor(stored) if part is None else part[index]  # type: ignore[no-untyped-call]
        return tensor

    def _place(self, name: str) -> tuple[Path, safe_open, str]:
        """(path of the file of a weight, the same file opened, the weight's name in this file)."""
        shard, stored = self._stored[name]
        return self.directory / shard, self._shards[shard], stored

    def need(self, name: str) -> torch.Tensor:
        """As `read`, but raises BadCheckpoint if there is no such weight."""
        if (tensor := self.read(name)) is None:
            raise BadCheckpoint(f"{self.directory} lacks the weight {name}")
        return tensor

    def mapped(self, name: str) -> torch.Tensor | None:
        """As `read`, but the tensor maps only the bytes of this weight in the file, for a weight that is used in its stored type. All
        processes of this machine share its memory, and the rest of the file does not stay mapped. Nobody may write to the tensor."""
        tensor = self.read(name)
        if tensor is None or name in self._packed:
            return tensor
        path, _, stored = self._place(name)
        with _naming_file(path):
            return _map_alone(path, stored, tensor)

    def check_read(self) -> None:
        """Raises BadCheckpoint for a weight that was neither read nor left to other processes, because then the checkpoint belongs to
        another model."""
        self._check_unexpected(self.header.keys() - {name for name, _ in self._checked} - self._foreign_names)

    def leave(self, names: Iterable[str]) -> None:
        """Note that another process reads these weights from the same files."""
        self._foreign_names.update(names)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises BadCheckpoint if this weight is missing or has another shape. It reads only the header; call it before anything of this
        size is built."""
        if name not in self.header:
            raise BadCheckpoint(f"{self.directory} lacks the weight {name}")
        if (stored_shape := self.header[name].shape) != shape:
            raise BadCheckpoint(f"{self.directory}: {name} is {list(stored_shape)}, and by config.json it is {list(shape)}")

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises BadCheckpoint for a missing, unexpected or misshapen weight. shapes: name -> shape of all weights. It reads only the
        header."""
        if missing := sorted(shapes.keys() - self.names):
            raise BadCheckpoint(f"{self.directory} lacks {len(missing)} weights, the first is {missing[0]}")
        self._check_unexpected(self.names - shapes.keys())
        for name, shape in shapes.items():
            if (stored_shape := self.header[name].shape) != shape:
                raise BadCheckpoint(f"{self.directory}: {name} is {stored_shape}, not {shape}")

    def _check_unexpected(self, names: Iterable[str]) -> None:
        if unexpected := sorted(names):
            raise BadCheckpoint(f"{self.directory} has {len(unexpected)} weights that this model does not, the first is {unexpected[0]}")

    def _open(self) -> dict[str, Stored]:
        """Open the files. Returns type and shape of all tensors in them, by the names used here. Raises BadCheckpoint."""
        index = self.directory / WEIGHTS_INDEX
        places: dict[str, _Place] = {}
        if index.is_file():
            shard_of = Config(json_object(index), str(index)).table("weight_map", str)
            for name in sorted(set(shard_of.values())):
                if Path(name).name != name:
                    raise BadCheckpoint(f"{index} names {name[:80]!r}, which is no file of its own folder")
                stored_names = self._open_shard(name)
                listed = {weight for weight, shard in shard_of.items() if shard == name}
                if stored_names != listed:
                    raise BadCheckpoint(f"{index} does not fit {name}: only one of them has {min(stored_names ^ listed)}")
        else:
            shard_of = dict.fromkeys(self._open_shard(WEIGHTS), WEIGHTS)
        for stored, shard in shard_of.items():
            name = self._name_here(stored)
            if name in places:
                raise BadCheckpoint(f"{self.directory} has {name} twice, also as {max(stored, places[name].name)}")
            places[name] = _Place(shard, stored)
        self._stored = places
        headers = {name: weights_in(shard) for name, shard in self._shards.items()}
        return {name: headers[shard][stored] for name, (shard, stored) in places.items()}

    def _unpack(self, stored: Mapping[str, Stored]) -> None:
        """Find the packed weights, and set `header`. stored: all tensors in the files. Raises BadCheckpoint if weights are packed in an
        unknown way; weights of other parts are checked too, because a model may read one of them."""
        for file in _OWN_FILES:
            if (path := self.directory / file).is_file():
                # An empty value would say nothing about packing, but even an empty file of this name says that weights are packed.
                check_says_unpacked({QUANTIZED[0]: json_object(path) or {"": ""}}, str(path))
        if (path := self.directory / "config.json").is_file():
            self._packed = find_packed(stored, Config(json_object(path), str(path)), self._tensor)
        no_weight_names = no_weights(self._packed)
        plain = {name: entry for name, entry in stored.items() if name not in no_weight_names}
        if twice := sorted(plain.keys() & self._packed.keys()):
            raise BadCheckpoint(
                f"{self.directory} has {twice[0]} twice, as it is and in {', '.join(self._packed[twice[0]].parts.values())}"
            )
        unpacked = {name: Stored(_UNPACKED_TO, packed.shape) for name, packed in self._packed.items()}
        self.header = {name: entry for name, entry in (plain | unpacked).items() if not name.startswith(self._others)}

    def _name_here(self, stored: str) -> str:
        """The name used here for a weight with this name in the files."""
        prefix = next((prefix for prefix in self._renamed if stored.startswith(prefix)), None)
        return stored if prefix is None else self._renamed[prefix] + stored.removeprefix(prefix)

    def _open_shard(self, name: str) -> set[str]:
        """Open one file; returns the names of its weights. Raises BadCheckpoint."""
        path = self.directory / name
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing: give the folder of a complete checkpoint, or none for the family's own default")
        path.open("rb").close()  # Raises OSError if this user may not read the file, which the library would report as missing.
        with _naming_file(path):
            shard = self._files.enter_context(safe_open(path, framework="pt"))
            self._shards[name] = shard
            return set(shard.keys())


class _Place(NamedTuple):
    """Where a weight is stored: the name of its file, and its name there."""

    shard: str
    name: str


def _map_alone(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weight `name` of a file, as a mapping of its own; see `mapped`. tensor: the same weight, read by the library, which has checked
    the file. A weight that cannot be mapped is copied."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(header_bytes))[name]["data_offsets"]
        start = 8 + header_bytes + begin  # `begin` counts from the end of the header.
        skipped = start % mmap.ALLOCATIONGRANULARITY
        if not tensor.nbytes or start % tensor.itemsize:
            return tensor.clone()
        # The mapping would be copied on write, which never happens; for a read-only mapping torch would warn.
        memory = mmap.mmap(file.fileno(), skipped + tensor.nbytes, access=mmap.ACCESS_COPY, offset=start - skipped)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=skipped).view(tensor.shape)


def load_weights(net: nn.Module, directory: Path) -> None:
    """Put the weights of a folder into `net`. Raises BadCheckpoint for a missing, unexpected or misshapen weight."""
    with Weights(directory) as weights:
        weights.check_shapes({name: tuple(value.shape) for name, value in net.state_dict().items()})
        net.load_state_dict({name: weights.read(name) for name in weights.names}, assign=True)
    net.eval().requires_grad_(False)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """While the context is open, turns errors of the library and the system into BadCheckpoint with the path of the file."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is damaged: {error}") from error
