"""`python -m helpers.hanging MODULE FLAGS`: a server whose event loop can be blocked from outside, as a call that never returns would.

HANG blocks it, WAKE lets it go on, at the latest after LONGEST_S. Its other threads, gRPC's among them, go on meanwhile: they take
connections and answer pings. Unless ENDING says so it does not end itself before, as servers do: others are to find it.

HOLD stops all of its Python for ever: a call of native code that keeps the lock of the interpreter. Only gRPC's own threads go on. BURN
computes meanwhile, for as long as it may take.

TRIM gives the kernel back what it has freed and keeps for later (host/startup.py). An answer of its event loop after that shows that it is
done.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from omnistage.host import watchdog

HANG, WAKE, HOLD, TRIM, BURN = signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
LONGEST_S = 60.0

ENVIRONMENT: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
"""For a process of this module."""

ENDING: Mapping[str, str] = {**ENVIRONMENT, "OMNISTAGE_TEST_HANG_ENDS": "1"}
"""For one that ends itself when it hangs."""


def hang(number: int, frame: object) -> None:
    """Python runs it in the thread of the event loop."""
    signal.sigtimedwait({WAKE}, LONGEST_S)


def hold(number: int, frame: object) -> None:
    """A function of a PyDLL is called with the lock held, as that of a library is which forgets to give it back."""
    while True:
        ctypes.PyDLL(None).pause()


def burn(number: int, frame: object) -> None:
    """One call of the interpreter's own C, some minutes long."""
    sum(range(1 << 34))


def trim(number: int, frame: object) -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def main() -> None:
    module, *flags = sys.argv[1:]
    # Before there are other threads: one that does not wait for it would end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {WAKE})
    signal.signal(HANG, hang)
    signal.signal(HOLD, hold)
    signal.signal(BURN, burn)
    signal.signal(TRIM, trim)
    if "OMNISTAGE_TEST_HANG_ENDS" not in os.environ:
        watchdog.PATIENCE_S = 2 * LONGEST_S
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
