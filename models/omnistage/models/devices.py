"""Checks which devices this machine and its torch have, which type a device multiplies fast, and how many cores there are."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from omnistage.models.reports import LoadError

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""Files of the driver on Linux, and on Linux under Windows. If CUDA can work, one of these files exists."""


def check_possible(device: str) -> None:
    """Raises LoadError for a device that this machine cannot have. It does not import torch, which takes seconds."""
    if device == "cpu":
        return
    if (installed := version("torch")).endswith("+cpu"):
        raise LoadError(
            f"device {device}: torch {installed} is a build for CPUs; `make setup DEVICE=cuda` installs one for CUDA, or compute on cpu"
        )
    if not any(driver.exists() for driver in DRIVERS):
        raise LoadError(f"device {device}: this machine has no NVIDIA driver; compute on cpu")


def check_there(device: str) -> None:
    """Raises LoadError for a device that torch does not find. Imports torch."""
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        names = f", cuda:0 to cuda:{count - 1}" if count else ""
        raise LoadError(f"device {device}: torch finds {count} CUDA devices{names}")


def dtype_of(device: str) -> str:
    """The default type on a device, for a family that supports several: bfloat16 if the device multiplies it, else float32, because other
    processors are many times slower with bfloat16. It imports torch."""
    from omnistage.engine.linear import multiplies_bfloat16

    return "bfloat16" if device != "cpu" or multiplies_bfloat16() else "float32"


def hardware(device: str) -> str:
    """The device in the model's revision: cpu, or the model of the GPU, because kernels depend on it. Imports torch."""
    if device == "cpu":
        return device
    import torch

    return f"cuda {torch.cuda.get_device_name(device)}"


QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The container's limit as two numbers: microseconds of computing in each period, or "max" for no limit; and microseconds of the period."""


def cores(quota: Path = QUOTA) -> int:
    """The number of cores that this process may run on; fewer, but at least one, if its container gets less computing time."""
    core_count = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
    except FileNotFoundError:
        return core_count
    return core_count if limit == "max" else max(min(core_count, int(limit) // int(period)), 1)
