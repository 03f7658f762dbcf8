"""The choice of `make test-near`: which tests a change reaches, and how many of them fit into two minutes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import near, reach
from tools.costs import Cost
from tools.near import BUDGET_S, DRILLS_BUDGET_S, choose
from tools.reach import READ, SERVERS, STARTED, Graph, Reached, graph, names_of, rows
from tools.sources import Source, read
from tools.suite import WORKERS

ROOT = Path(__file__).resolve().parents[2]
OUR_PACKAGES = ("omnistage.", "benchmarks.", "chaos.", "helpers.", "tools.")


@pytest.fixture(scope="module")
def files() -> set[str]:
    return near.all_files(ROOT)


@pytest.fixture(scope="module")
def ours(files: set[str]) -> Graph:
    return graph(ROOT, files)


def the(name: str, files: set[str]) -> str:
    """Our file whose path ends so, without `.py`. If this file spelled such a path in full, it would be a neighbour of the other file."""
    (found,) = [file for file in files if file.endswith(f"/{name}.py")]
    return found


def away(tree: Graph, *changed: str) -> dict[str, int]:
    """The distance of each test that these files reach."""
    return {one.test: one.distance for one in tree.find_reached(changed)}


def write(root: Path, texts: Mapping[str, str]) -> Graph:
    """A tree of these files."""
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return graph(root, texts)


# This repository -----------------------------------------------------------------------------------------------------------------------


def test_the_screen_reaches_the_tests_that_start_the_command(ours: Graph, files: set[str]) -> None:
    found = away(ours, the("cli/screen", files))
    assert found["tests/cli/test_terminal.py"] == 1, "it imports the screen"
    assert {f"tests/cli/test_{name}.py" for name in ("scrollback", "attached", "chat", "commands", "interrupts")} <= found.keys()
    assert not {file for file in found if file.startswith(("tests/engine/", "tests/connector/"))}


def test_the_scheduler_reaches_its_own_tests_first(ours: Graph, files: set[str]) -> None:
    found = away(ours, the("engine/scheduler", files))
    assert found["tests/engine/test_scheduler.py"] == found["tests/engine/test_scheduler_walk.py"] == 1 == min(found.values())
    assert found["tests/system/test_default_model.py"] > found["tests/models/test_smol_thinker.py"] > 1
    assert "tests/connector/test_inline_parts.py" not in found


def test_errors_of_the_wire_reach_what_runs_with_them(ours: Graph, files: set[str]) -> None:
    found = away(ours, the("wire/errors", files))
    assert found["tests/wire/test_errors.py"] == 1
    assert {"tests/link/test_failover.py", "tests/router/test_admission.py", "tests/system/test_resume.py"} <= found.keys()
    assert "tests/engine/test_sampler.py" not in found


def test_a_server_reaches_the_tests_of_the_launcher_that_starts_it(ours: Graph, files: set[str]) -> None:
    found = away(ours, the("code2wav/__main__", files))
    assert {"tests/cli/test_serve.py", "tests/system/test_chain.py", "tests/host/test_starting.py"} <= found.keys()


def test_what_a_fixture_imports_is_reached_by_tests_that_ask_for_it(ours: Graph, files: set[str]) -> None:
    found = away(ours, the("helpers/omni_checkpoint", files))
    assert {"tests/models/qwen2_5_omni/test_parity.py", "tests/system/test_omni_speech.py"} <= found.keys()
    assert not {file for file in found if file.startswith(("tests/wire/", "tests/link/", "tests/engine/"))}


def test_a_conftest_reaches_the_tests_below_it(ours: Graph, files: set[str]) -> None:
    (conftest,) = [file for file in files if file == f"tests/gateway/{'conftest'}.py"]
    readers = {"tests/house/test_imports.py", "tests/house/test_sentences.py", "tests/house/test_tree.py"}
    assert away(ours, conftest) == {file: 1 for file in files if file.startswith("tests/gateway/test_") or file in readers}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("protos/omnistage/v1/omni.proto", {"tests/client/test_options.py", "tests/router/test_request.py", "tests/cli/test_chat.py"}),
        ("deploy/pipelines/toy.yaml", {"tests/router/test_pipeline.py", "tests/cli/test_serve.py"}),
        ("docs/models.md", {"tests/models/test_models_page.py", "tests/client/test_documents.py"}),
        ("docs/operate.md", {"tests/system/test_operate.py"}),
        ("docs/limits.md", {"tests/house/test_limits.py"}),
        ("services/Dockerfile", {"tests/house/test_containers.py", "tests/system/test_compose.py"}),
        ("requirements/core.txt", {"tests/house/test_lock.py"}),
    ],
)
def test_what_is_not_python_reaches_who_reads_it(ours: Graph, changed: str, reached: set[str]) -> None:
    found = away(ours, changed)
    assert reached <= found.keys()
    assert "tests/engine/test_sampler.py" not in found


def test_every_file_is_python_or_has_a_row(files: set[str]) -> None:
    assert [file for file in sorted(files) if not file.endswith(".py") and not rows(file)] == [], (
        "say in READ of tools/reach.py who reads it"
    )


def test_the_rows_lead_to_files(ours: Graph) -> None:
    patterns = {one for row in (*READ.values(), *STARTED.values()) for one in row} | STARTED.keys()
    assert [one for one in sorted(patterns) if not reach.matching(one, ours.files)] == []


def test_ci_never_selects() -> None:
    assert "near" not in (ROOT / ".ci" / "run").read_text()


# Helpers that start processes say what they run ----------------------------------------------------------------------------------------


def unsaid(source: Source, *, says_servers: bool, starts: set[str]) -> list[int]:
    """The lines at which a program is named at run time, in a file that does not say which one. says_servers: whether the file reaches a
    helper that declares STARTS. starts: everything that can be run by name."""
    if source.starts:
        return []
    literal = bool(starts & {*source.words, *source.programs})
    script = any(word.endswith(".py") for word in source.words)
    lines = [] if script else list(source.executable)
    for one in source.made_up:
        if not one.start:
            lines += [] if literal else [one.line]
        elif one.start in OUR_PACKAGES:
            lines += [] if says_servers and one.start == "omnistage." else [one.line]
    return lines


def test_who_starts_a_process_says_what_it_runs(ours: Graph, files: set[str]) -> None:
    starts = {name for file in files if file.endswith(".py") for name in names_of(file) if "." in name}
    sources = {file: read((ROOT / file).read_text(), min(names_of(file), key=len), False) for file in files if file.endswith(".py")}
    servers = ours.distances([the("helpers/servers", files)])
    assert sources[the("helpers/servers", files)].starts
    said = {
        file: unsaid(source, says_servers=file in servers, starts=starts) for file, source in sources.items() if file.startswith("tests/")
    }
    assert {file: lines for file, lines in said.items() if lines} == {}, "name the module, or declare STARTS"
    makes = {file for file, source in sources.items() if "/omnistage/" in file and any(one.start in OUR_PACKAGES for one in source.made_up)}
    assert makes - STARTED.keys() - ATTRIBUTES == set(), "say in STARTED of tools/reach.py what it starts"


ATTRIBUTES = {"router/omnistage/router/account.py"}
"""Names of spans' attributes, which look like those of modules."""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('run([sys.executable, "-m", module])', [1]),
        ('run([*python(), "-m", *words])', [1]),
        ('start(f"omnistage.{kind}", "--family", "toy")', [1]),
        ('x = 1\nrun([sys.executable, "-m", f"benchmarks.{name}"])', [2]),
        ("run([sys.executable, str(folder / name)])", [1]),
        ('STARTS = ("omnistage.router",)\nrun([sys.executable, "-m", module])', []),
        ('STARTS = MODULES\nrun([sys.executable, "-m", module])', [2]),
        ('run([sys.executable, "-m", "omnistage.router"])', []),
        ('check("omnistage.router")\nrun([sys.executable, "-m", module])', []),
        ('run([sys.executable, "-c", program])', []),
        ('run([sys.executable, str(ROOT / "tools" / "limits.py")])', []),
        ('told[f"omnistage.{name}"]', []),
    ],
)
def test_a_name_that_is_made_at_run_time_is_seen(text: str, lines: list[int]) -> None:
    assert unsaid(read(text, "helpers.one"), says_servers=False, starts={"omnistage.router"}) == lines


