"""Converts tensors to the arrays of pieces, and back."""

from __future__ import annotations

import numpy as np
import torch

from omnistage.models.interface import Array


def array_of(tensor: torch.Tensor) -> Array:
    """A CPU tensor as an array, which shares its memory if possible. NumPy has no bfloat16, so the bits become uint16, as in ports of that
    type."""
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def tensor_of(array: Array) -> torch.Tensor:
    """A copy of a port's rows as a tensor on the CPU; uint16 becomes bfloat16."""
    return (
        torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array.copy())
    )
