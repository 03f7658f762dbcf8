"""The command's own texts: help, version, completion, the contract as files, and what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main

from helpers import command
from helpers.bare import bare_environment, bare_python
from omnistage.cli.main import app
from omnistage.cli.show.commands import write_protos
from omnistage.client.private_stack import LAUNCHER_NEEDS
from tools.protos import compile_protos

COMMANDS = [name for name, command in typer.main.get_command(app).commands.items() if not command.hidden]  # type: ignore[attr-defined]


def omnistage(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return command.omnistage(*words, variables={"COLUMNS": "80", **variables})


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_that_of_the_package(option: str) -> None:
    told = omnistage(option)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"omnistage {version('omnistage')}\n", "")


@pytest.mark.parametrize(
    ("words", "unneeded"), [("--version", "typer rich numpy grpc"), ("ask --help", "numpy grpc torch")], ids=["version", "help"]
)
def test_what_only_tells_imports_little(words: str, unneeded: str) -> None:
    """So that who asks for it does not wait."""
    code = (
        f"import sys; sys.argv = ['omnistage', *{words.split()}]\nfrom omnistage.cli.__main__ import main\n"
        f"try:\n    main()\nfinally:\n    assert not {set(unneeded.split())} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_help_has_examples_and_fits_a_terminal(name: str) -> None:
    done = omnistage(*name.split(), "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"<(?!-)[a-z_]+[ \[\]a-z]*>", done.stdout), "a type of Python's is no word for what can be typed"
    examples = [line.strip() for line in lines[lines.index("  Examples:") + 1 :] if line.strip()]
    assert any(line.startswith((f"omnistage {name}", f"watch omnistage {name}")) for line in examples), examples
    assert "OMNISTAGE_SERVE_ADDRESS" in done.stdout or name != "serve"


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_the_examples_exist(name: str) -> None:
    """An example is the first thing that is copied."""
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    there = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for line in command.epilog.splitlines():
        words = line.split("|")[0].split()
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= there, (line, used - there)


@pytest.mark.parametrize(("typed", "offered"), [("st", {"status", "stop"}), ("serve --det", {"--detach"})])
def test_a_shell_completes(typed: str, offered: set[str]) -> None:
    words = f"omnistage {typed}"
    done = omnistage(_OMNISTAGE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert set(done.stdout.split()) == offered


def test_completion_can_be_shown_for_a_shell() -> None:
    done = omnistage("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _omnistage_completion omnistage" in done.stdout


def test_one_name_of_the_option_is_shown_and_both_work() -> None:
    for name in ("ask", "draw"):
        (line,) = (line for line in omnistage(name, "--help").stdout.splitlines() if "--model" in line)
        assert "--pipeline" in line, "--model stands beside --pipeline, as its other name, alone"


# The contract as files


PROTOS = Path(__file__).resolve().parents[2] / "protos"
ERROR_FILES = {"google/rpc/status.proto", "google/rpc/error_details.proto"}


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.proto")}


def compiled(folder: Path, out: Path) -> set[str]:
    """The names in protoc's output for all files in the folder, as Python."""
    out.mkdir()
    compile_protos([f"-I{folder}", f"--python_out={out}", f"--grpc_python_out={out}", *contents(folder)])
    return {path.relative_to(out).as_posix() for path in out.rglob("*_pb2.py")}


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import typer; from omnistage.cli.show.commands import protos; typer.run(protos)"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    done = typed(str(tmp_path / "protos"), "--errors")
    assert (done.returncode, done.stderr) == (0, "")
    names = {Path(line).relative_to(tmp_path / "protos").as_posix() for line in done.stdout.splitlines()}
    assert names == {*contents(PROTOS), *ERROR_FILES}


def test_the_command_says_that_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = typed(str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no folder" in done.stderr and "hint: Give a folder" in done.stderr


def test_it_writes_the_contract_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "protos"
    files = write_protos(folder)
    assert contents(folder) == contents(PROTOS)
    assert {path.relative_to(folder).as_posix() for path in files} == set(contents(PROTOS)) and len(files) == 5


@pytest.mark.parametrize("errors", [False, True])
def test_protoc_takes_what_it_wrote(tmp_path: Path, errors: bool) -> None:
    write_protos(tmp_path / "protos", errors=errors)
    names = set(contents(PROTOS)) | (ERROR_FILES if errors else set())
    assert compiled(tmp_path / "protos", tmp_path / "out") == {name.replace(".proto", "_pb2.py") for name in names}


def test_files_of_an_earlier_version_are_replaced_and_others_stay(tmp_path: Path) -> None:
    write_protos(tmp_path)
    (tmp_path / "omnistage" / "v1" / "omni.proto").write_text("old")
    (tmp_path / "mine.proto").write_text("mine")
    write_protos(tmp_path)
    assert contents(tmp_path) == {**contents(PROTOS), "mine.proto": "mine"}


# Without the extras


INSTALL = "`make wheels` in a clone, then pip install --find-links dist 'omnistage[cli,convert,models]'"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return bare_environment(tmp_path_factory.mktemp("bare"))


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*bare_python(), *words], env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_says_what_to_install(bare: dict[str, str]) -> None:
    for words in (("ask", "Hi"), ("--help",), ()):
        done = python(bare, "-m", "omnistage.cli", *words)
        assert (done.returncode, done.stdout) == (1, "")
        error, hint = done.stderr.splitlines()
        assert error.startswith("error: ") and "typer" in error and INSTALL in hint


def test_a_private_stack_says_what_to_install(bare: dict[str, str]) -> None:
    code = "try:\n    Omni()\nexcept StackError as error:\n    print(error, error.hint, sep='\\n')"
    done = python(bare, "-c", f"from omnistage.client import Omni, StackError\n{code}")
    assert (done.returncode, done.stderr) == (0, "")
    error, hint = done.stdout.splitlines()
    assert error.endswith(f"{INSTALL}") and "address='HOST:PORT'" in hint
    assert [name for name in LAUNCHER_NEEDS if name in error + hint] == [], "names of modules help nobody who types them to pip"


def test_the_client_asks_a_router_that_runs(bare: dict[str, str], toy_address: str) -> None:
    code = "import sys\nfrom omnistage.client import Omni\nwith Omni(address=sys.argv[1]) as omni:\n    print(omni.say('one two').text)"
    done = python(bare, "-c", code, toy_address)
    assert (done.returncode, done.stdout.split()) == (0, ["one", "two"]), done.stderr


def test_the_default_model_says_what_to_install(tmp_path: Path) -> None:
    done = python(bare_environment(tmp_path, "cli"), "-m", "omnistage.cli", "ask", "Hi")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: the models of smol need packages that are not installed: torch")
    assert done.returncode == 1 and INSTALL in hint