def test_the_helper_that_starts_servers_says_all_of_them(files: set[str]) -> None:
    found = {name for pattern in SERVERS for file in reach.matching(pattern, files) for name in names_of(file)}
    said = {f"{word}.__main__" for word in read((ROOT / the("helpers/servers", files)).read_text(), "helpers.servers").words}
    assert {name for name in found if name.startswith("omnistage.")} <= said


# Edges ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "distance"),
    [
        ("import omnistage.link.chain", 1),
        ("from omnistage.link.chain import Chain", 1),
        ("from omnistage.link import chain", 1),
        ("def f():\n    import omnistage.link.chain as chain", 1),
        ('importlib.import_module("omnistage.link.chain")', 1),
        ('ENTRY = "omnistage.link.chain:Chain"', 1),
        ('run([sys.executable, "-c", "from omnistage.link import chain"])', 1),
        ('run(f"""\n    import os\n    print({1})\n    import omnistage.link.chain\n""")', 1),
        ('BEGINNING = "\\nfrom omnistage.link import chain\\nif x:"', 1),
        ('run([sys.executable, "-m", "omnistage.link"])', 2),
        ('STARTS = ("omnistage.link",)', 2),
        ('run("python -m omnistage.link --help")', 2),
        ('(ROOT / "link" / "omnistage" / "link" / "chain.py").read_text()', 1),
        ("import omnistage.link", None),
        ("from omnistage.link import other", None),
        ("if TYPE_CHECKING:\n    import omnistage.link.chain", None),
        ('"""Of omnistage.link.chain, with omnistage.link."""', None),
    ],
)
def test_edges(tmp_path: Path, text: str, distance: int | None) -> None:
    tree = {
        "link/omnistage/link/__init__.py": "",
        "link/omnistage/link/__main__.py": "from . import chain",
        "link/omnistage/link/chain.py": "class Chain: ...",
        "link/omnistage/link/other.py": "",
        "tests/link/test_it.py": text,
    }
    assert away(write(tmp_path, tree), "link/omnistage/link/chain.py").get("tests/link/test_it.py") == distance


