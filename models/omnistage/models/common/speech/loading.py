"""Settings of every Code2Wav with a net that are decided at load: its rounding, its threads, and the number of speeches that fit into
memory."""

from __future__ import annotations

import torch

from omnistage.models.common.cores import cores
from omnistage.models.common.memory import free_bytes
from omnistage.models.humans import bytes_told
from omnistage.models.options import LoadOptions

USUAL_WORKERS = 4
"""Default on a CPU: the threads share Python's lock, which another replica does not."""

SESSIONS_SHARE = 0.2
"""Part of the free memory for the state that speeches keep from window to window."""

KERNELS = 2048
"""Kernels that oneDNN keeps on a CPU, about 60 KB each. A net of convolutions has a hundred for each size of a window, and making one takes
as long as using it once: if fewer are kept, the kernels of the first window are gone when a speech has ended."""


def round_alike(device: torch.device) -> None:
    """Round in float32 always: such nets are published in float32, and other bits in a window that is computed again would be heard as a
    click."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def workers_of(asked: int, options: LoadOptions, device: torch.device) -> int:
    """Number of threads that compute windows. asked: 0 leaves it to the model."""
    return asked or (min(max(cores() // options.threads, 1), USUAL_WORKERS) if device.type == "cpu" else 1)


def sessions_of(each: int, options: LoadOptions, free: int | None = None) -> tuple[int, str]:
    """Number of speeches that fit into memory at once, and the reason in words. each: bytes that one keeps from window to window. free:
    free bytes after the weights are loaded; None: measured."""
    if options.max_sessions:
        return options.max_sessions, options.told("max_sessions", options.max_sessions)
    room = free_bytes(options.device) if free is None else free
    sessions = min(max(int(SESSIONS_SHARE * room) // each, 1), options.sessions)
    return sessions, f"{sessions}, {bytes_told(each)} each, of {bytes_told(room)} that are free"
