"""An installation from the two wheels without a checkout: pip's line of the package's page, and then a spoken answer and a picture.

It has an environment, a home and a folder of its own. The default model is the one of this machine, so that it is not fetched again."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import soundfile

from benchmarks.asr import recognise, recogniser, word_error_rate
from helpers import lengths
from helpers.wheels import environment
from omnistage.models.smol.store import model_directory
from tools import torch_build, wheels

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "sdk" / "README.md"
INSTALL_TIMEOUT_S = 500.0

pytestmark = [
    pytest.mark.timeout(900),
    lengths.long_form(
        "house/test_wheel.py::test_it_holds_every_package_and_only_the_package",
        unkept="What pip installs of the two wheels, without a checkout, answers and draws.",
    ),
]


@dataclass(frozen=True)
class Installed:
    """An environment with what was given out. folder: where somebody types. variables: with a home of its own."""

    venv: Path
    folder: Path
    variables: dict[str, str]

    def run(self, *words: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        program = str(self.venv / "bin" / words[0])
        return subprocess.run([program, *words[1:]], cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=timeout_s)


def lines_of(program: str) -> list[list[str]]:
    """The lines that the page has people type, as words."""
    return [shlex.split(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    base = tmp_path_factory.mktemp("installed")
    venv, folder, home = environment(base / "venv"), base / "folder", base / "home"
    cache = home / ".cache" / "omnistage"
    for made in (folder, cache):
        made.mkdir(parents=True)
    (cache / model_directory().name).symlink_to(model_directory())
    ours = [name for name in os.environ if name.startswith(("OMNISTAGE_", "XDG_")) or name in ("PYTHONPATH", "VIRTUAL_ENV")]
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    variables |= {"HOME": str(home), "OMNISTAGE_ROUTER": "none", "OMNISTAGE_PLAYER": "none"}
    here = Installed(venv, folder, variables)
    wheels.build(folder / "dist")
    python = str(venv / "bin" / "python")
    # Where the CPU build of torch is depends on the machine; the second index of the page is one such place.
    torch_build.install(python, torch_build.choose(python, "cpu"))
    client, everything = lines_of("pip")
    assert everything[:-1] == [*client[:-1], "--extra-index-url", torch_build.TORCH_INDEX_URL]
    words = [*client[:-1], "--constraint", str(ROOT / "constraints.txt"), everything[-1]]
    done = here.run("python", "-m", *words, timeout_s=INSTALL_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    yield here


def test_nothing_of_it_is_the_checkouts(installed: Installed) -> None:
    code = "import omnistage.client as one, omnistage_pictures as two, sys; print(one.__file__, two.__file__, *sys.path, sep='\\n')"
    done = installed.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    first, second, *path = done.stdout.splitlines()
    assert all(Path(one).is_relative_to(installed.venv) for one in (first, second))
    assert [one for one in path if Path(one).is_relative_to(ROOT)] == []
    assert installed.run("python", "-m", "pip", "check").stdout.strip() == "No broken requirements found."


def test_it_answers_in_words_that_are_heard(installed: Installed) -> None:
    ask = next(line for line in lines_of("omnistage") if line[1] == "ask")
    done = installed.run(*ask)
    assert done.returncode == 0, done.stderr
    samples, rate_hz = soundfile.read(installed.folder / ask[-1], dtype="float32")
    assert word_error_rate([(done.stdout, recognise(recogniser(), samples, rate_hz))]) < 0.3


def test_it_draws(installed: Installed) -> None:
    draw = next(line for line in lines_of("omnistage") if line[1] == "draw")
    done = installed.run(*draw)
    assert done.returncode == 0, done.stderr
    assert (installed.folder / draw[-1]).read_bytes()[:4] == b"\x89PNG"


def test_an_empty_cache_needs_what_the_page_installs_and_no_more(installed: Installed) -> None:
    """All packages that convert the default model are there."""
    done = installed.run("python", "-c", "from omnistage.models.registry import missing_packages; print(missing_packages('smol'))")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
