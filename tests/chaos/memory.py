"""The private memory, open files and threads of the processes, sampled while they are under load and once at rest."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field
from pathlib import Path

ALLOWED_BYTES = 16 << 20
ALLOWED_FILES = 60
ALLOWED_THREADS = 12
"""The number of threads that a process may have at the end beyond the most that it had before it was warm."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """age_s: of the process, since its first sample. private_bytes: RssAnon of proc(5); shared memory is counted by leases."""

    age_s: float
    private_bytes: int
    files: int
    threads: int


@dataclass
class MemoryOfHouse:
    """Samples of every process that was ever seen. warm_s: age from which on it must not grow any more."""

    warm_s: float
    _begun: dict[int, float] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[MemorySample]] = field(default_factory=dict)

    def sample(self, pids: dict[str, int]) -> None:
        """Look at the processes by name."""
        for name, pid in pids.items():
            age_s = time.monotonic() - self._begun.setdefault(pid, time.monotonic())
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended in between.
            if "RssAnon" in status:
                sample = MemorySample(age_s, int(status["RssAnon"].split()[0]) * 1024, files, int(status["Threads"]))
                self.samples.setdefault((name, pid), []).append(sample)

    def grown(self) -> list[tuple[str, MemorySample, MemorySample, bool]]:
        """Every process that lived for twice the time it takes to get warm: its name, the most before that, its end, whether it is flat."""
        found = []
        for (name, pid), samples in self.samples.items():
            if samples[-1].age_s >= 2 * self.warm_s:
                young = [astuple(sample) for sample in samples if sample.age_s <= self.warm_s]
                warm = MemorySample(*map(max, zip(*young, strict=True)))
                end = samples[-1]
                flat = (
                    end.private_bytes <= warm.private_bytes + ALLOWED_BYTES
                    and end.files <= warm.files + ALLOWED_FILES
                    and end.threads <= warm.threads + ALLOWED_THREADS
                )
                found.append((f"{name} ({pid})", warm, end, flat))
        return found
