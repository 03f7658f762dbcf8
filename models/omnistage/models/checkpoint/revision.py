"""The revision of a loaded model. If two replicas could give different output for equal input, their revisions differ, and neither
continues an answer of the other.

No name tells completely how a machine computes: torch gives a CPU with AMX and a CPU without it the same name, and their results differ. So
a revision is a hash of everything that has a name (files, code, torch, dtype, device, threads) and of results: what this machine computes
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
"""Names of the files of a checkpoint from which a model is made: weights, configs, vocabularies, chat templates, voices."""

DIGITS = 12


def digests_of_files(directory: Path) -> bytes:
    """The names and SHA-256 digests of all files of a checkpoint from which a model is made, joined. It reads about 1.5 GB in a second."""
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
    """The revision of a model: DIGITS hex digits, which change with everything that its output can depend on.

    directory: its files. code: number of the code; raise it with every change of what the code computes. dtype: name of the type of
    computing. device: see `devices.hardware`; the number of the device does not count. results: results for fixed inputs, computed as for
    an answer (see `compute_on_thread`) and by every kernel that an answer uses. settings: everything else on which the output depends.
    files: result of `digests_of_files`; None: it is computed here."""
    digest = hashlib.sha256(digests_of_files(directory) if files is None else files)
    digest.update(f" {code} {torch.__version__} {dtype} {device.partition(':')[0]} {threads}{settings and ' '}{settings}".encode())
    for result in results:
        array = result.cpu().contiguous().flatten().view(torch.uint8).numpy() if isinstance(result, torch.Tensor) else result
        digest.update(f" {result.dtype} {tuple(result.shape)} ".encode() + array.tobytes())
    return digest.hexdigest()[:DIGITS]


def compute_on_thread(call: Callable[[], T], threads: int) -> T:
    """Call `call` on a new thread with this many torch threads, like the worker of a model, and return its result."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        return pool.submit(call).result()
