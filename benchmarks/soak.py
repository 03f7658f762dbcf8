"""`python -m benchmarks.soak`: memory of the default stack in half an hour of questions of all lengths, as benchmarks/out/soak.json and as
a table. Other programs on the machine make the questions fewer, and do not change the memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import Figure, Report, arguments, median, with_children
from benchmarks.use import stack
from omnistage.client import Omni

MINUTES = 30.0
LOOK_S = 5.0
ASKERS = 2
WORDS = [
    "a",
    "river",
    "mountain",
    "king",
    "blue",
    "seven",
    "how",
    "where",
    "music",
    "light",
    "deep",
    "ocean",
    "story",
    "bread",
    "city",
    "old",
    "new",
    "engine",
    "child",
    "garden",
]
PROMPT_WORDS = (3, 8, 20, 60, 200, 600)
ANSWER_TOKENS = (4, 16, 40)
SPOKEN_PART = 0.3
THIRDS = 3
"""The time is measured in three parts. In the first, caches fill and the allocator grows."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    options = parser.parse_args()
    report = Report("soak")
    with report.part("memory"), stack("smol") as (launcher, address, _):
        pids = {_kind(pid): pid for pid in with_children(launcher)[1:]}
        ready = {kind: anonymous_mib(pid) for kind, pid in pids.items()}
        question_count, memory_mib = _soak(address, pids, 60 * options.minutes)
        report.add(Figure("questions", question_count, "", note=f"in {options.minutes:g} minutes, {ASKERS} at once"))
        for kind, sizes in memory_mib.items():
            third = len(sizes) // THIRDS
            middle, last = median(sizes[third:-third]), median(sizes[-third:])
            report.add(
                Figure(f"{kind}_ready", ready[kind], "MiB", note="private memory without a file, when it serves"),
                Figure(f"{kind}_last", last, "MiB", note="median of the last third of the time"),
                Figure(f"{kind}_last_over_middle", last / middle, "ratio", "<= 1.1"),
            )
    return report.finish(judge=not options.report)


def anonymous_mib(pid: int) -> float:
    """Memory of a process that no file backs, in MiB (proc(5), smaps_rollup, Anonymous)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def _kind(pid: int) -> str:
    """The kind of a server, such as thinker or router, from its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next(word.removeprefix("omnistage.") for word in words if word.startswith("omnistage."))


def _soak(address: str, pids: dict[str, int], seconds: float) -> tuple[int, dict[str, list[float]]]:
    """Ask questions for `seconds`; returns how many were answered, and the memory of each process in MiB, once every LOOK_S."""
    end = time.monotonic() + seconds
    counts = [0] * ASKERS
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            with Omni(address=address, max_retries=0) as omni:
                _ask_until(omni, random.Random(number), lambda: time.monotonic() < end, counts, number)
        except BaseException as error:  # The main thread raises it.
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(ASKERS)]
    for thread in threads:
        thread.start()
    memory_mib: dict[str, list[float]] = {kind: [] for kind in pids}
    while time.monotonic() < end and not failures:
        for kind, pid in pids.items():
            memory_mib[kind].append(anonymous_mib(pid))
        time.sleep(LOOK_S)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts), memory_mib


def _ask_until(omni: Omni, chance: random.Random, is_time: Callable[[], bool], counts: list[int], number: int) -> None:
    """Ask random questions while `is_time()`; counts those answered in counts[number]."""
    while is_time():
        prompt = "Tell me about " + " ".join(chance.choices(WORDS, k=chance.choice(PROMPT_WORDS)))
        outputs = ["text", "audio"] if chance.random() < SPOKEN_PART else ["text"]
        omni.generate(prompt, max_tokens=chance.choice(ANSWER_TOKENS), outputs=outputs)
        counts[number] += 1


if __name__ == "__main__":
    raise SystemExit(main())
