"""Set-up from its first line to its last, as `make setup` runs it: in a checkout of a small project, with pip itself and tiny wheels."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.wheels import installed, publish, sha256, take, unpack
from tools import setup
from tools.torch_build import TORCH, TORCH_CUDA

# A whole set-up runs pip seven times, beside other tests.
pytestmark = [pytest.mark.timeout(400), lengths.TOOLING]

PYTHON = ".".join(platform.python_version_tuple()[:2])
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1.0"
"""
BACKEND = '''
"""Builds the wheel of a project without contents, and needs nothing for it."""
import pathlib, zipfile
def build_editable(folder, settings=None, metadata=None):
    name = "project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as packed:
        packed.writestr("project-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n")
        packed.writestr("project-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: a\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        packed.writestr("project-1.0.dist-info/RECORD", "")
    return name
'''


class Checkout:
    """A small project with the code of set-up, whose lists name what is in an index."""

    def __init__(self, root: Path, index: Path) -> None:
        self.root, self.venv = root, root / ".venv"
        self._index = index
        (root / "tools").mkdir(parents=True)
        (root / "requirements").mkdir()
        for source in setup.SOURCES:
            shutil.copy(source, root / "tools")
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "backend.py").write_text(BACKEND)
        for name, package in (("build", "tool"), ("core", "alpha"), ("models", "beta"), ("cuda", "nvidia_cublas")):
            self.list_packages(name, package)
        self.know()

    def list_packages(self, name: str, *packages: str) -> None:
        """Publish packages, and write a list of them."""
        wheels = {package: sha256(publish(self._index, package, "1.0")) for package in packages}
        text = "".join(f"{package}==1.0 --hash=sha256:{digest}\n" for package, digest in wheels.items())
        (self.root / "requirements" / f"{name}.txt").write_text(text)

    def know(self, *torches: Path) -> None:
        """Make these wheels of torch known."""
        table = {torch.name.split("-")[1]: {PYTHON: [sha256(torch)]} for torch in torches}
        (self.root / "requirements" / "torch.json").write_text(json.dumps(table))

    def publish_torch(self, build: str) -> Path:
        return publish(self._index, "torch", build)

    def withdraw_torch(self) -> None:
        shutil.rmtree(self._index / "torch")

    def set_up(self, *words: str, python: str = sys.executable) -> tuple[int, str]:
        """The exit status, and everything that was printed, without durations."""
        command = [python, str(self.root / "tools" / "setup.py"), "--extras", "models", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, re.sub(r" \d+ s$", "", done.stdout, flags=re.MULTILINE)

    def packages(self) -> list[str]:
        return sorted(installed(str(self.venv / "bin" / "python")).split())

    def stamp(self) -> dict[str, Any]:
        return setup.read_stamp(self.venv / setup.STAMP)

    def take(self, made: Path) -> None:
        """An environment that is there already."""
        take(made, self.venv)
        config = self.venv / "pyvenv.cfg"
        text = config.read_text().replace(str(made), str(self.venv))
        config.unlink()  # It is a link.
        config.write_text(text)


@pytest.fixture
def checkout(tmp_path: Path, configured: Path, other: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", configured)


def test_where_no_cpu_build_is_in_reach_the_default_build_comes_with_its_libraries_and_stays(checkout: Checkout) -> None:
    torch = checkout.publish_torch(TORCH_CUDA)
    checkout.know(torch)
    status, said = checkout.set_up()
    looking, chosen, making, *_ = said.splitlines()
    assert status == 0, said
    assert "looking for torch" in looking and "2.7 GB" in chosen and "virtual environment" in making
    assert checkout.packages() == ["alpha==1.0", "beta==1.0", "nvidia_cublas==1.0", "project==1.0", "tool==1.0", f"torch=={TORCH_CUDA}"]
    assert checkout.stamp()["device"] == "cpu"
    assert checkout.stamp()["torch"] == {"build": TORCH_CUDA, "sha256": sha256(torch)}
    checkout.withdraw_torch()
    assert checkout.set_up() == (0, "")


def test_a_changed_list_is_installed_and_torch_stays_as_it_came(checkout: Checkout, empty: Path) -> None:
    checkout.take(empty)
    unpack(checkout.publish_torch(TORCH_CUDA), checkout.venv)
    setup.write_stamp(checkout.venv, about := {"device": "cpu", "torch": {"build": TORCH_CUDA, "sha256": "of the wheel"}})
    checkout.withdraw_torch()
    checkout.list_packages("models", "gamma")
    status, said = checkout.set_up()
    assert status == 0 and "looking for torch" not in said, said
    assert {"gamma==1.0", "nvidia_cublas==1.0", f"torch=={TORCH_CUDA}"} <= {*checkout.packages()}
    assert about.items() <= checkout.stamp().items()


def test_beside_a_cpu_build_the_libraries_for_gpus_are_refused(checkout: Checkout, empty: Path) -> None:
    checkout.take(empty)
    checkout.know(checkout.publish_torch(TORCH))
    checkout.list_packages("models", "nvidia_cudnn")
    status, said = checkout.set_up()
    assert status == 1 and "CUDA packages got into the environment (nvidia-cudnn)" in said, said
    assert "digest" not in checkout.stamp(), "it is not taken for a finished one"


def test_an_environment_with_another_build_is_made_anew(checkout: Checkout, empty: Path) -> None:
    checkout.take(empty)
    unpack(checkout.publish_torch(TORCH_CUDA), checkout.venv)
    setup.write_stamp(checkout.venv, {"device": "cuda", "torch": {"build": TORCH_CUDA, "sha256": ""}})
    torch = checkout.publish_torch(TORCH)
    status, said = checkout.set_up("--device", "cpu")
    assert status == 0 and "comes unchecked" in said, said
    assert checkout.packages() == ["alpha==1.0", "beta==1.0", "project==1.0", "tool==1.0", f"torch=={TORCH}"]
    assert checkout.stamp()["torch"] == {"build": TORCH, "sha256": sha256(torch)}


def test_an_environment_stays_as_it_is_where_no_torch_can_be_had(checkout: Checkout, empty: Path) -> None:
    checkout.take(empty)
    unpack(checkout.publish_torch(TORCH), checkout.venv)
    setup.write_stamp(checkout.venv, {"device": "cpu", "torch": {"build": TORCH, "sha256": ""}})
    before = {path: path.lstat().st_mtime_ns for path in checkout.venv.rglob("*") if path.name != "__pycache__" and path.suffix != ".pyc"}
    checkout.withdraw_torch()
    status, said = checkout.set_up("--device", "cuda")
    assert status == 1 and f"torch {TORCH_CUDA} was found neither in" in said, said
    after = {path: path.lstat().st_mtime_ns for path in checkout.venv.rglob("*") if path.name != "__pycache__" and path.suffix != ".pyc"}
    assert after == before


def test_a_python_without_pip_chooses_too_and_makes_nothing_where_a_hash_is_required(checkout: Checkout, tmp_path: Path) -> None:
    """Debian's Python is such a one: its pip is another package."""
    checkout.publish_torch(TORCH)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    status, said = checkout.set_up("--require-torch-hash", python=str(bare / "bin" / "python"))
    assert status == 1 and f"no hash of torch {TORCH} for Python {PYTHON}" in said, said
    assert not checkout.venv.exists()
