"""The set-up: what is refused, where PyTorch comes from, and when an environment is used as it is. With pip itself and tiny wheels."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.wheels import publish, use_only
from tools import setup

PYTHON = ".".join(platform.python_version_tuple()[:2])


def make_venv(folder: Path) -> Path:
    """An environment with nothing but pip."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_venv(tmp_path_factory.mktemp("empty") / "venv")


@pytest.fixture
def python(empty: Path, tmp_path: Path) -> str:
    """The Python of a copy: quicker than a new environment, and good enough for `python -m pip`."""
    shutil.copytree(empty, tmp_path / "venv", symlinks=True)
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only configured index, in a folder of this test: empty at first."""
    index = tmp_path / "configured"
    index.mkdir()
    use_only(index, monkeypatch)
    return index


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the lists, of this test: empty at first."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    monkeypatch.setattr(setup, "REQUIREMENTS", folder)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def know_torch(requirements: Path, *wheels: Path, build: str = setup.TORCH) -> None:
    """The table of torch: these wheels are the build for the Python of the tests."""
    table = {build: {PYTHON: [sha256(wheel) for wheel in wheels]}}
    (requirements / setup.TORCH_HASHES).write_text(json.dumps(table), encoding="utf-8")


LIST = """
from importlib.metadata import distributions
for found in distributions():
    if found.name not in ("pip", "setuptools"):
        print(f"{found.name}=={found.version}")
"""


def installed(python: str) -> str:
    """A line for each package beside pip's own, whatever is on the path of the tests."""
    return subprocess.run([python, "-I", "-c", LIST], capture_output=True, text=True, check=True).stdout


def test_what_the_list_names_is_installed_and_nothing_beside_it(python: str, configured: Path, requirements: Path) -> None:
    wheel = publish(configured, "alpha", "1.0", needs=("beta",))
    publish(configured, "beta", "1.0")
    (requirements / "core.txt").write_text(f"alpha==1.0 --hash=sha256:{sha256(wheel)}\n")
    setup.install_hashed(python, [setup.hashed("core")])
    assert installed(python).split() == ["alpha==1.0"]
    with pytest.raises(setup.SetupError, match=r"make lock(?s:.*)alpha 1.0 requires beta"):
        setup.check_complete(python)


def test_a_tampered_wheel_is_refused_in_one_line(python: str, configured: Path, requirements: Path) -> None:
    good = publish(configured, "alpha", "1.0")
    (requirements / "core.txt").write_text(f"alpha==1.0 --hash=sha256:{sha256(good)}\n")
    publish(configured, "alpha", "1.0", needs=("something-else",))
    with pytest.raises(setup.SetupError, match=r"^alpha==1.0: the file .* is not the one whose SHA-256 stands in requirements/") as refused:
        setup.install_hashed(python, [setup.hashed("core")])
    assert "\n" not in str(refused.value)
    assert installed(python) == ""


def test_a_list_without_a_hash_installs_nothing(python: str, configured: Path, requirements: Path) -> None:
    publish(configured, "alpha", "1.0")
    (requirements / "core.txt").write_text("alpha==1.0\n")
    with pytest.raises(setup.CommandError, match=r"(?i)hash"):
        setup.install_hashed(python, [setup.hashed("core")])
    assert installed(python) == ""


def test_an_unknown_extra_is_named() -> None:
    with pytest.raises(setup.SetupError, match="no extra named 'modles'"):
        setup.set_up(Path("nowhere"), ("modles",), editable=True)


def test_torch_comes_from_the_configured_sources(
    python: str, configured: Path, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_torch(requirements, publish(configured, "torch", setup.TORCH))
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "not there").as_uri())
    setup.install_torch(python)
    assert f"torch=={setup.TORCH}" in installed(python)


