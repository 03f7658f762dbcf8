"""The memory that a process needs while something is done to it."""

from __future__ import annotations

from pathlib import Path


class Peak:
    """The most memory that a process held since the last look, in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc") / str(pid)
        self.before = self._resident("VmRSS")
        (self._folder / "clear_refs").write_text("5")

    @property
    def growth(self) -> int:
        return self._resident("VmHWM") - self.before

    def _resident(self, name: str) -> int:
        lines = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(lines[name].split()[0]) << 10
