"""Package indexes that are folders, with wheels that hold nothing but what they say of themselves; and what was installed of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ANY = "py3-none-any"
LIST = """
from importlib.metadata import distributions
for found in distributions():
    if found.name not in ("pip", "setuptools"):
        print(f"{found.name}=={found.version}")
"""


def use_only(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder the only source that pip is configured for."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "TORCH_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)


def publish(index: Path, name: str, version: str, *, tag: str = ANY, needs: tuple[str, ...] = (), extra: str = "") -> Path:
    """Put a wheel into an index; returns the wheel. needs: its lines Requires-Dist. extra: one that it offers."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    about = f"{name}-{version}.dist-info"
    said = [f"Requires-Dist: {one}" for one in needs] + ([f"Provides-Extra: {extra}"] if extra else [])
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(f"{about}/METADATA", "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *said, ""]))
        packed.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        packed.writestr(f"{about}/RECORD", "")
    links = (f'<a href="{one.name.replace("+", "%2B")}">{one.name}</a>' for one in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text("\n".join(links), encoding="utf-8")
    return wheel


def unpack(wheel: Path, venv: Path) -> None:
    """Put a wheel into an environment as pip does, in no time."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(packages)


def environment(venv: Path) -> Path:
    """Make an environment with nothing but the pip that is here: Python itself would install another one, for seconds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    for file in distribution("pip").files or ():
        if ".." not in file.parts:
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), packages / file)
    return venv


def take(made: Path, venv: Path) -> None:
    """Copy an environment as links: pip puts new files in the place of old ones and writes to none."""
    shutil.copytree(made, venv, symlinks=True, copy_function=os.link)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installed(python: str) -> str:
    """A line for each package beside pip's own, whatever is on the path of the tests."""
    return subprocess.run([python, "-I", "-c", LIST], capture_output=True, text=True, check=True).stdout
