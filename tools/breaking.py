"""Compares the protos with their last version by `buf breaking`: only compatible additions may follow it.

The last version is main's, when the protos here differ from it; else (this is main) the one before the newest commit that touched
them. In a first commit or a shallow clone there is nothing to compare, which is said and is no failure.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs git in the repository; the caller looks at the exit status."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def has_protos(revision: str) -> bool:
    """Whether the revision exists and holds protos."""
    return git("rev-parse", "--verify", "--quiet", f"{revision}:protos").returncode == 0


def last_version() -> str | None:
    """The revision to compare with, or None when there is no earlier one."""
    for main in ("origin/main", "main"):
        if has_protos(main) and git("diff", "--quiet", main, "--", "protos").returncode == 1:
            return main
    touched = git("log", "-n", "1", "--format=%H", "HEAD", "--", "protos").stdout.decode().strip()
    before = f"{touched}^"
    return before if touched and has_protos(before) else None


def main() -> int:
    """Exit status 1 when something in the protos breaks those who speak the last version."""
    revision = last_version()
    if revision is None:
        print("nothing to compare: no earlier version of the protos in this clone")
        return 0
    archive = subprocess.run(["git", "archive", "--format=zip", revision, "protos"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(archive)) as packed:
        packed.extractall(folder)
        buf = Path(sys.executable).parent / "buf"
        print(f"against {revision}")
        return subprocess.run([str(buf), "breaking", "protos", "--against", f"{folder}/protos"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
