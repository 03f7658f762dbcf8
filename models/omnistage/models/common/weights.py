"""Reads the weights of a checkpoint, and checks that every weight of the model is there, in its shape, and no other.

Weights lie in model.safetensors, or in the shards that model.safetensors.index.json lists. A tensor is a view of the file until it is
copied. Weights with fewer bits in the files are unpacked when they are read (`common.packed`).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omnistage.models.common.checkpoint import WEIGHTS, WEIGHTS_INDEX, BadCheckpoint, Config, json_object
from omnistage.models.common.header import (
    QUANTIZED,
    Stored,
    check_finite,
    check_says_unpacked,
    check_unpacked,
    tell_unread,
    weights_in,
)
from omnistage.models.common.packed import PackedWeight, find_packed, no_weights

NONE: Mapping[str, str] = MappingProxyType({})

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
        self,
        directory: Path,
        others: tuple[str, ...] = (),
        renamed: Mapping[str, str] = NONE,
        *,
        computed: torch.dtype = torch.float32,
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
        self._left: set[str] = set()
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
        path = self.directory if packed else self._place(name)[0]
        if packed is None:
            tensor = self._tensor(name, index)
        else:
            tensor = packed.unpack({key: self._tensor(part, index) for key, part in packed.parts.items()})
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
        self._check_unexpected(self.header.keys() - {name for name, _ in self._checked} - self._left)

    def leave(self, names: Iterable[str]) -> None:
        """Note that another process reads these weights from the same files."""
        self._left.update(names)

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
                check_says_unpacked({QUANTIZED[0]: json_object(path) or {"": ""}}, str(path))
        if (path := self.directory / "config.json").is_file():
            self._packed = find_packed(stored, Config(json_object(path), str(path)), self._tensor)
        others = no_weights(self._packed)
        plain = {name: entry for name, entry in stored.items() if name not in others}
        if twice := sorted(plain.keys() & self._packed.keys()):
            raise BadCheckpoint(
                f"{self.directory} has {twice[0]} twice, as it is and in {', '.join(self._packed[twice[0]].parts.values())}"
            )
        unpacked = {name: Stored(_UNPACKED_TO, packed.shape) for name, packed in self._packed.items()}
        self.header = {name: entry for name, entry in (plain | unpacked).items() if not name.startswith(self._others)}

    def _name_here(self, stored: str) -> str:
        """The name used here for a weight with this name in the files."""
        before = next((before for before in self._renamed if stored.startswith(before)), None)
        return stored if before is None else self._renamed[before] + stored.removeprefix(before)

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
        header = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(header))[name]["data_offsets"]
        start = 8 + header + begin
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
