"""Settings that every Code2Wav with a net chooses at load: its rounding, its threads, and the number of speeches that fit into memory."""

from __future__ import annotations

import torch

from omnistage.models.common.cores import cores
from omnistage.models.common.memory import free_bytes
from omnistage.models.humans import bytes_told
from omnistage.models.options import LoadOptions

USUAL_WORKERS = 4
"""Largest number of threads by default on a CPU: they share Python's lock, which a further replica would not."""

SESSIONS_SHARE = 0.2
"""Part of the free memory that the state may take which speeches keep from window to window."""

KERNELS = 2048
"""Number of kernels that oneDNN keeps on a CPU, about 60 KB each. A net of convolutions has a hundred for each size of a window, and making
one takes as long as using it once. With fewer, the kernels of the first window would be gone when a speech has ended."""


def round_alike(device: torch.device) -> None:
    """Make torch round in float32 always. Such nets are published in float32, and if a window that is computed again had other bits, they
    would be heard as a click."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def workers_of(asked: int, options: LoadOptions, device: torch.device) -> int:
    """Number of threads that compute windows. asked: number that the user asked for; 0 leaves it to the model."""
    return asked or (min(max(cores() // options.threads, 1), USUAL_WORKERS) if device.type == "cpu" else 1)


def sessions_of(each: int, options: LoadOptions, free: int | None = None) -> tuple[int, str]:
    """Number of speeches that fit into memory at once, and the reason in words. each: bytes that one keeps from window to window. free:
    free bytes after the weights are loaded; None: they are measured."""
    if options.max_sessions:
        return options.max_sessions, options.told("max_sessions", options.max_sessions)
    room = free_bytes(options.device) if free is None else free
    sessions = min(max(int(SESSIONS_SHARE * room) // each, 1), options.sessions)
    return sessions, f"{sessions}, {bytes_told(each)} each, of {bytes_told(room)} that are free"
