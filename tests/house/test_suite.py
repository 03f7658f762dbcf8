"""The runner of tests: a test that fails once is flaky, one that fails twice has failed, with the same random numbers; it records the cost
of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers import command, lengths
from helpers.outcomes import CostMeter
from tools import costs
from tools.costs import ROOT, Cost
from tools.suite import FailedTest, RunResult, Suite, defects, end_parts

SETTINGS = f"""
[tool.pytest.ini_options]
addopts = "-p xdist -p _hypothesis_pytestplugin --import-mode=importlib -m 'not long'"
pythonpath = ["{ROOT / "tests"}", "{ROOT}"]
markers = ["long", "serial", "tooling"]
"""
"""Settings like those of this repository, for a tree of its own, without the plugins that it does not need."""

PLUGINS = 'pytest_plugins = ("helpers.collection", "helpers.outcomes", "helpers.randomness")'

GOOD = """
import pytest

def test_good(): pass

@pytest.mark.serial
def test_that_wants_the_machine_alone(): pass
"""

FLAKY = """
from pathlib import Path

def test_that_fails_the_first_time():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError("bad luck")
"""

DRAWN = """
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from helpers import lengths

@pytest.fixture(scope="module")
def drawn():
    return random.random()

def note(name, value):
    with Path(__file__).with_name(name).open("a") as file:
        print(value, file=file)

CELLS = [str(number) for number in range(1000)]

@lengths.one_or_all("cell", CELLS)
def test_of_a_drawn_cell(cell, seed, drawn):
    note("cells", (lengths.draw(cell, CELLS, seed), seed, drawn, random.random()))
    raise ValueError("a defect of this cell")

@settings(database=None)
@given(strategies.integers())
def test_of_drawn_values(value):
    note("values", value)
    assert value < 1000
"""

FIXTURE = """
import pytest

@pytest.fixture(scope="module")
def broken():
    raise OSError("no such server")

@pytest.mark.parametrize("number", range(9))
def test_with_it(broken, number): pass
"""


LIGHT = ("good", "light")
"""Tests of these names import no torch."""


def write(tree: Path, files: Mapping[str, str]) -> None:
    """Write a tree of these tests, by name."""
    tests = tree / "tests"
    for folder in ("link", "engine"):
        (tests / folder).mkdir(parents=True)
    (tests / "conftest.py").write_text(PLUGINS)
    (tree / "pyproject.toml").write_text(SETTINGS)
    for name, text in files.items():
        folder = "link" if name in LIGHT else "engine"
        (tests / folder / f"test_{name}.py").write_text(text)


def run(tree: Path, *words: str, **files: str) -> tuple[int, list[str]]:
    """Run the suite in a tree of these tests. Returns its exit status, and the lines that it printed."""
    write(tree, files)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "OMNISTAGE"))}
    command = [sys.executable, "-m", "tools.suite", f"--root={tree}", *words]
    (temporary := tree / "tmp").mkdir()
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100, check=False)
    return done.returncode, done.stdout.decode(errors="replace").splitlines()


@lengths.TOOLING
def test_what_passes_the_second_time_is_flaky_and_costs_nothing(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "--again", good=GOOD, flaky=FLAKY)
    assert (status, printed[-1]) == (0, "3 passed, 0 failed"), printed
    (flaky,) = [line for line in printed if line.startswith("flaky: ")]
    seed = (tmp_path / "build" / "tests" / "seed").read_text().strip()
    assert flaky == f"flaky: tests/engine/test_flaky.py::test_that_fails_the_first_time, seed {seed}, ValueError: bad luck"
    assert [*tmp_path.glob("tmp/ot-*")] == []
    table = costs.read(tmp_path / "build" / "tests" / "costs.json")
    assert table.keys() == {"tests/link/test_good.py", "tests/engine/test_flaky.py", costs.RUN}
    assert table[costs.RUN].cpu_s > 0 and {cost.form for cost in table.values()} == {"short"}


@lengths.TOOLING
def test_what_a_draw_found_fails_again_and_a_fixture_counts_once(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "--again", good=GOOD, drawn=DRAWN, fixture=FIXTURE)
    assert (status, printed[-1]) == (1, "2 passed, 11 failed"), printed
    assert not [line for line in printed if line.startswith(("flaky", "broken"))]
    assert "again, with the same seed: 11 tests, 3 defects" in printed
    first, second = (tmp_path / "tests" / "engine" / "cells").read_text().splitlines()
    assert first == second
    values = (tmp_path / "tests" / "engine" / "values").read_text().splitlines()
    assert values[: len(values) // 2] == values[len(values) // 2 :]


@lengths.TOOLING
def test_nothing_is_run_again_where_nothing_failed_and_a_part_that_does_not_end_is_told(tmp_path: Path) -> None:
    good, broken = tmp_path / "good", tmp_path / "broken"
    status, printed = run(good, "--again", good=GOOD)
    assert (status, printed[-1]) == (0, "2 passed, 0 failed"), printed
    assert not (good / "build" / "tests" / "again.json").exists()
    status, printed = run(broken, "--again", good="import os\ndef test_it(): os._exit(3)")
    assert (status, printed[-2:]) == (1, ["broken: without torch", "0 passed, 0 failed"]), printed


NOTES = """
from pathlib import Path

