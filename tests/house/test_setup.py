"""The set-up: what it refuses, when it uses an environment as it is, and packages that stand apart. With pip itself and tiny wheels.
test_environment.py has a whole run, test_torch_build.py the choice of torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import lengths
from helpers.wheels import environment, installed, publish, sha256, use_only
from tools import apart, setup
from tools.commands import CommandError, SetupError, pip
from tools.torch_build import TORCH, TORCH_CUDA

MAKES_OWN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DEVICE", "REQUIRE_TORCH_HASH", "ALLOW_UNHASHED_TORCH")


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the lists, of this test: empty at first."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    monkeypatch.setattr(setup, "REQUIREMENTS", folder)
    return folder


@lengths.TOOLING
def test_what_the_list_names_is_installed_and_nothing_beside_it(python: str, configured: Path, requirements: Path) -> None:
    wheel = publish(configured, "alpha", "1.0", needs=("beta",))
    publish(configured, "beta", "1.0")
    (requirements / "core.txt").write_text(f"alpha==1.0 --hash=sha256:{sha256(wheel)}\n")
    setup.install_hashed(python, [setup.list_of("core")])
    assert installed(python).split() == ["alpha==1.0"]
    with pytest.raises(SetupError, match=r"make lock(?s:.*)alpha 1.0 requires beta"):
        setup.check_complete(python)


@lengths.TOOLING
def test_a_tampered_wheel_is_refused_in_one_line(python: str, configured: Path, requirements: Path) -> None:
    good = publish(configured, "alpha", "1.0")
    (requirements / "core.txt").write_text(f"alpha==1.0 --hash=sha256:{sha256(good)}\n")
    publish(configured, "alpha", "1.0", needs=("something-else",))
    with pytest.raises(SetupError, match=r"^alpha==1.0: the file .* is not the one whose SHA-256 stands in requirements/") as refused:
        setup.install_hashed(python, [setup.list_of("core")])
    assert "\n" not in str(refused.value)
    assert installed(python) == ""


@lengths.TOOLING
def test_a_list_without_a_hash_installs_nothing(python: str, configured: Path, requirements: Path) -> None:
    publish(configured, "alpha", "1.0")
    (requirements / "core.txt").write_text("alpha==1.0\n")
    with pytest.raises(CommandError, match=r"(?i)hash"):
        setup.install_hashed(python, [setup.list_of("core")])
    assert installed(python) == ""


def test_an_unknown_extra_is_named() -> None:
    with pytest.raises(SetupError, match="no extra named 'modles'"):
        setup.set_up(Path("nowhere"), ("modles",), editable=True)


@lengths.TOOLING
def test_the_libraries_for_cuda_are_installed_with_the_build_that_needs_them() -> None:
    names = {build: [path.stem for path in setup.lists_of(("cli", "models"), build)] for build in (TORCH, TORCH_CUDA)}
    assert names == {TORCH: ["core", "cli", "models"], TORCH_CUDA: ["core", "cli", "models", "cuda"]}
    assert [path.stem for path in setup.lists_of(("cli",), TORCH_CUDA)] == ["core", "cli"], "without torch there is nothing for them to do"


@pytest.mark.parametrize(
    ("words", "told"),
    [([], ""), (["DEVICE=cuda"], "--device cuda"), (["REQUIRE_TORCH_HASH=1"], "--require-torch-hash"), (["ALLOW_UNHASHED_TORCH=1"], "")],
)
def test_make_hands_over_what_was_asked_for(words: list[str], told: str) -> None:
    # The command runs as from a shell: a make above this one would pass its options on, and print folders.
    alone = {name: value for name, value in os.environ.items() if name not in MAKES_OWN}
    command = ["make", "--dry-run", "setup", *words]
    shown = subprocess.run(command, cwd=setup.ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    assert " ".join(shown.split()) == f"python3 tools/setup.py {told}".strip()


@pytest.mark.parametrize("target", ["up", "down"])
def test_make_says_what_containers_need(tmp_path: Path, target: str) -> None:
    """The output is one sentence if compose is missing, and if the daemon does not answer."""
    asleep = tmp_path / "compose"
    asleep.write_text("#!/bin/sh\n[ $1 = version ] || { echo Cannot connect to the Docker daemon >&2; exit 1; }\n")
    asleep.chmod(0o755)
    alone = {name: value for name, value in os.environ.items() if name not in MAKES_OWN}
    for compose, told in ((tmp_path / "none", "needs Docker with its compose plugin"), (asleep, "the docker daemon does not answer")):
        command = ["make", "--no-print-directory", target, f"COMPOSE={compose}"]
        done = subprocess.run(command, cwd=setup.ROOT, env=alone, capture_output=True, text=True, check=False)
        said, end = done.stderr.splitlines()
        assert said.startswith(f"make {target}") and told in said and end.endswith("Error 1")


def test_an_unknown_device_is_refused() -> None:
    command = [sys.executable, str(setup.ROOT / "tools" / "setup.py"), "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "invalid choice: 'tpu' (choose from 'cpu', 'cuda')" in done.stderr


@lengths.TOOLING
def test_a_cuda_package_is_refused_by_name(python: str, configured: Path) -> None:
    setup.refuse_cuda(python)
    pip(python, str(publish(configured, "nvidia_cublas_cu12", "12.0")))
    with pytest.raises(SetupError, match="nvidia-cublas-cu12"):
        setup.refuse_cuda(python)


def test_an_environment_that_was_moved_or_is_no_environment_is_not_used(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv")
    assert setup.can_use(venv)
    moved = tmp_path / "moved"
    shutil.copytree(venv, moved, symlinks=True)
    assert not setup.can_use(moved)
    (venv / "bin" / "python").unlink()
    assert not setup.can_use(venv)
    assert not setup.can_use(tmp_path)


def test_nothing_is_done_when_nothing_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    venv = Path(sys.prefix)
    made = setup.read_stamp(venv / setup.STAMP)
    if made.get("digest") != setup.inputs_digest(editable=True):
        pytest.fail(f"{venv} is not what tools/setup.py would make now: use `make test`, which runs it first")
    before = (venv / setup.STAMP).stat().st_mtime_ns
    setup.set_up(venv, setup.DEV, editable=True, device=made["device"])
    assert capsys.readouterr().out == ""
    assert (venv / setup.STAMP).stat().st_mtime_ns == before


SEEN = "from importlib.metadata import distributions; print(*sorted(one.name for one in distributions()))"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source; the lists and folders are of this test."""
    use_only(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(apart, "ROOT", tmp_path)
    monkeypatch.setattr(apart, "REQUIREMENTS", tmp_path / "requirements")
    (tmp_path / "requirements").mkdir()
    return tmp_path / "index"


def list_package(index: Path, version: str) -> Path:
    wheel = publish(index, "alpha", version, needs=("protobuf==1.0",))
    (apart.REQUIREMENTS / "protos.txt").write_text(f"alpha=={version} --hash=sha256:{sha256(wheel)}\n")
    return wheel


def folders() -> set[str]:
    return {path.name for path in (apart.ROOT / "build").iterdir()}


def test_a_folder_is_made_once_and_another_list_has_another(index: Path) -> None:
    list_package(index, "1.0")
    with ThreadPoolExecutor(2) as both:
        first, same = both.map(apart.folder_of, ["protos", "protos"])
    assert first == same and folders() == {first.name}
    before = first.stat().st_ino
    (index / "alpha" / "index.html").unlink()
    assert apart.folder_of("protos").stat().st_ino == before, "nobody asks an index for what is there"
    list_package(index, "2.0")
    assert folders() == {first.name} and apart.folder_of("protos") != first
    assert len(folders()) == 2


def test_who_sees_it_sees_nothing_else(index: Path) -> None:
    list_package(index, "1.0")
    folder = apart.folder_of("protos")
    seen = subprocess.run([sys.executable, "-S", "-c", SEEN], env=apart.variables(folder), capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["alpha"]
    assert "alpha" not in installed(sys.executable)


def test_a_wheel_that_is_another_leaves_nothing(index: Path) -> None:
    list_package(index, "1.0")
    publish(index, "alpha", "1.0", needs=("something-else",))
    with pytest.raises(SetupError, match=r"^alpha==1.0: the file .* is not the one whose SHA-256"):
        apart.folder_of("protos")
    assert folders() == set()


def test_all_of_them_are_made_where_one_is_missing_and_it_is_told(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apart, "LISTS", ("protos",))
    list_package(index, "1.0")
    assert (apart.main(), apart.main()) == (0, 0)
    assert capsys.readouterr().out.count("setup: apart from the environment: protos") == 1
    list_package(index, "2.0")
    (index / "alpha" / "index.html").write_text("")
    assert apart.main() == 1
    assert "setup: " in capsys.readouterr().err
