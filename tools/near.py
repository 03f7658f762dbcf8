"""Chooses the tests nearest to a change, for `make test-near`: as many as take about two minutes, by the cost of each file of tests.

The files to run go to standard output; the changes and the tests that were left out go to standard error."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tools.costs import ROOT, UNKNOWN, Cost, stored_costs
from tools.reach import Reached, area, graph, is_test
from tools.suite import WITHOUT_TORCH, WORKERS

DRILLS = ("tests/system/", "tests/hostile/")

CORES = 2
"""Number of processors in CI, for which the budgets are computed."""

BUDGET_S = 100.0
"""Seconds for the chosen tests: two minutes, less the time for choosing and importing them."""
DRILLS_BUDGET_S = 40.0
"""Seconds for the drills among the chosen tests, as a part of BUDGET_S."""

SHOWN = 8
"""Largest number of files that a line names."""


class NearError(Exception):
    """Git cannot list the changes."""


@dataclass
class ChoiceOfTests:
    """The files of tests that run (`chosen`), that have no room (`left_out`), and that have only long tests (`long`), the nearest first.
    costs: by file."""

    costs: Mapping[str, Cost]
    chosen: list[Reached] = field(default_factory=list)
    left_out: list[Reached] = field(default_factory=list)
    long: list[Reached] = field(default_factory=list)

    def cost(self, one: Reached) -> Cost:
        """The cost of a file, by the last measurement; an assumed one if there is none."""
        return self.costs.get(one.test, UNKNOWN)

    def is_long(self, one: Reached) -> bool:
        """Whether a file has only long tests, by the last measurement."""
        return self.cost(one).form == "long"

    def seconds(self, some: Iterable[Reached]) -> float:
        """Seconds that these files take as `make test` runs them: files without torch one after the other, and at the same time the others
        by several workers."""
        light, heavy = 0.0, Cost()
        for one in some:
            cost = self.cost(one)
            light += cost.wall_s if area(one.test) in WITHOUT_TORCH else 0.0
            heavy.add(cost if area(one.test) not in WITHOUT_TORCH else Cost(cost.cpu_s))  # The two groups share the processors.
        return max(heavy.cpu_s / CORES, heavy.wall_s / WORKERS, light)

    def tests(self, some: Iterable[Reached]) -> int:
        """The number of tests in these files."""
        return sum(self.cost(one).tests for one in some)

    def fits(self, one: Reached) -> bool:
        """Whether the budgets have room for this file and the chosen ones together."""
        with_it = [*self.chosen, one]
        drills = [other for other in with_it if is_drill(other)] if is_drill(one) else []
        return self.seconds(with_it) <= BUDGET_S and self.seconds(drills) <= DRILLS_BUDGET_S


def is_drill(one: Reached) -> bool:
    """Whether a file of tests breaks or fills a whole system."""
    return one.test.startswith(DRILLS)


def choose(reached: Collection[Reached], costs: Mapping[str, Cost]) -> ChoiceOfTests:
    """Choose the nearest of the reached files, as many as the budgets hold. Among equally near files the tests of the part that changed
    come first, then the cheapest. Tests that changed themselves always run."""
    choice = ChoiceOfTests(costs)
    for one in sorted(reached, key=lambda one: (one.distance, not one.is_at_home, choice.seconds([one]), one.test)):
        group = choice.chosen if one.distance == 0 or choice.fits(one) else choice.left_out
        (choice.long if choice.is_long(one) else group).append(one)
    return choice


# Changes -------------------------------------------------------------------------------------------------------------------------------


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


def changed_since(root: Path, base: str) -> tuple[set[str], set[str]]:
    """The files that differ between the working tree and a commit, new ones included, and the files that are gone. Raises NearError."""
    words = git(root, "diff", "--name-status", "--no-renames", "-z", base, "--").split("\0")
    states = dict(zip(words[1::2], words[::2], strict=False))
    untracked = {*git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")} - {""}
    gone = {file for file, state in states.items() if state == "D"} - untracked
    return (states.keys() | untracked) - gone, gone


def all_files(root: Path) -> set[str]:
    """The files that exist and that git knows or would add."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return {file for file in listed if file and (root / file).is_file()}


# Report --------------------------------------------------------------------------------------------------------------------------------


def report(
    base: str, changed: Collection[str], reached_by: Mapping[str, int], choice: ChoiceOfTests, all_tests: Collection[Reached]
) -> list[str]:
    """Lines for people. changed: files that differ from the commit `base`. reached_by: by changed file, how many files of tests it reaches.
    all_tests: all such files."""
    if not changed:
        return [f"nothing changed since {base[:12]}"]
    lines = [f"changed since {base[:12]}: {_list_names(sorted(changed))}"]
    if not choice.chosen and not choice.left_out and not choice.long:
        return [*lines, "no test is reached"]
    if lonely := sorted(file for file in changed if not reached_by.get(file)):
        lines.append(f"no test reaches: {_list_names(lonely)}")
    lines.append(
        f"chosen: {len(choice.chosen)} of {len(all_tests)} files, {choice.tests(choice.chosen)} of {choice.tests(all_tests)} tests, "
        f"about {choice.seconds(choice.chosen):.0f} s"
    )
    for distance, group in groupby(choice.chosen, key=lambda one: one.distance):
        files = [*group]
        distance_text = "changed themselves, and run whatever they cost" if distance == 0 else f"{distance} away"
        lines.append(f"  {distance_text}: {_list_names([one.test for one in files])}, {choice.seconds(files):.0f} s")
    if choice.left_out:
        names = [f"{one.test} ({one.distance})" for one in choice.left_out]
        lines.append(
            f"left out: {len(names)} files, {choice.tests(choice.left_out)} tests, about {choice.seconds(choice.left_out):.0f} s; "
            f"the nearest: {_list_names(names)}"
        )
    if changed_long := [one.test for one in choice.long if one.distance == 0]:
        lines.append(f'changed, with long tests alone: make test-long ARGS="{" ".join(changed_long)}"')
    return lines


def _list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    hidden_count = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def main() -> int:
    """Choose tests and print them. Exit status 1 if the changes, or the tests that they reach, cannot be found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="the commit to compare with; else where this branch left its upstream, else HEAD")
    parser.add_argument("--show", action="store_true", help="say how each test is reached, and choose nothing to run")
    arguments = parser.parse_args()
    try:
        base = arguments.base or base_of(ROOT)
        present, gone = changed_since(ROOT, base)
        files = all_files(ROOT)
        edges = graph(ROOT, files, gone)
        costs = stored_costs(ROOT)
    except NearError as error:
        print(f"test-near: {error}", file=sys.stderr)
        return 1
    except SyntaxError as error:
        print(f"test-near: {error.filename}, line {error.lineno}: {error.msg}", file=sys.stderr)
        return 1
    changed = {*present, *gone}
    all_tests = [Reached(file, 0) for file in files if is_test(file)]
    choice = choose([one for one in edges.find_reached(changed) if one.test not in gone], costs)
    reached_by = {file: len(edges.find_reached([file])) for file in changed}
    print("\n".join(report(base, changed, reached_by, choice, all_tests)), file=sys.stderr)
    if arguments.show:
        for one in choice.chosen:
            print(f"{one.distance} {one.test}: {' > '.join(one.path)}", file=sys.stderr)
    else:
        print(" ".join(one.test for one in choice.chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
