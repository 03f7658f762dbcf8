"""The memory that a server needs while a test does something to it."""

from __future__ import annotations

from pathlib import Path

from helpers.servers import ServerProcess


class Peak:
    """The most memory that a process held since the last look, in bytes."""

    def __init__(self, server: ServerProcess) -> None:
        self._folder = Path("/proc") / str(server.pid)
        self.before = self._resident("VmRSS")
        (self._folder / "clear_refs").write_text("5")

    @property
    def growth(self) -> int:
        return self._resident("VmHWM") - self.before

    def _resident(self, name: str) -> int:
        lines = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(lines[name].split()[0]) << 10
