"""What every Code2Wav with a net settles while it is loaded: how it rounds, on how many threads it computes, for how many speeches there
is memory."""

from __future__ import annotations

import torch

from omnistage.models.common.cores import cores
from omnistage.models.common.memory import free_bytes
from omnistage.models.humans import bytes_told
from omnistage.models.options import LoadOptions

USUAL_WORKERS = 4
"""On a CPU, where nobody asks for more: they share Python's lock, and another replica does not."""

SESSIONS_SHARE = 0.2
"""Part of the free memory that what speeches keep from window to window may take."""

KERNELS = 2048
"""That oneDNN keeps on a CPU, some 60 KB each. A net of convolutions has a hundred for each size of a window, and to make them takes as
long as to use them once: where fewer are kept, those of the first window are gone when a speech has ended."""


def round_alike(device: torch.device) -> None:
    """Such nets are published in float32, and other bits for a window that is computed again would be heard as a click."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def workers_of(asked: int, options: LoadOptions, device: torch.device) -> int:
    """How many threads compute windows. asked: 0 leaves it to the model."""
    return asked or (min(max(cores() // options.threads, 1), USUAL_WORKERS) if device.type == "cpu" else 1)


def sessions_of(each: int, options: LoadOptions, free: int | None = None) -> tuple[int, str]:
    """How many speeches at once there is memory for, and why, in words. each: bytes that one takes from window to window. free: bytes,
    after the weights are loaded; None: measured."""
    if options.max_sessions:
        return options.max_sessions, options.told("max_sessions", options.max_sessions)
    room = free_bytes(options.device) if free is None else free
    sessions = min(max(int(SESSIONS_SHARE * room) // each, 1), options.sessions)
    return sessions, f"{sessions}, {bytes_told(each)} each, of {bytes_told(room)} that are free"
