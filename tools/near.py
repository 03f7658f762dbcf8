"""Chooses the tests nearest to a change, for `make test-near`: as many as take about two minutes, by the cost of each file of tests.

Changed files of tests always run. Next come the files that import a changed module, then those of the same area, the cheapest first. The
files to run go to standard output; the changes and the number of tests that were left out go to standard error."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import typer

from tools.budget import all_files
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


def git(root: Path, *words: str) -> set[str]:
    """The parts of git's output between zero bytes. Raises CalledProcessError; git has said why on standard error."""
    done = subprocess.run(["git", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return {*done.stdout.split("\0")} - {""}


def changed_since(root: Path, base: str) -> set[str]:
    """The files that differ between the working tree and a commit, with new and deleted ones. base: of the commit; empty: where this branch
    left its upstream, or HEAD if it has none. Raises CalledProcessError."""
    has_upstream = subprocess.run(["git", "rev-parse", "@{upstream}"], cwd=root, capture_output=True, check=False).returncode == 0
    revision = [base] if base else ["--merge-base", "@{upstream}"] if has_upstream else ["HEAD"]
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return new | git(root, "diff", "--name-only", "--no-renames", "-z", *revision, "--")


def area_of(file: str, tests: Collection[str]) -> str:
    """The folder of tests for a file: the deepest one all of whose parts are folders of the file."""
    parts = {*file.split("/")[:-1]}
    folders = {test.rpartition("/")[0] for test in tests}
    return max((folder for folder in folders if parts.issuperset(folder.split("/")[1:])), key=len, default=OTHER_AREA)


def import_pattern(file: str) -> str:
    """A pattern of the statements that import a module. A helper of tests is imported from its folder alone."""
    *folders, name = file.removesuffix(".py").removesuffix("/__init__").split("/")
    first = folders.index("omnistage") if "omnistage" in folders else -1
    package = r"\.".join(folders[first:])
    return rf"\b{package}\.{name}\b|from {package} import (?:\([^)]*|[^\n]*)\b{name}\b"


def choose(root: Path, changed: Collection[str], tests: Collection[str], costs: Mapping[str, Cost]) -> tuple[list[str], list[str]]:
    """The files of tests that run, and those near the change for which the budget has no room; files with only long tests are in neither.
    changed: paths of files. tests: paths of all files of tests. costs: by path."""
    others = [file for file in changed if file not in tests]
    areas = {area_of(file, tests) for file in others}
    importers = re.compile("|".join(import_pattern(file) for file in others if file.endswith(".py")) or r"\Z.")  # No text has this one.
    near = []
    for test in tests:
        cost = costs.get(test, UNKNOWN)
        is_changed, is_importer = test in changed, bool(importers.search((root / test).read_text(encoding="utf-8")))
        if cost.form != "long" and (is_changed or is_importer or any(test.startswith(f"{area}/") for area in areas)):
            near.append((not is_changed, not is_importer, cost.wall_s, test))
    chosen, left_out, total = list[str](), list[str](), Cost()
    for is_unchanged, _, _, test in sorted(near):
        cost = costs.get(test, UNKNOWN)
        fits = max((total.cpu_s + cost.cpu_s) / CORES, (total.wall_s + cost.wall_s) / WORKERS) <= BUDGET_S
        if fits or not is_unchanged:
            chosen.append(test)
            total.add(cost)
        else:
            left_out.append(test)
    return chosen, left_out


def main(base: str = "", show: bool = False) -> None:
    """Choose tests and print them. base: the commit to compare with, as in `changed_since`. show: only say what would run. Exit status 1 if
    git cannot find the changes."""
    try:
        changed = changed_since(ROOT, base)
    except subprocess.CalledProcessError:
        sys.exit(1)
    tests = {file for file in all_files(ROOT) if re.fullmatch(r"tests/.*/test_\w+\.py", file)}
    chosen, left_out = choose(ROOT, changed, tests, stored_costs(ROOT))
    for word, files in (("changed", sorted(changed)), ("chosen", chosen), ("left out", left_out)):
        rest = f" and {len(files) - MAX_NAMES} more" if len(files) > MAX_NAMES else ""
        print(f"{word} ({len(files)}): {', '.join(files[:MAX_NAMES])}{rest}", file=sys.stderr)
    if not show:
        print(" ".join(chosen))


if __name__ == "__main__":
    typer.run(main)
