"""Prints the cost of each file of tests in the last run, dearest first; with `--write` it stores the table in the repository.

`tests/costs.json` is the stored table: by it files are divided among the parts of a run, workers begin with the dearest files, and
`make test-near` chooses. The row RUN has the processor time that belongs to no file: collecting tests, importing modules, and processes
that a fixture of the whole session starts.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "costs.json"
LAST = ROOT / "build" / "tests" / "costs.json"
"""The file with the table of the last run."""
RUN = "run"
"""The key of the row for everything that belongs to no file. Only a run of whole files has it; parts of files would cost less."""
PART = "part"
"""The form of a cost that is too small for its file."""


@dataclass
class Cost:
    """Cost of one file of tests, or of several. cpu_s: processor time in seconds, of the tests and of all their child processes that ended
    meanwhile. wall_s: seconds on the clock. tests: how many ran. processes: how many the tests started. form: of the run in which they were
    measured, a key of FORMS in tools/suite.py; PART if the run left out tests of the file that another run draws."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    tests: int = 0
    processes: int = 0
    form: str = "short"

    def add(self, other: Cost) -> None:
        """Add another cost."""
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s
        self.tests += other.tests
        self.processes += other.processes
        if other.form == PART:
            self.form = PART


UNKNOWN = Cost(5.0, 5.0, 1)
"""Assumed cost of a file that was never measured."""

Costs = dict[str, Cost]
"""Costs by the path of the file, from the root of the repository."""


class CostsError(Exception):
    """A table cannot be read or written; the text says what to do."""


def read(path: Path) -> Costs:
    """The table in a file; empty if there is no file. Raises CostsError."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CostsError(f"{path} is no table: {error}") from None
    return {file: Cost(**cost) for file, cost in table.items()}


def stored_costs(root: Path) -> Costs:
    """The stored table of the tree of this root; empty if it cannot be read, because a merge may have left its marks there."""
    try:
        return read(root / TABLE.relative_to(ROOT))
    except CostsError:
        return {}


def text_of(costs: Mapping[str, Cost]) -> str:
    """The table as JSON, a line for each file, so that a diff shows each change."""
    lines = [f"{json.dumps(file)}: {json.dumps(_row(cost))}" for file, cost in sorted(costs.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(cost: Cost) -> dict[str, object]:
    """The fields of a row, with seconds to a tenth."""
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(cost).items()}


def renew(table: Mapping[str, Cost], last: Mapping[str, Cost]) -> Costs:
    """The table with the measurements of the last run instead of older ones, without files that no longer exist. A new row replaces an
    older one only if it says as much about a short run, see `_rank`. table: the older table. last: the table of a whole run."""
    if last.get(RUN, Cost()).form == "short":  # A file without a row in the table of a short run has only long tests by now.
        table = {file: cost if file in last else replace(cost, form="long") for file, cost in table.items()}
    newer = {file: cost for file, cost in last.items() if _rank(cost) >= _rank(table.get(file, cost))}
    return {file: cost for file, cost in {**table, **newer}.items() if file == RUN or (ROOT / file).is_file()}


def _rank(cost: Cost) -> int:
    """Which of two costs of a file says more about a short run: the larger number does."""
    return ("long", PART, "short").index(cost.form)


def table_text(costs: Mapping[str, Cost]) -> str:
    """The table for people: a line for each file, dearest first, and then the sums of each folder and of all, by form."""
    folders: dict[tuple[str, str], Cost] = {}  # By name and form.
    for file, cost in costs.items():
        form = "short" if cost.form == PART else cost.form
        for name in ("all", file.rpartition("/")[0] or file):
            folders.setdefault((name, form), Cost(form=form)).add(replace(cost, form=form))
    rows = ([*costs.items()], [(name, cost) for (name, _), cost in folders.items()])
    by_cost = [sorted(part, key=lambda row: -row[1].cpu_s) for part in rows]
    head = f"{'cpu s':>8} {'wall s':>8} {'tests':>6} {'processes':>10}  form"
    return "\n\n".join("\n".join([head, *(line_of(name, cost) for name, cost in part)]) for part in by_cost)


def line_of(name: str, cost: Cost) -> str:
    """One row of the table."""
    return f"{cost.cpu_s:8.1f} {cost.wall_s:8.1f} {cost.tests:6d} {cost.processes:10d} {cost.form:>5}  {name}"


def store() -> None:
    """Put the measurements of the last run into the table of the repository. Raises CostsError."""
    if RUN not in (last := read(LAST)):
        raise CostsError("the last run was not of whole files: run `make test` or `make test-long` without words for pytest first")
    TABLE.write_text(text_of(renew(read(TABLE), last)), encoding="utf-8")


def main(write: bool = False) -> None:
    """Print the table. write: make the last run's table that of the repository, tests/costs.json. Exit status 1 if that fails."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # If `head` reads the output and ends early, this ends without an error.
    try:
        if write:
            store()
        else:
            print(table_text(read(LAST) or read(TABLE)))
    except CostsError as error:
        sys.exit(f"costs: {error}")


if __name__ == "__main__":
    typer.run(main)
