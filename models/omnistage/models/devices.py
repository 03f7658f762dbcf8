"""Whether this machine and its torch have a device, and what it multiplies well."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from omnistage.models.errors import LoadError

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""One of them is there where CUDA can be: the driver of Linux, and that of Linux under Windows."""


def check_possible(device: str) -> None:
    """Raises LoadError where a device cannot be there. Says so without importing torch, which takes seconds."""
    if device == "cpu":
        return
    if (installed := version("torch")).endswith("+cpu"):
        raise LoadError(
            f"device {device}: torch {installed} is a build for CPUs; `make setup DEVICE=cuda` installs one for CUDA, or compute on cpu"
        )
    if not any(driver.exists() for driver in DRIVERS):
        raise LoadError(f"device {device}: this machine has no NVIDIA driver; compute on cpu")


def check_there(device: str) -> None:
    """Raises LoadError where torch does not find the device. Imports torch."""
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise LoadError(f"device {device}: torch finds {count} CUDA devices{f', cuda:0 to cuda:{count - 1}' if count else ''}")


def dtype_of(device: str) -> str:
    """What a family that has the choice computes in on a device, by default: bfloat16 where the device multiplies it, else float32. A
    processor without it is many times as slow in it. Imports torch."""
    from omnistage.engine.linear import multiplies_bfloat16

    return "bfloat16" if device != "cpu" or multiplies_bfloat16() else "float32"


def hardware(device: str) -> str:
    """A device as a revision names it: kernels are those of a model of GPU. Imports torch."""
    if device == "cpu":
        return device
    import torch

    return f"cuda {torch.cuda.get_device_name(device)}"
