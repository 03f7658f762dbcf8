"""Two facts that are equal for all processes that see the same shared memory. Only the probe of an offer (transport.py) proves it."""

import functools
from pathlib import Path

MOUNT = Path("/dev/shm")
"""Where the C library keeps POSIX shared memory on Linux (shm_open(3))."""


@functools.cache
def boot_id() -> str:
    """Identity of this boot of this kernel: equal on one host, also across containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()


def mount_device() -> str:
    """st_dev of the shared-memory mount: equal for containers that share it, different for private mounts."""
    return str(MOUNT.stat().st_dev)
