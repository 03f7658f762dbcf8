"""Scripts on a private mount of shared memory, of any size: they see nothing of others, and nobody sees what they leave."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest


def need_namespace(*flags: str) -> None:
    """Skip the test where this process may not make such a namespace (flags of unshare(1))."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for a namespace of its own")
    if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not allow such a namespace")


BALLAST = Path("/dev/shm/ballast")


def leave_free(size: int) -> None:
    """Take all memory of such a mount but `size` bytes, by a file that is all of it."""
    BALLAST.unlink(missing_ok=True)
    with BALLAST.open("wb") as file:
        for _ in range(1000):
            mount = os.statvfs(BALLAST.parent)
            try:
                os.posix_fallocate(file.fileno(), 0, max(mount.f_bavail * mount.f_frsize - size, 1))
            except OSError as error:
                if error.errno != errno.ENOSPC:  # A stage took some between the look and the grasp: look again.
                    raise
            else:
                return
    raise AssertionError("the mount could not be filled")


def run_on_mount(size: str, *scripts: str, arguments: Sequence[str] = (), timeout_s: float = 60.0) -> str:
    """Run scripts, one after the other, on a fresh /dev/shm of this size; returns what they print. A signal or an error fails the test."""
    need_namespace("-m")
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not allow a mount")
    source = "".join(textwrap.dedent(script) for script in scripts)
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$@"', sys.executable, source, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
