"""The choice of `make test-near`: which files of tests are near a change, and how many of them fit into two minutes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import near
from tools.budget import all_files
from tools.costs import Cost
from tools.near import BUDGET_S, area_of, choose, import_pattern
from tools.suite import WORKERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tests() -> set[str]:
    return {file for file in all_files(ROOT) if file.startswith("tests/") and "/test_" in file}


@pytest.mark.parametrize(
    ("file", "area"),
    [
        ("sdk/omnistage/client/omni.py", "tests/client"),
        ("services/stage/omnistage/stage/session.py", "tests/stage"),
        ("models/omnistage/models/diffusers/wan.py", "tests/models/diffusers"),
        ("models/omnistage/models/registry.py", "tests/models"),
        ("docs/models.md", "tests/house"),
    ],
)
def test_the_area_is_the_deepest_folder_of_tests_that_the_path_names(file: str, area: str, tests: set[str]) -> None:
    assert area_of(file, tests) == area


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("engine/omnistage/engine/scheduler.py", "from omnistage.engine.scheduler import Scheduler"),
        ("engine/omnistage/engine/scheduler.py", "from omnistage.engine import (\n    pages,\n    scheduler,\n)"),
        ("engine/omnistage/engine/scheduler.py", "import omnistage.engine.scheduler"),
        ("models/omnistage/models/text/__init__.py", "from omnistage.models import text"),
        ("tests/helpers/command.py", "from helpers import command, lengths"),
    ],
)
def test_a_module_is_imported_by_its_name(file: str, statement: str) -> None:
    assert re.search(import_pattern(file), statement)
    assert not re.search(import_pattern(file), "import omnistage.models.texts, omnistage.link.scheduler\nfrom helpers import commands")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new repository of git, with one commit, on which `tools.near` works."""
    texts = {
        "wire/omnistage/wire/errors.py": "",
        "wire/omnistage/wire/old.py": "NAMES = ('one', 'two', 'three', 'four', 'five', 'six', 'seven')\n",
        "tests/wire/test_errors.py": "import omnistage.wire.errors",
        "tests/wire/test_old.py": "def test():\n    from omnistage.wire import old",
        "tests/link/test_link.py": "",
        "docs/page.md": "",
        ".gitignore": "ignored*\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(near, "ROOT", tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "x")


def run(capsys: pytest.CaptureFixture[str], base: str = "", *, show: bool = False) -> tuple[list[str], str]:
    """The files that would run, and the report."""
    near.main(base, show)
    out, report = capsys.readouterr()
    return out.split(), report


def test_changes_are_in_the_working_tree_and_in_files_that_git_does_not_know_yet(repository: Path) -> None:
    (repository / "docs" / "page.md").write_text("new")
    git(repository, "mv", "wire/omnistage/wire/old.py", "wire/omnistage/wire/newer.py")
    (repository / "ignored.py").write_text("")
    (repository / "new.py").write_text("")
    names = {"docs/page.md", "wire/omnistage/wire/newer.py", "wire/omnistage/wire/old.py", "new.py"}
    assert near.changed_since(repository, "HEAD") == names


def test_the_base_is_where_the_branch_left_its_upstream(repository: Path) -> None:
    assert near.changed_since(repository, "") == set()
    git(repository, "checkout", "-q", "-b", "mine", "--track", "main")
    (repository / "docs" / "page.md").write_text("mine")
    commit(repository)
    git(repository, "checkout", "-q", "main")
    (repository / "wire" / "omnistage" / "wire" / "errors.py").write_text("theirs = 1")
    commit(repository)
    git(repository, "checkout", "-q", "mine")
    assert near.changed_since(repository, "") == {"docs/page.md"}


def test_importers_come_first_and_then_the_area(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "wire" / "omnistage" / "wire" / "old.py").unlink()
    files, report = run(capsys)
    assert files == ["tests/wire/test_old.py", "tests/wire/test_errors.py"]
    assert "changed (1): wire/omnistage/wire/old.py" in report and "chosen (2): " in report


def test_a_deleted_test_is_not_chosen(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "tests" / "link" / "test_link.py").unlink()
    assert "tests/link/test_link.py" not in run(capsys)[0]


def test_show_runs_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "tests" / "link" / "test_link.py").write_text("x = 1")
    commit(repository)
    assert run(capsys) == ([], "changed (0): \nchosen (0): \nleft out (0): \n")
    assert run(capsys, "HEAD~1")[0] == ["tests/link/test_link.py"]
    assert run(capsys, "HEAD~1", show=True)[0] == []


def test_an_unknown_base_is_an_error(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        near.main("nowhere")
    assert "nowhere" in capfd.readouterr().err


def test_the_cheapest_run_until_the_budget_is_full_and_a_changed_test_always(tmp_path: Path) -> None:
    names = ("tests/a/test_changed.py", "tests/a/test_cheap.py", "tests/a/test_dear.py", "tests/a/test_long.py", "tests/a/test_slow.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    costs = {
        names[0]: Cost(cpu_s=3 * BUDGET_S, wall_s=1),
        names[1]: Cost(cpu_s=1, wall_s=1),
        names[2]: Cost(cpu_s=2 * BUDGET_S - 1, wall_s=2),
        names[3]: Cost(cpu_s=1, wall_s=1, form="long"),
        names[4]: Cost(cpu_s=1, wall_s=BUDGET_S * WORKERS),
    }
    assert choose(tmp_path, {"a/module.py"}, names, costs) == ([names[1], names[2]], [names[0], names[4]])
    assert choose(tmp_path, {"a/module.py", names[0]}, names, costs) == ([names[0]], [names[1], names[2], names[4]])
