"""The revision of a loaded model: two replicas have different ones if equal input could give other output, because then no answer of the
one may go on at the other.

The computing machine has no complete name: torch gives a CPU with AMX and one without it the same name, and their results differ. So a
revision is made of everything that can be named (files, code, torch, dtype, device, threads) and of results: what this machine computes
from a fixed input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T")

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.pt")
"""Files of a checkpoint from which a model is made: weights, configs, vocabularies, chat templates, voices."""

DIGITS = 12


def digests_of_files(directory: Path) -> bytes:
    """Names and SHA-256 of all files of a checkpoint from which a model is made; about 1.5 GB are read in a second."""
    read = []
    for path in sorted({path for pattern in PATTERNS for path in directory.glob(pattern)}):
        with path.open("rb") as file:
            read.append(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return b"".join(read)


def revision(
    directory: Path,
    code: str,
    *,
    dtype: str,
    device: str,
    threads: int,
    results: Iterable[NDArray[np.generic] | torch.Tensor],
    settings: str = "",
    files: bytes | None = None,
) -> str:
    """Hex digits that change with everything that an output can depend on.

    directory: files of the model. code: a name of the code; raise it with every change of what the code computes. device: see
    `devices.hardware`; the number of the device does not count. results: results of fixed inputs, computed as an answer is (see
    `compute_on_thread`), by every kernel that an answer uses. settings: everything else that the output depends on. files: digests of the
    files, if the caller has them.
    """
    digest = hashlib.sha256(digests_of_files(directory) if files is None else files)
    digest.update(f" {code} {torch.__version__} {dtype} {device.partition(':')[0]} {threads}{settings and ' '}{settings}".encode())
    for result in results:
        array = result.cpu().contiguous().flatten().view(torch.uint8).numpy() if isinstance(result, torch.Tensor) else result
        digest.update(f" {result.dtype} {tuple(result.shape)} ".encode() + array.tobytes())
    return digest.hexdigest()[:DIGITS]


def compute_on_thread(call: Callable[[], T], threads: int) -> T:
    """The result of a call on a thread with this many torch threads, as the worker of a model has."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        return pool.submit(call).result()
