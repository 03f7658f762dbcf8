"""Builds the released packages into dist/: the wheels of omnistage and of omnistage-pictures (`make wheels`).

The tools of the build come from requirements/build.txt, with hashes, apart from any environment, so no set-up is needed. The same sources
give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools import apart
from tools.commands import SetupError, run
from tools.setup import PICTURES, ROOT, python_with_pip

DATE = "1580601600"
"""Time of all files in a wheel, whatever the environment says; hatchling's default."""


def build(folder: Path, root: Path = ROOT) -> list[Path]:
    """Build the wheels of the checkout in `root` into `folder`, remove older ones there, and return the paths of all. Raises SetupError."""
    for old in folder.glob("omnistage*.whl"):
        old.unlink()
    with python_with_pip(sys.executable) as python:
        tools = apart.variables(apart.folder_of("build", python))
    for project in (root, root / PICTURES.name):
        command = [sys.executable, "-S", "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        run(command, project, **{**tools, "SOURCE_DATE_EPOCH": DATE})
    return sorted(folder.glob("omnistage*.whl"))


def main() -> int:
    """Build, and print what was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the wheels go (default: dist)")
    folder = parser.parse_args().folder.absolute()
    try:
        wheels = build(folder)
    except SetupError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:5.1f} MB  {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
