"""Tensors as the arrays of pieces."""

from __future__ import annotations

import numpy as np
import torch

from omnistage.models.interface import Array


def array_of(tensor: torch.Tensor) -> Array:
    """The memory of a tensor on the CPU. NumPy has no bfloat16: its bits become uint16, as ports of that type have them."""
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
