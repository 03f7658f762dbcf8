"""Reads the voices of a Qwen2.5-Omni checkpoint."""

from __future__ import annotations

import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.header import check_finite

FILE = "spk_dict.pt"

_DAMAGE = (
    *(OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, TypeError),
)
"""Errors that `torch.load` raises for a damaged file. It checks few values before it makes tensors of them, so a bad value may raise any of
these errors."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

DEFAULT_VOICE = "Chelsie"
"""The default voice, as in Transformers' `generate`, if the checkpoint has it."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice. token: id of the Thinker's token that stands for the voice in the Talker. speaker: vector for Code2Wav, float32 [1,
    speaker_size]. example: mel frames of speech for Code2Wav, float32 [1, frames, mel_bins]."""

    token: int
    speaker: torch.Tensor
    example: torch.Tensor


@dataclass(frozen=True, slots=True)
class VoiceSizes:
    """Sizes that voices must have. speaker: width of a voice's vector. mel_bins: width of its example. tokens: number of the Thinker's
    tokens, below which the voice's token must be; None: the token is not used."""

    speaker: int
    mel_bins: int
    tokens: int | None = None


def read_voices(directory: Path, sizes: VoiceSizes) -> dict[str, Voice]:
    """The voices of the checkpoint in a folder, by name, the default voice first. Raises BadCheckpoint for a file that is no table of
    voices, or has other sizes. Only tensors and plain values are read."""
    path = directory / FILE
    try:
        _check_stored(path)
        # Mapped, so that a tensor is a part of the file and takes no memory, whatever size the file states for it.
        table = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise BadCheckpoint(f"{path} cannot be read as a table of voices: {reason}") from None
    if not isinstance(table, dict) or not table:
        raise BadCheckpoint(f"{path} has no voices")
    voices = {str(name): _voice(f"{path}: voice {str(name)[:64]!r}", values, sizes) for name, values in table.items()}
    return {name: voices[name] for name in sorted(voices, key=lambda name: name != DEFAULT_VOICE)}


def _check_stored(path: Path) -> None:
    """Raises BadZipFile for a file with compressed parts, which may have any size after decompression. `torch.save` compresses nothing. Its
    older files, which are no archives, are refused too."""
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise zipfile.BadZipFile("its parts are compressed, which torch.save never does")


def _voice(place: str, values: object, sizes: VoiceSizes) -> Voice:
    """A voice from its values in the file. place: the file and the voice, for errors. Raises BadCheckpoint."""
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{place} is no table")
    token = values.get("bos_token")
    if _is_plain(token) and token.numel() == 1 and not token.is_floating_point():
        token = token.item()
    # There is no upper bound without `sizes.tokens`.
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < (sizes.tokens or token + 1):
        raise BadCheckpoint(f"{place}: 'bos_token' is {str(token)[:80]}, which is no token of the Thinker")
    return Voice(token, _tensor(place, values, "cond", (1, sizes.speaker)), _tensor(place, values, "ref_mel", (1, 0, sizes.mel_bins)))


def _tensor(place: str, values: dict[object, object], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a voice, float32. name: its key. shape: the shape that it must have; 0: any number above 0. Raises BadCheckpoint."""
    value = values.get(name)
    if not _is_plain(value):
        raise BadCheckpoint(f"{place} has no tensor {name!r}")
    if value.dtype not in _FLOATS:
        raise BadCheckpoint(f"{place}: {name!r} is of {value.dtype}, not of one of {', '.join(map(str, _FLOATS))}")
    sizes = zip(value.shape, shape, strict=False)
    sizes_agree = all(size > 0 if expected_size == 0 else size == expected_size for size, expected_size in sizes)
    if value.ndim != len(shape) or not sizes_agree:
        shape_text = ", ".join(str(size) if size else "frames" for size in shape)
        raise BadCheckpoint(f"{place}: {name!r} is {list(value.shape)}, not [{shape_text}]")
    check_finite(value, repr(name), place)
    return value.float().clone()


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor each of whose numbers has memory of its own on the CPU. `torch.load` also returns tensors that are sparse,
    have no memory, or repeat a few numbers."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()