def test_where_they_lack_it_torch_comes_from_the_other_index(
    python: str, configured: Path, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(configured, "torch", setup.TORCH.partition("+")[0])  # The build that pulls in CUDA does not count.
    know_torch(requirements, publish(tmp_path / "other", "torch", setup.TORCH))
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    setup.install_torch(python)
    assert f"torch=={setup.TORCH}" in installed(python)


def test_where_neither_has_it_the_error_says_what_to_set(
    python: str, configured: Path, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_torch(requirements, publish(tmp_path / "other", "torch", "1.0"))
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    with pytest.raises(setup.SetupError, match=r"neither in .* nor at (?s:.*)Set TORCH_INDEX_URL"):
        setup.install_torch(python)
    assert "torch" not in installed(python)


def test_another_torch_is_refused_and_not_sought_elsewhere(
    python: str, configured: Path, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_torch(requirements, publish(tmp_path / "other", "torch", setup.TORCH))
    publish(configured, "torch", setup.TORCH).write_bytes(b"cut off")
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    with pytest.raises(setup.SetupError, match=r"^torch==.*: the file .* is not the one"):
        setup.install_torch(python)
    assert "torch" not in installed(python)


def test_a_torch_without_a_known_hash_is_installed_only_when_allowed(python: str, configured: Path, requirements: Path) -> None:
    publish(configured, "torch", setup.TORCH)
    know_torch(requirements)
    with pytest.raises(setup.SetupError, match=rf"no hash of torch .* for Python {PYTHON} .*--allow-unhashed-torch") as stopped:
        setup.install_torch(python)
    assert "\n" not in str(stopped.value)
    assert "torch" not in installed(python)
    setup.install_torch(python, allow_unhashed=True)
    assert f"torch=={setup.TORCH}" in installed(python)


def test_what_is_allowed_to_be_unhashed_is_checked_where_a_hash_is_known(python: str, configured: Path, requirements: Path) -> None:
    know_torch(requirements, publish(configured, "torch", setup.TORCH))
    publish(configured, "torch", setup.TORCH, needs=("something-else",))
    with pytest.raises(setup.SetupError, match=r"^torch==.*: the file .* is not the one"):
        setup.install_torch(python, allow_unhashed=True)
    assert "torch" not in installed(python)


def test_for_cuda_the_build_without_a_label_is_installed(python: str, configured: Path, requirements: Path) -> None:
    """And no other one, though a build with a label counts as newer."""
    publish(configured, "torch", setup.TORCH)
    know_torch(requirements, publish(configured, "torch", setup.TORCH_CUDA), build=setup.TORCH_CUDA)
    setup.install_torch(python, device="cuda")
    assert f"torch=={setup.TORCH_CUDA}\n" in installed(python)


def test_where_the_sources_lack_it_the_build_for_cuda_is_not_sought_among_those_for_cpus(
    python: str, configured: Path, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    wheel = publish(tmp_path / "other", "torch", setup.TORCH_CUDA)
    know_torch(requirements, wheel, build=setup.TORCH_CUDA)
    with pytest.raises(setup.SetupError, match=r"torch 2\S+ was not found in pip's configured sources\. Set TORCH_INDEX_URL"):
        setup.install_torch(python, device="cuda")
    assert "torch" not in installed(python)
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    setup.install_torch(python, device="cuda")
    assert f"torch=={setup.TORCH_CUDA}\n" in installed(python)


def test_the_libraries_for_cuda_are_installed_where_torch_is_for_cuda() -> None:
    names = {device: [path.stem for path in setup.lists_of(("cli", "models"), device)] for device in setup.BUILDS}
    assert names == {"cpu": ["core", "cli", "models"], "cuda": ["core", "cli", "models", "cuda"]}
    assert [path.stem for path in setup.lists_of(("cli",), "cuda")] == ["core", "cli"], "without torch there is nothing for them to do"


@pytest.mark.parametrize(("words", "told"), [([], ""), (["DEVICE=cuda"], "--device cuda")])
def test_make_hands_the_device_over(words: list[str], told: str) -> None:
    # As from a shell: a make above this one would pass its options on, and have the folders printed.
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DEVICE")}
    command = ["make", "--dry-run", "setup", *words]
    shown = subprocess.run(command, cwd=setup.ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    assert " ".join(shown.split()) == f"python3 tools/setup.py {told}".strip()


def test_an_unknown_device_is_refused() -> None:
    command = [sys.executable, str(setup.ROOT / "tools" / "setup.py"), "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "invalid choice: 'tpu' (choose from 'cpu', 'cuda')" in done.stderr


def test_a_cuda_package_is_refused_by_name(python: str, configured: Path) -> None:
    setup.refuse_cuda(python)
    setup.pip(python, str(publish(configured, "nvidia_cublas_cu12", "12.0")))
    with pytest.raises(setup.SetupError, match="nvidia-cublas-cu12"):
        setup.refuse_cuda(python)


def test_an_environment_that_was_moved_or_is_no_environment_is_not_used(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    assert setup.can_use(venv)
    moved = tmp_path / "moved"
    shutil.copytree(venv, moved, symlinks=True)
    assert not setup.can_use(moved)
    (venv / "bin" / "python").unlink()
    assert not setup.can_use(venv)
    assert not setup.can_use(tmp_path)


def test_nothing_is_done_when_nothing_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    venv = Path(sys.prefix)
    if setup.read_stamp(venv / setup.STAMP).get("digest") != setup.inputs_digest(editable=True):
        pytest.fail(f"{venv} is not what tools/setup.py would make now: use `make test`, which runs it first")
    before = (venv / setup.STAMP).stat().st_mtime_ns
    setup.set_up(venv, setup.DEV, editable=True)
    assert capsys.readouterr().out == ""
    assert (venv / setup.STAMP).stat().st_mtime_ns == before
