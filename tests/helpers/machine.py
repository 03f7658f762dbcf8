"""Things on this machine beside files: they show that a test left nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The state of the machine that a docker daemon would change. shared_memory: files there of one user."""

    links: frozenset[str]
    rules: tuple[str, ...]
    forwarding: str
    mounts: frozenset[str]
    shared_memory: frozenset[str]
    folders: frozenset[str]

    @classmethod
    def now(cls, user: int) -> Machine:
        """user: owner of the files in shared memory that count."""
        return cls(
            links=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
            rules=tuple(line for program in ("iptables-save", "ip6tables-save") for line in _rules(program)),
            forwarding=Path("/proc/sys/net/ipv4/ip_forward").read_text().strip(),
            mounts=frozenset(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
            shared_memory=frozenset(path.name for path in Path("/dev/shm").iterdir() if path.lstat().st_uid == user),
            folders=frozenset(name for name in ("/etc/docker", "/run/docker", "/run/containerd", "/var/lib/docker") if Path(name).exists()),
        )


def processes_in(namespace: str) -> list[int]:
    """The processes in a process namespace, named as in /proc/PID/ns/pid."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and _link(folder / "ns" / "pid") == namespace:
            found.append(int(folder.name))
    return found


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _rules(program: str) -> list[str]:
    """Chains and rules without their counters."""
    if shutil.which(program) is None:
        return []
    done = subprocess.run([program], capture_output=True, text=True, timeout=30, check=True)
    return [re.sub(r"\[\d+:\d+\]", "", line) for line in done.stdout.splitlines() if not line.startswith("#")]
