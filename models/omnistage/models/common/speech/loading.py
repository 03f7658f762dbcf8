"""Settings that every Code2Wav with a net chooses at load: its rounding, its threads, and the number of speeches that fit into memory."""

from __future__ import annotations

import torch

from omnistage.models.common.cores import cores
from omnistage.models.common.memory import free_bytes
from omnistage.models.humans import bytes_told
from omnistage.models.options import LoadOptions

USUAL_WORKERS = 4
"""Largest number of threads by default on a CPU. More threads would wait for Python's lock, which further replicas do not share."""

SESSIONS_SHARE = 0.2
"""Part of the free memory that may be taken by the state which speeches keep from window to window."""

KERNELS = 2048
"""Number of kernels that oneDNN keeps on a CPU, about 60 KB each. A net of convolutions has a hundred for each size of a window, and making
a kernel takes as long as using it once. With fewer, the kernels for the first window would be gone before the next speech needs them."""


def round_alike(device: torch.device) -> None:
    """Make torch always round in float32, and in the same way. The nets of Code2Wavs are published in float32, and if a window that is
    computed a second time had other bits, one would hear a click."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def workers_of(user_workers: int, options: LoadOptions, device: torch.device) -> int:
    """Number of threads that compute windows. user_workers: number that the user asked for; 0: the model chooses."""
    return user_workers or (min(max(cores() // options.threads, 1), USUAL_WORKERS) if device.type == "cpu" else 1)


def sessions_of(each: int, options: LoadOptions, free: int | None = None) -> tuple[int, str]:
    """(number of speeches that fit into memory at once, the reason in words). each: bytes that a speech keeps from window to window. free:
    free bytes after the weights are loaded; None: measure them."""
    if options.max_sessions:
        return options.max_sessions, options.told("max_sessions", options.max_sessions)
    room = free_bytes(options.device) if free is None else free
    sessions = min(max(int(SESSIONS_SHARE * room) // each, 1), options.sessions)
    return sessions, f"{sessions}, {bytes_told(each)} each, of {bytes_told(room)} that are free"
