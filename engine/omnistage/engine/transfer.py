"""Tensors on their way to the device that computes."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, which takes it in its turn: a plain copy would wait until everything before it is computed. The
    caller must not change `values` afterwards."""
    if device.type == "cpu":
        return values
    # Only a copy out of pinned memory is left to the device. The allocator keeps the memory until it is done.
    return values.pin_memory().to(device, non_blocking=True)