def test_helpers_are_a_part_of_the_tests(tmp_path: Path) -> None:
    tree = {
        "link/omnistage/link/chain.py": "",
        "link/omnistage/link/server.py": "from omnistage.link import chain",
        "tests/helpers/inner.py": "import omnistage.link.chain",
        "tests/helpers/outer.py": "import helpers.inner",
        "tests/test_helped.py": "import helpers.outer, omnistage.link.server",
        "tests/test_far.py": "import omnistage.link.server",
    }
    written = write(tmp_path, tree)
    assert away(written, "link/omnistage/link/chain.py") == {"tests/test_helped.py": 1, "tests/test_far.py": 2}
    assert away(written, "tests/helpers/inner.py") == {"tests/test_helped.py": 1}


def test_an_import_runs_the_packages_above(tmp_path: Path) -> None:
    tree = {
        "sdk/omnistage/client/__init__.py": "from omnistage.client import first",
        "sdk/omnistage/client/first.py": "",
        "sdk/omnistage/client/second.py": "",
        "tests/test_second.py": "from omnistage.client.second import x",
    }
    assert away(write(tmp_path, tree), "sdk/omnistage/client/first.py") == {"tests/test_second.py": 2}


def test_tests_have_of_a_conftest_what_they_ask_for(tmp_path: Path) -> None:
    conftest = (
        "import pytest\nfrom helpers import all_use, one_uses, nested\nall_use.begin()\n"
        "@pytest.fixture\ndef one(): return one_uses.x\n@pytest.fixture\ndef two(one): return nested.x\n"
    )
    tree = {
        **{f"tests/helpers/{name}.py": "" for name in ("all_use", "one_uses", "nested")},
        "tests/conftest.py": conftest,
        "tests/a/conftest.py": "import pytest\n@pytest.fixture\ndef one(): ...\n",
        "tests/test_none.py": "def test(): ...",
        "tests/test_one.py": "def test(one): ...",
        "tests/test_two.py": "@pytest.mark.usefixtures('two')\ndef test(): ...",
        "tests/a/test_other_one.py": "def test(one): ...",
    }
    written = write(tmp_path, tree)
    everyone = {"tests/test_none.py", "tests/test_one.py", "tests/test_two.py", "tests/a/test_other_one.py"}
    assert away(written, "tests/helpers/all_use.py").keys() == everyone == away(written, "tests/conftest.py").keys()
    assert away(written, "tests/helpers/one_uses.py") == {"tests/test_one.py": 1, "tests/test_two.py": 1}
    assert away(written, "tests/helpers/nested.py") == {"tests/test_two.py": 1}
    assert away(written, "tests/a/conftest.py") == {"tests/a/test_other_one.py": 1}


