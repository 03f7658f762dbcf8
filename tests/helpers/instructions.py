"""Other processors, made out of this one: instructions that it has and a library is told not to use."""

from __future__ import annotations

from pathlib import Path

_ONEDNN = (
    ("AVX512_CORE_AMX", "amx_bf16"),
    ("AVX512_CORE_BF16", "avx512_bf16"),
    ("AVX512_CORE_VNNI", "avx512_vnni"),
    ("AVX512_CORE", "avx512dq"),
    ("AVX2", "avx2"),
    ("SSE41", "sse4_1"),
)
"""The names of instruction sets in oneDNN, from the highest down, each with the flag of a processor that has it."""


def _below() -> tuple[str, ...]:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").partition("\nflags")[2].partition("\n")[0].split())
    own = next((place for place, (_, flag) in enumerate(_ONEDNN) if flag in flags), len(_ONEDNN))
    return tuple(name for name, _ in _ONEDNN[own + 1 :])


OLDER_PROCESSORS = tuple({"ONEDNN_MAX_CPU_ISA": name} for name in _below())
"""Environments in which oneDNN leaves the best instructions of this processor alone: the next older ones first."""

PLAIN_KERNELS = {"ATEN_CPU_CAPABILITY": "default"}
"""An environment in which torch's own kernels use what every x86-64 processor has."""
