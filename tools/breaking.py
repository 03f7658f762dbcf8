"""Compares the protos with their last version by `buf breaking`: only compatible additions are allowed after that version.

In a shallow clone, which does not have the last version, there is nothing to compare: the command says so and does not fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAST_VERSION = "e8638dd9c6a03f3fc84af881427a694751ceb905"
"""The newest released commit: a stack that runs it may be upgraded to this checkout, process by process. Set it with each release. A commit
in the middle of a change does not qualify, because its parts need not fit together."""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in the repository; the caller looks at the exit status."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def last_version() -> str | None:
    """The commit of the last version; None if this clone does not have it."""
    is_known = git("rev-parse", "--verify", "--quiet", f"{LAST_VERSION}:protos").returncode == 0
    return LAST_VERSION if is_known else None


def main() -> int:
    """Compare the protos. Exit status 1 if a change breaks programs that speak the last version."""
    revision = last_version()
    if revision is None:
        print("nothing to compare: this clone does not have the last version")
        return 0
    against = f"{git('rev-parse', '--git-common-dir').stdout.decode().strip()}#format=git,commit={revision},subdir=protos"
    print(f"against {revision}")
    command = [str(Path(sys.executable).with_name("buf")), "breaking", "protos", "--against", against]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
