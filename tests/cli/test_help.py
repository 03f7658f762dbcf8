"""The command's own texts: help, version, completion."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer.main

from helpers import command
from omnistage.cli.main import app

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
