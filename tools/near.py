"""Chooses the tests nearest to a change, for `make test-near`: as many as take about two minutes, by the cost of each file of tests.

Changed files of tests always run. Next come the files that import a changed module, then those of the same area, the cheapest first. The
files to run go to standard output; the changes and the number of tests that were left out go to standard error."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tools.costs import ROOT, UNKNOWN, Cost, stored_costs
from tools.suite import WORKERS

CORES = 2
"""Number of processors in CI, for which the budget is computed."""
BUDGET_S = 100.0
"""Seconds for the chosen tests: two minutes, less the time for choosing and importing them."""
OTHER_AREA = "tests/house"
"""The area of a file whose path names no area: the rules of the house read all files."""
MAX_NAMES = 8
"""Largest number of files that a line names."""


class NearError(Exception):
    """Git cannot list the changes."""


def git(root: Path, *words: str) -> str:
    """The output of git. Raises NearError."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NearError(done.stderr.strip() or f"git {words[0]} failed")
    return done.stdout


def base_of(root: Path) -> str:
    """The commit at which this branch left its upstream; HEAD if it has none."""
    try:
        return git(root, "merge-base", "HEAD", "@{upstream}").strip()
    except NearError:
        return "HEAD"


def changed_since(root: Path, base: str) -> set[str]:
    """The files that differ between the working tree and a commit, with new and deleted ones. Raises NearError."""
    names = [git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")]
    names.append(git(root, "ls-files", "-z", "--others", "--exclude-standard"))
    return {*"\0".join(names).split("\0")} - {""}


def all_files(root: Path) -> set[str]:
    """The files that exist and that git knows or would add."""
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return {file for file in names if file and (root / file).is_file()}


def area_of(file: str, tests: Collection[str]) -> str:
    """The folder of tests for a file: the deepest one whose parts come in this order in the file's path."""
    parts = file.split("/")[:-1]
    folders = {test.rsplit("/", 1)[0] for test in tests}
    fitting = [folder for folder in folders if _is_within(folder.split("/")[1:], parts)]
    return max(fitting, key=len, default=OTHER_AREA)


def _is_within(parts: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a path has these parts in this order."""
    rest = iter(path)
    return bool(parts) and all(part in rest for part in parts)  # `in` goes on where the search for the part before ended.


def importers(root: Path, file: str, tests: Collection[str]) -> set[str]:
    """The files of tests that import a module, or a helper, by its name."""
    words = file.removesuffix(".py").removesuffix("/__init__").split("/")
    first = words.index("omnistage") if "omnistage" in words else -2  # A helper is imported from its folder alone.
    folder, name = ".".join(words[first:-1]), words[-1]
    pattern = re.compile(rf"\b{re.escape(folder)}\.{name}\b|from {re.escape(folder)} import (?:\([^)]*|[^\n]*)\b{name}\b")
    return {test for test in tests if pattern.search((root / test).read_text(encoding="utf-8"))}


def choose(root: Path, changed: Collection[str], tests: Collection[str], costs: Mapping[str, Cost]) -> tuple[list[str], list[str]]:
    """The files of tests that run, and those near the change for which the budget has no room; files with only long tests are in neither.
    changed: paths of files. tests: paths of all files of tests. costs: by path."""
    # 0: a file that changed. 1: it imports a changed module. 2: it is of the same area.
    distances = {test: 0 for test in changed if test in tests}
    for file in sorted({*changed} - distances.keys()):
        for test in importers(root, file, tests) if file.endswith(".py") else ():
            distances.setdefault(test, 1)
        area = area_of(file, tests)
        for test in tests:
            if test.startswith(f"{area}/"):
                distances.setdefault(test, 2)
    chosen, left_out, total = list[str](), list[str](), Cost()
    for test in sorted(distances, key=lambda test: (distances[test], costs.get(test, UNKNOWN).wall_s, test)):
        cost = costs.get(test, UNKNOWN)
        fits = max((total.cpu_s + cost.cpu_s) / CORES, (total.wall_s + cost.wall_s) / WORKERS) <= BUDGET_S
        if cost.form == "long":
            continue
        if fits or distances[test] == 0:
            chosen.append(test)
            total.add(cost)
        else:
            left_out.append(test)
    return chosen, left_out


def _list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    hidden_count = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def main() -> int:
    """Choose tests and print them. Exit status 1 if the changes cannot be found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="the commit to compare with; else where this branch left its upstream, else HEAD")
    parser.add_argument("--show", action="store_true", help="only say what would run")
    arguments = parser.parse_args()
    try:
        base = arguments.base or base_of(ROOT)
        changed = changed_since(ROOT, base)
        tests = {file for file in all_files(ROOT) if re.fullmatch(r"tests/.*/test_\w+\.py", file)}
    except NearError as error:
        print(f"test-near: {error}", file=sys.stderr)
        return 1
    chosen, left_out = choose(ROOT, changed, tests, stored_costs(ROOT))
    print(f"changed since {base[:12]}: {_list_names(sorted(changed)) or 'nothing'}", file=sys.stderr)
    print(f"chosen: {len(chosen)} of {len(tests)} files: {_list_names(chosen)}", file=sys.stderr)
    if left_out:
        print(f"left out: {len(left_out)} files: {_list_names(left_out)}", file=sys.stderr)
    if not arguments.show:
        print(" ".join(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