def test_one():
    with Path(__file__).with_name("ran").open("a") as file:
        file.write("x")
"""


@lengths.TOOLING
@pytest.mark.parametrize("named", ["tests/engine/test_notes.py", "tests/engine", "tests/engine/test_notes.py::test_one"])
def test_what_is_named_runs_once(tmp_path: Path, named: str) -> None:
    """A named test does not run again in each of the parts."""
    _, printed = run(tmp_path, named, good=GOOD, notes=NOTES)
    assert printed[-1] == "1 passed, 0 failed", printed
    assert (tmp_path / "tests" / "engine" / "ran").read_text() == "x"


@lengths.TOOLING
def test_a_run_without_any_test_has_failed(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "-m", "tooling", good=GOOD, notes=NOTES)
    assert (status, printed[-1]) == (1, "0 passed, 0 failed") and printed[-2].startswith("no test ran"), printed
    status, printed = run(tmp_path / "skipped", notes="import pytest\n@pytest.mark.skip\ndef test_it(): pass")
    assert (status, printed[-1]) == (0, "0 passed, 0 failed"), printed


@lengths.TOOLING
def test_a_failed_run_leaves_its_files_until_the_next_one(tmp_path: Path) -> None:
    """Each part has a folder of its own: parts that share one would remove old files in it at the same time."""
    run(tmp_path, good=GOOD, notes="def test_it(): raise ValueError")
    assert len([*tmp_path.glob("tmp/ot-*/*")]) == 3
    suite = Suite(tmp_path, "short", "1", "", ())
    suite.begin()
    assert [*tmp_path.glob("tmp/ot-*")] == []
    suite.tidy()


@pytest.mark.parametrize(("handler", "status"), [("signal.SIG_DFL", -signal.SIGINT), ("signal.SIG_IGN", -signal.SIGKILL)])
def test_an_interrupted_part_has_ended_before_the_run_ends(monkeypatch: pytest.MonkeyPatch, handler: str, status: int) -> None:
    monkeypatch.setattr("tools.suite.END_S", 2.0)
    program = f"import signal, time; signal.signal(signal.SIGINT, {handler}); print('ready', flush=True); time.sleep(1000)"
    parts = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    for part in parts:
        assert part.stdout is not None
        with part.stdout:
            part.stdout.readline()
    assert end_parts(parts) == [status, status]


@lengths.TOOLING
def test_marks_that_are_asked_for_count_beside_those_of_the_parts(tmp_path: Path) -> None:
    _, printed = run(tmp_path, "-m", "not tooling", good=GOOD, notes=NOTES)
    assert printed[-1] == "3 passed, 0 failed", printed
    assert (tmp_path / "tests" / "engine" / "ran").read_text() == "x"


@lengths.TOOLING
def test_a_file_that_cannot_be_imported_is_told_with_the_reason_and_its_costs_are_no_table(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "--again", good=GOOD, notes="import absent_package")
    assert status == 1
    (told,) = [line for line in printed if line.startswith("failed: ")]
    assert "tests/engine/test_notes.py" in told and "absent_package" in told
    assert costs.RUN not in costs.read(tmp_path / "build" / "tests" / "costs.json")


@lengths.TOOLING
def test_a_serial_test_whose_file_does_not_say_so_would_be_lost(tmp_path: Path) -> None:
    lost = "import pytest\nALONE = getattr(pytest.mark, 'serial')\n@ALONE\ndef test_it(): pass"
    status, printed = run(tmp_path, good=GOOD, lost=lost)
    assert status == 1
    assert "broken: with torch, 1 tests did not run, the first of them tests/engine/test_lost.py::test_it" in printed


OTHERS = "import numpy\ndef test_it(): raise ValueError(numpy.__version__)"


@lengths.TOOLING
def test_a_draw_does_not_depend_on_what_others_import(tmp_path: Path) -> None:
    """When it runs again, a test without torch stands beside others."""
    status, printed = run(tmp_path, "--again", light=DRAWN, others=OTHERS)
    assert (status, printed[-1]) == (1, "0 passed, 3 failed"), printed
    first, second = (tmp_path / "tests" / "link" / "cells").read_text().splitlines()
    assert first == second


CRASHES = """
import os

