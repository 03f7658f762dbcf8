"""Noise that is a pure function of (seed, step, token id), so that a draw depends on nothing else.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): the arg max of `logit + g` with independent standard Gumbel `g` is a draw from the
softmax of the logits. With noise keyed by token id, a tiny change of the logits almost never flips the choice, and a sequence that is
taken up again elsewhere goes on with the same draws. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import torch

_STEP_STRIDE = 0x9E3779B97F4A7C15
_TOKEN_STRIDE = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 with its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, steps: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers strictly between 0 and 1. seeds, steps: int64 [rows]; token_ids: int64 [rows, n]. Returns float64 [rows, n]."""
    keys = _mix(_mix(seeds + _signed(_STEP_STRIDE)) + steps * _signed(_STEP_STRIDE))
    bits = _mix(keys[:, None] + token_ids * _signed(_TOKEN_STRIDE))
    return (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(seeds: torch.Tensor, steps: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers, shapes and dtypes as `uniform`."""
    return -torch.log(-torch.log(uniform(seeds, steps, token_ids)))


def seed_bits(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 that the functions above take."""
    return _signed(seed)