# Changes -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new repository of git, with one commit, on which `tools.near` works."""
    tree = {
        "wire/omnistage/wire/errors.py": "",
        "wire/omnistage/wire/old.py": "NAMES = ('one', 'two', 'three', 'four', 'five', 'six', 'seven')\n",
        "tests/wire/test_errors.py": "import omnistage.wire.errors",
        "tests/wire/test_old.py": "def test():\n    from omnistage.wire import old",
        "docs/page.md": "",
        ".gitignore": "ignored*\n",
    }
    write(tmp_path, tree)
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


def chosen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], str]:
    """The files that would run, and the report."""
    monkeypatch.setattr("sys.argv", ["near", *words])
    assert near.main() == 0
    out, told = capsys.readouterr()
    return out.split(), told


def test_changed_are_the_working_tree_and_what_git_does_not_know_yet(repository: Path) -> None:
    (repository / "docs" / "page.md").write_text("new")
    git(repository, "mv", "wire/omnistage/wire/old.py", "wire/omnistage/wire/newer.py")
    (repository / "ignored.py").write_text("")
    git(repository, "rm", "-q", "--cached", ".gitignore")
    (repository / "tests" / "wire" / "test_errors.py").write_text("changed")
    git(repository, "add", "tests")
    changed, gone = near.changed_since(repository, "HEAD")
    assert changed == {"docs/page.md", "wire/omnistage/wire/newer.py", "tests/wire/test_errors.py", ".gitignore"}
    assert gone == {"wire/omnistage/wire/old.py"}


def test_the_base_is_where_the_branch_left_what_it_follows(repository: Path) -> None:
    assert near.base_of(repository) == "HEAD"
    git(repository, "checkout", "-q", "-b", "mine", "--track", "main")
    (repository / "docs" / "page.md").write_text("mine")
    commit(repository)
    git(repository, "checkout", "-q", "main")
    (repository / "wire" / "omnistage" / "wire" / "errors.py").write_text("theirs = 1")
    commit(repository)
    git(repository, "checkout", "-q", "mine")
    assert near.changed_since(repository, near.base_of(repository)) == ({"docs/page.md"}, set())


def test_what_imported_a_module_that_is_gone_is_chosen(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "wire" / "omnistage" / "wire" / "old.py").unlink()
    files, told = chosen(capsys, monkeypatch)
    assert files == ["tests/wire/test_old.py"]
    assert "changed since HEAD: wire/omnistage/wire/old.py" in told and "  1 away: tests/wire/test_old.py, 5 s" in told


def test_a_test_that_is_gone_is_not_chosen(repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "tests" / "wire" / "test_old.py").unlink()
    files, told = chosen(capsys, monkeypatch)
    assert files == [] and "no test is reached" in told


def test_what_does_not_fit_is_said(repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "tests" / "costs.json").write_text(
        '{"tests/wire/test_old.py": {"cpu_s": 400, "wall_s": 200, "tests": 3, "processes": 1}}'
    )
    (repository / "wire" / "omnistage" / "wire" / "old.py").write_text("x = 1")
    files, told = chosen(capsys, monkeypatch)
    assert files == [] and "chosen: 0 of 2 files, 0 of 4 tests, about 0 s" in told
    assert "left out: 1 files, 3 tests, about 200 s; the nearest: tests/wire/test_old.py (1)" in told


