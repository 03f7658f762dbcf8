"""`python -m tools.recording OUT.json` records the observable behaviour of the program: commands, HTTP, Python calls, settings, refusals.
`python -m tools.recording --compare A.json B.json` prints each difference of two recordings and exits with 1 if there are any.

The program runs as processes, on toys. Nothing of it is imported here except the public names of the client and the stubs of the contract,
each in a process of its own, so that a recording can be made of any checkout: `--tree DIR`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.recording import commands, web
from tools.recording.stack import ROOT, Recording, read_table, serve_toys

QUOTE = r'\\*"'


class Normal:
    """Removes from a recording what differs between two runs of the same program; `normal.yaml` is the list. Before that, folders and
    addresses of the recording are replaced by their names. places: these names, by the folder or address that each replaces."""

    def __init__(self, places: Mapping[str, str]) -> None:
        rules = read_table("normal.yaml")
        long_first = sorted(places, key=len, reverse=True)
        self._table = [(re.compile(re.escape(place)), places[place].replace("\\", r"\\")) for place in long_first]
        for pattern, replacement in rules["table"]:
            self._table.append((re.compile(pattern.replace("{quote}", QUOTE).replace("{times}", rules["times"])), replacement))

    def of(self, result: Any) -> Any:
        """The result without what differs from run to run."""
        text = json.dumps(result, ensure_ascii=False, sort_keys=True)
        for pattern, replacement in self._table:
            text = pattern.sub(replacement, text)
        return json.loads(text)


SECTIONS: Mapping[str, Callable[[Recording], Mapping[str, Any]]] = {
    "commands": commands.record,
    "configs": commands.record_configs,
    "http": web.record,
    "python": lambda recording: recording.run_module("tools.recording.python_calls"),
    "refusals": lambda recording: recording.run_module("tools.recording.refusals"),
}
"""By the name of a section, the function that makes its results, by case."""


def record(tree: Path, sections: list[str]) -> dict[str, dict[str, Any]]:
    """The results of all cases of these sections, by section and case."""
    recorded: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="recording-") as folder, serve_toys(tree, Path(folder).resolve()) as recording:
        normal = Normal(recording.places)
        for section in sections:
            begin_s = time.monotonic()
            results = SECTIONS[section](recording)
            recorded[section] = {case: normal.of(result) for case, result in results.items()}
            print(f"{section}: {len(results)} cases, {time.monotonic() - begin_s:.0f} s", flush=True)
    return recorded


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """For each case that differs, a text that shows its lines in both recordings."""
    for section in sorted(before.keys() | after.keys()):
        ours, theirs = before.get(section, {}), after.get(section, {})
        for case in sorted(ours.keys() | theirs.keys()):
            if (case in ours, ours.get(case)) != (case in theirs, theirs.get(case)):
                lines = difflib.unified_diff(_lines(ours, case), _lines(theirs, case), "before", "after", n=2, lineterm="")
                yield "\n".join([f"== {section}: {case}", *lines])


def _lines(results: Mapping[str, Any], case: str) -> list[str]:
    """The lines of a result as JSON; none if there is no such case."""
    return json.dumps(results[case], indent=1, ensure_ascii=False).split("\n") if case in results else []


def main() -> int:
    """Record, or compare two recordings. Exit status 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="the file of the recording")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose program is recorded (default: this one)")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="a section; repeatable (default: all)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two recordings")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in options.compare)
        texts = [*differences(before, after)]
        print("\n".join([*texts, f"{len(texts)} cases differ"]))
        return 1 if texts else 0
    if options.out is None:
        parser.error("name the file of the recording, or two with --compare")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the stack is ended then, too.
    recorded = record(options.tree.resolve(), options.only or list(SECTIONS))
    options.out.write_text(json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