def test_that_ends_its_worker():
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(3)

def test_behind_it(): pass
"""


@lengths.TOOLING
def test_a_process_that_crashed_is_no_bad_luck_and_what_it_left_out_is_told(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "--again", good=GOOD, crashes=CRASHES)
    assert status == 1 and not [line for line in printed if line.startswith("flaky: ")], printed
    assert [line for line in printed if line.startswith(("failed: ", "broken: "))], printed


@lengths.TOOLING
def test_more_than_three_that_are_flaky_have_failed(tmp_path: Path) -> None:
    one = FLAKY.replace("ValueError", "OSError")
    status, printed = run(
        tmp_path, "--again", good=GOOD, **{f"flaky{number}": one.replace('"seen"', f'"seen{number}"') for number in range(4)}
    )
    assert (status, printed[-2:]) == (1, ["failed: more than 3 were flaky", "6 passed, 0 failed"]), printed


@lengths.TOOLING
def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('number', range(13))\ndef test_it(number): raise ValueError(number)"
    status, printed = run(tmp_path, "--again", good=GOOD, many=many)
    assert (status, printed[-1]) == (1, "2 passed, 13 failed"), printed
    assert not [line for line in printed if line.startswith("again")]


LEAVES_WRONG = """
import sys

import pytest

@pytest.fixture
def leaving():
    yield
    raise OSError("does not go")

@pytest.mark.parametrize("number", range(4))
def test_it(leaving, number):
    sys.stdout.buffer.write(b"\\xff")
"""


@lengths.TOOLING
def test_what_fails_at_its_end_has_not_passed_and_counts_once(tmp_path: Path) -> None:
    """The test may print any bytes."""
    status, printed = run(tmp_path, "--again", "-s", light=LEAVES_WRONG)
    assert (status, printed[-1]) == (1, "0 passed, 4 failed"), printed
    assert "again, with the same seed: 4 tests, 1 defects" in printed


@lengths.TOOLING
def test_what_light_tests_print_is_shown_and_only_a_whole_run_that_passed_makes_a_table(tmp_path: Path) -> None:
    _, printed = run(tmp_path / "light", light="def test_it(): raise ValueError('seen by whoever looks')", notes=NOTES)
    assert [line for line in printed if "seen by whoever looks" in line]
    assert costs.RUN not in costs.read(tmp_path / "light" / "build" / "tests" / "costs.json")
    run(tmp_path / "good", good=GOOD, notes=NOTES)
    assert costs.RUN in costs.read(tmp_path / "good" / "build" / "tests" / "costs.json")


def test_of_several_drawn_cells_none_is_the_same(seed: int) -> None:
    cells = [str(number) for number in range(4)]
    assert {lengths.draw_of(f"{lengths.DRAWN}{number}", cells, 4, str(seed)) for number in range(4)} == {*cells}


def test_what_a_forked_program_needs_is_in_the_costs() -> None:
    meter = CostMeter()
    before = meter._now()
    assert command.omnistage("pipelines").returncode == 0
    after = meter._now()
    assert after.processes > before.processes and after.cpu_s - before.cpu_s > 0.01


def test_tests_that_fail_by_one_fixture_are_one_defect() -> None:
    failed = {f"a{number}": FailedTest("setup", "tests/x.py::server[0]", "OSError") for number in range(9)}
    assert defects(failed) == 1
    failed |= {"b": FailedTest("setup", "tests/x.py::server[1]", "OSError"), "c": FailedTest("call", "", "AssertionError")}
    assert defects(failed) == 3


STILL = """
import signal, time

