"""Copies tensors to the device that computes."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to a device. The device copies it after its earlier work. The caller does not wait for that, unlike with a
    plain copy, so it must not change `values` afterwards."""
    if device.type == "cpu":
        return values
    # Pinned memory, because the caller would wait for any other. The allocator keeps it until the copy is made.
    return values.pin_memory().to(device, non_blocking=True)
