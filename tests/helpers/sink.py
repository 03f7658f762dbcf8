"""A loudspeaker that writes down what it plays and when: a program of its own, which plays its standard input in real time, or at another
speed, or does what a broken player does."""

from __future__ import annotations

import argparse
import os
import shlex
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from omnistage.client import Loudspeaker

SAMPLE_BYTES = 4
BLOCK_S = 0.02
BUFFER_S = 0.1
"""So far ahead it takes what it plays, as a device does."""

BLOCK = struct.Struct("=dddq")


@dataclass(frozen=True)
class TakenBlock:
    """The samples that were taken at once. Times are monotonic. late_s: how much later than it wanted the sink was woken for this block."""

    taken_at: float
    starts_at: float
    late_s: float
    samples: int


class Sink:
    """One such loudspeaker. folder: where it writes, new. speed: 2 plays twice as fast as real time, 0 at once."""

    def __init__(self, folder: Path, *options: str, speed: float = 1.0) -> None:
        folder.mkdir()
        self._folder = folder
        # -I -S: nothing but the standard library, so that it is there at once.
        self._words = (sys.executable, "-I", "-S", __file__, str(folder), "{rate}", "{channels}", "--speed", str(speed), *options)

    @property
    def loudspeaker(self) -> Loudspeaker:
        from omnistage.client import Loudspeaker

        return Loudspeaker("sink", self._words)

    @property
    def variable(self) -> str:
        return shlex.join(self._words)

    @property
    def pid(self) -> int:
        """The id of the process that began last; 0 before there is one."""
        written = self._folder / "pid"
        return int(written.read_text()) if written.exists() else 0

    @property
    def rate_hz(self) -> int:
        return int((self._folder / "rate").read_text())

    def samples(self) -> NDArray[np.float32]:
        import numpy as np

        written = self._folder / "sound"
        return np.frombuffer(written.read_bytes() if written.exists() else b"", "<f4")

    def blocks(self) -> Sequence[TakenBlock]:
        written = self._folder / "blocks"
        data = written.read_bytes() if written.exists() else b""
        return [TakenBlock(*fields) for fields in BLOCK.iter_unpack(data[: len(data) // BLOCK.size * BLOCK.size])]

    def played(self, at: float) -> float:
        """Samples that were heard until a moment, if it lived so long."""
        return sum(min(max(at - block.starts_at, 0.0) * self.rate_hz, block.samples) for block in self.blocks())

    def gap_s(self) -> float:
        """Silence between the first sample and the last."""
        blocks = self.blocks()
        ends = [block.starts_at + block.samples / self.rate_hz for block in blocks]
        return sum(after.starts_at - end for end, after in zip(ends, blocks[1:], strict=False))


def play(folder: Path, rate_hz: int, speed: float, dies_after: int | None) -> None:
    """Take a block when the one before is nearly over."""
    clock, rest, taken, late_s = 0.0, b"", 0, 0.0
    with (folder / "sound").open("wb", buffering=0) as sound, (folder / "blocks").open("wb", buffering=0) as blocks:
        while data := os.read(0, max(round(BLOCK_S * rate_hz), 1) * SAMPLE_BYTES if speed else 1 << 20):
            taken_at = time.monotonic()
            whole = len(rest + data) // SAMPLE_BYTES * SAMPLE_BYTES
            data, rest = (rest + data)[:whole], (rest + data)[whole:]
            if not data:
                continue
            count = len(data) // SAMPLE_BYTES
            starts_at = max(clock, taken_at)
            sound.write(data)
            blocks.write(BLOCK.pack(taken_at, starts_at, late_s, count))
            taken += count
            if dies_after is not None and taken >= dies_after:
                sys.exit("sink: the device is gone")
            if speed:
                clock = starts_at + count / rate_hz / speed
                due = clock - BUFFER_S
                time.sleep(max(due - time.monotonic(), 0.0))
                late_s = max(time.monotonic() - due, 0.0)
        time.sleep(max(clock - time.monotonic(), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rate_hz", type=int)
    parser.add_argument("channels", type=int)
    parser.add_argument("--speed", type=float, required=True)
    parser.add_argument("--dies-after", type=int, help="samples")
    parser.add_argument("--deaf", action="store_true", help="never read")
    parser.add_argument("--stays", action="store_true", help="do not end with the sound")
    options = parser.parse_args()
    assert options.channels == 1
    (options.folder / "rate").write_text(str(options.rate_hz))
    pid = options.folder / "pid.new"
    pid.write_text(str(os.getpid()))
    pid.rename(options.folder / "pid")  # whole from its first moment
    if not options.deaf:
        play(options.folder, options.rate_hz, options.speed, options.dies_after)
    if options.deaf or options.stays:
        time.sleep(1000)


if __name__ == "__main__":
    main()
