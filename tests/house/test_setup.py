"""The set-up: where PyTorch comes from, what is refused, and when an environment is used as it is. With pip itself and tiny wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import setup


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
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "TORCH_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    return index


def publish(index: Path, name: str, version: str) -> Path:
    """Put a wheel without contents into a package index that is a folder; returns the wheel."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>', encoding="utf-8")
    return wheel


def installed(python: str) -> str:
    return subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout


def test_torch_comes_from_the_configured_sources(python: str, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(configured, "torch", setup.TORCH)
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "not there").as_uri())
    setup.install_torch(python)
    assert f"torch=={setup.TORCH}" in installed(python)


def test_where_they_lack_it_torch_comes_from_the_other_index(
    python: str, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(configured, "torch", setup.TORCH.partition("+")[0])  # The build that pulls in CUDA does not count.
    publish(tmp_path / "other", "torch", setup.TORCH)
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    setup.install_torch(python)
    assert f"torch=={setup.TORCH}" in installed(python)


def test_where_neither_has_it_the_error_says_what_to_set(
    python: str, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "other", "torch", "1.0")
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    with pytest.raises(setup.SetupError, match=r"neither in .* nor at (?s:.*)Set TORCH_INDEX_URL"):
        setup.install_torch(python)
    assert "torch" not in installed(python)


def test_a_broken_download_is_told_and_not_sought_elsewhere(
    python: str, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(configured, "torch", setup.TORCH).write_bytes(b"cut off")
    publish(tmp_path / "other", "torch", setup.TORCH)
    monkeypatch.setenv("TORCH_INDEX_URL", (tmp_path / "other").as_uri())
    with pytest.raises(setup.CommandError, match="pip install"):
        setup.install_torch(python)
    assert "torch" not in installed(python)


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
