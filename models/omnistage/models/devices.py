"""The devices of this machine and its torch, and the type that a device multiplies well."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from omnistage.models.errors import LoadError

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
"""One of these exists if CUDA can work: the driver of Linux, and the driver of Linux under Windows."""


def check_possible(device: str) -> None:
    """Raises LoadError for a device that cannot be there. Works without importing torch, which takes seconds."""
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
        raise LoadError(f"device {device}: torch finds {count} CUDA devices{f', cuda:0 to cuda:{count - 1}' if count else ''}")


def dtype_of(device: str) -> str:
    """The default type on a device, for a family that has the choice: bfloat16 if the device multiplies it, else float32. A processor that
    does not multiply bfloat16 is many times slower with it. Imports torch."""
    from omnistage.engine.linear import multiplies_bfloat16

    return "bfloat16" if device != "cpu" or multiplies_bfloat16() else "float32"


def hardware(device: str) -> str:
    """The name of a device in a revision: kernels depend on the model of the GPU. Imports torch."""
    if device == "cpu":
        return device
    import torch

    return f"cuda {torch.cuda.get_device_name(device)}"