def test_the_base_may_be_named_and_to_show_runs_nothing(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "wire" / "omnistage" / "wire" / "errors.py").write_text("x = 1")
    commit(repository)
    assert chosen(capsys, monkeypatch) == ([], "nothing changed since HEAD\n")
    assert chosen(capsys, monkeypatch, "--base", "HEAD~1")[0] == ["tests/wire/test_errors.py"]
    files, told = chosen(capsys, monkeypatch, "--base", "HEAD~1", "--show")
    assert files == [] and "1 tests/wire/test_errors.py: wire/omnistage/wire/errors.py" in told


def test_a_file_may_say_how_it_is_written(repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "wire" / "omnistage" / "wire" / "errors.py").write_bytes(b"# coding: latin-1\nx = '\xe9'")
    assert chosen(capsys, monkeypatch)[0] == ["tests/wire/test_errors.py"]


@pytest.mark.parametrize(("words", "text"), [(["--base", "nowhere"], b""), ([], b"def broken(:"), ([], b"x = '\xe9'"), ([], b"x = 1\0")])
def test_what_cannot_be_found_out_is_an_error(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], text: bytes
) -> None:
    (repository / "wire" / "omnistage" / "wire" / "errors.py").write_bytes(text)
    monkeypatch.setattr("sys.argv", ["near", *words])
    assert near.main() == 1
    out, told = capsys.readouterr()
    assert out == "" and ("wire/omnistage/wire/errors.py" if text else "nowhere") in told


# How much of it runs -------------------------------------------------------------------------------------------------------------------


def names(choice: list[Reached]) -> list[str]:
    return [one.test for one in choice]


def cost(seconds: float) -> Cost:
    """The cost of a file that takes two minutes' worth of `seconds` on the clock of CI."""
    return Cost(cpu_s=2 * seconds, wall_s=0.0, tests=1)


def test_the_nearest_run_and_of_these_the_cheapest_until_the_budget_is_full() -> None:
    reached = [Reached(name, int(name[0])) for name in ("1dear", "1cheap", "1huge", "2cheap", "2dear", "3small")]
    costs = {"1dear": cost(50), "1cheap": cost(10), "1huge": cost(BUDGET_S), "2cheap": cost(25), "2dear": cost(40), "3small": cost(10)}
    choice = choose(reached, costs)
    assert names(choice.chosen) == ["1cheap", "1dear", "2cheap", "3small"]
    assert names(choice.left_out) == ["1huge", "2dear"]
    assert choice.seconds(choice.chosen) == 95


def test_tests_of_the_part_that_changed_come_before_others_that_are_as_near() -> None:
    changed = "sdk/omnistage/cli/screen.py"
    reached = [
        Reached("tests/cli/test_a.py", 1, (changed,)),
        Reached("tests/client/test_b.py", 1, (changed,)),
        Reached("tests/test_c.py", 0),
    ]
    choice = choose(reached, {"tests/cli/test_a.py": cost(70), "tests/client/test_b.py": cost(60), "tests/test_c.py": cost(1)})
    assert names(choice.chosen) == ["tests/test_c.py", "tests/cli/test_a.py"]


def test_time_on_the_clock_counts_too() -> None:
    reached = [Reached(name, 1) for name in "ab"]
    choice = choose(reached, {"a": Cost(1, BUDGET_S * WORKERS, 1), "b": Cost(1, 1, 1)})
    assert (names(choice.chosen), names(choice.left_out)) == (["b"], ["a"])


def test_a_test_that_changed_runs_whatever_it_costs() -> None:
    reached = [Reached("changed", 0), Reached("near", 1)]
    choice = choose(reached, {"changed": cost(2 * BUDGET_S), "near": cost(1)})
    assert (names(choice.chosen), names(choice.left_out)) == (["changed"], ["near"])


def test_drills_have_a_budget_of_their_own() -> None:
    drills = [Reached(f"tests/{name}.py", 1) for name in ("hostile/test_a", "system/test_b", "system/test_c")]
    other = Reached("tests/wire/test_d.py", 2)
    choice = choose([*drills, other], {one.test: cost(DRILLS_BUDGET_S / 2) for one in [*drills, other]})
    assert names(choice.chosen) == [drills[0].test, drills[1].test, other.test]