def test_that_stands_still():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    time.sleep(3600)
"""


@lengths.TOOLING
def test_a_part_that_stands_still_is_ended_and_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"light": STILL, "good": GOOD})
    monkeypatch.setattr("tools.suite.STALL_LIMIT_S", 40.0)  # Far more than a worker needs to start.
    monkeypatch.setattr("tools.suite.END_S", 2.0)
    for name in [name for name in os.environ if name.startswith(("PYTEST", "OMNISTAGE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    suite = Suite(tmp_path, "short", "1", "", ())
    suite.begin()
    ended = suite.run()
    assert [part for part in ended.incomplete_parts if part.startswith("without torch")] == ended.incomplete_parts != []
    printed = capsys.readouterr().out
    assert "without torch: no test has ended for" in printed and "in test_that_stands_still" in printed
    suite.tidy()


@lengths.TOOLING
def test_of_the_tests_of_tools_one_file_is_drawn_unless_files_are_named(tmp_path: Path) -> None:
    one = (
        "from helpers import lengths\nfrom pathlib import Path\n@lengths.TOOLING\ndef test_it(): Path(__file__).with_suffix('.ran').touch()"
    )
    many = dict.fromkeys(("a", "b", "c", "light"), one)
    for words, count in (((), 1), (("--form", "long"), 4), (("tests/engine/test_a.py", "tests/engine/test_b.py"), 2)):
        tree = tmp_path / str(count)
        _, printed = run(tree, *words, **many)
        assert (printed[-1], len([*tree.glob("tests/*/*.ran")])) == (f"{count} passed, 0 failed", count), printed


@lengths.TOOLING
def test_a_test_that_is_named_with_its_cell_runs_whatever_is_drawn(tmp_path: Path) -> None:
    cells = "from helpers import lengths\n@lengths.drawn_cells(1, 'letter', ['a', 'b', 'c'])\ndef test_it(letter): pass"
    for letter in "abc":
        _, printed = run(tmp_path / letter, f"tests/engine/test_cells.py::test_it[{letter}]", cells=cells)
        assert printed[-1] == "1 passed, 0 failed", printed


def test_costs_of_two_parts_are_added() -> None:
    ended = RunResult(costs={"a": Cost(1.0, 2.0, 3, 4)})
    ended.add(RunResult(costs={"a": Cost(1.0, 1.0, 1, 1), "b": Cost(5.0), "c": Cost(form="part")}))
    assert ended.costs == {"a": Cost(2.0, 3.0, 4, 5), "b": Cost(5.0), "c": Cost(form="part")}


def test_the_table_of_the_repository_has_all_files_of_tests_but_a_few_new_ones_and_none_that_is_gone() -> None:
    """A file that was never measured is put in the wrong place of a run, and of the two minutes of `make test-near`."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("**/test_*.py")}
    measured = costs.read(costs.TABLE).keys() - {costs.RUN}
    assert measured - files == set()
    assert len(files - measured) <= 5, "write the table anew: make test, then make test-costs ARGS=--write"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = {"b.py": Cost(2.25, 1.0, 2, 0), "a.py": Cost(10.0, 20.0, 5, 3)}
    (tmp_path / "costs.json").write_text(costs.text_of(table))
    assert costs.read(tmp_path / "costs.json") == {"a.py": Cost(10.0, 20.0, 5, 3), "b.py": Cost(2.2, 1.0, 2, 0)}
    lines = costs.table_text(table).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["a.py", "b.py"]


def test_sums_are_told_by_form() -> None:
    table = {"a/b.py": Cost(2.0), "a/c.py": Cost(4.0, form="long"), "a/d.py": Cost(1.0, form="part"), costs.RUN: Cost(0.5)}
    *_, sums = costs.table_text(table).split("\n\n")
    assert [line.split()[0::4] for line in sums.splitlines()[1:] if line.endswith("  all")] == [["4.0", "long"], ["3.5", "short"]]


def test_only_a_whole_run_becomes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(costs, "LAST", tmp_path / "last.json")
    here = Path(__file__).relative_to(ROOT).as_posix()
    other = "tests/house/test_budget.py"
    costs.TABLE.write_text(costs.text_of({"tests/gone.py": Cost(1.0), here: Cost(1.0), other: Cost(9.0)}))
    costs.LAST.write_text(costs.text_of({here: Cost(3.0)}))
    with pytest.raises(costs.CostsError, match="make test"):
        costs.store()
    costs.LAST.write_text(costs.text_of({here: Cost(3.0), other: Cost(0.1, form="part"), costs.RUN: Cost(2.0)}))
    costs.store()
    assert costs.read(costs.TABLE) == {here: Cost(3.0), other: Cost(9.0), costs.RUN: Cost(2.0)}


def test_a_file_that_a_whole_short_run_leaves_out_has_long_tests_alone() -> None:
    here, other = (path.relative_to(ROOT).as_posix() for path in sorted(Path(__file__).parent.glob("test_*.py"))[:2])
    table = costs.renew({here: Cost(8.0), other: Cost(1.0)}, {other: Cost(2.0), costs.RUN: Cost(5.0)})
    assert table == {here: Cost(8.0, form="long"), other: Cost(2.0), costs.RUN: Cost(5.0)}
    assert costs.renew(table, {here: Cost(9.0, form="long"), costs.RUN: Cost(7.0, form="long")})[here] == Cost(9.0, form="long")
    assert costs.renew(table, {here: Cost(0.5), costs.RUN: Cost(5.0)})[here] == Cost(0.5)
