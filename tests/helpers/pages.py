"""The pages that the kernel of this machine has."""

from __future__ import annotations

import re
from pathlib import Path


def has_huge_pages() -> bool:
    """Whether the kernel can be asked for them at once (Linux 6.1) and they are not switched off."""
    version = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return version is not None and tuple(map(int, version.groups())) >= (6, 1) and switch.exists() and "[never]" not in switch.read_text()
