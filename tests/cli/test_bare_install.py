"""Without the extras, the command and a private stack say which are missing; the client itself works."""

import subprocess
from pathlib import Path

import pytest

from helpers.bare import bare_environment, bare_python
from omnistage.client.private_stack import LAUNCHER_NEEDS

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
