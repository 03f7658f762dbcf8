"""A docker daemon of the test's own, in namespaces of its own: nothing of it outlives it, and nobody else's docker is touched.

Its network, mounts and processes are not those of the machine, so bridges, firewall rules, forwarding and mounts end with it. Its network
has no way out. Writes outside of its folder go into a layer of memory over /etc, /run and /opt that it alone sees."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from helpers.processes import wait_end

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("dockerd", "containerd", "runc", "docker", "iptables", "ip", "mount", "setpriv", "unshare", "nsenter", "make")
UNSHARED = ("unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc", "--propagation", "private")
FREE_BYTES = 10 << 30
"""The free bytes of the disk that the daemon needs. Where that much memory is free, the layers lie in memory: they are written, read and
removed there in a fraction of the time."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0

START = """
set -eu
folder=$1 in_memory=$2; shift 2
if [ "$in_memory" != 0 ]; then
    mkdir "$folder/data"
    mount -t tmpfs -o "size=$in_memory" tmpfs "$folder/data"
fi
ip link set lo up
mkdir "$folder/own"
mount -t tmpfs tmpfs "$folder/own"
for name in etc run opt; do
    mkdir -p "$folder/own/$name/upper" "$folder/own/$name/work"
    mount -t overlay -o "lowerdir=/$name,upperdir=$folder/own/$name/upper,workdir=$folder/own/$name/work" overlay "/$name"
done
exec dockerd "$@"
"""

PROBE = """
set -eu
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work overlay /etc
ip link add name probe type bridge
iptables --table nat --list
"""


def obstacle() -> str:
    """Why no daemon can run here; empty if one can."""
    if os.geteuid() != 0:
        return "a docker daemon of the test's own needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    if (free := shutil.disk_usage(tempfile.gettempdir()).free) < FREE_BYTES:
        return f"images need {FREE_BYTES >> 30} GB in {tempfile.gettempdir()}, and {free >> 30} are free"
    done = subprocess.run([*UNSHARED, "sh", "-c", PROBE], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        return f"this machine allows no namespaces with overlay, bridge and NAT: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return ""


class Daemon:
    """The daemon, from `start` to `stop`. kept: a folder for its images, which stays; None: they go with the daemon. environment: for
    docker, docker-compose and make, so that they talk to it and to no other."""

    def __init__(self, kept: Path | None = None) -> None:
        # Not pytest's folder: the path of a socket has little room.
        self.folder = Path(tempfile.mkdtemp(prefix="omnistage-docker-"))
        self._kept = kept
        self.cgroup = self.folder.name
        self.log_path = self.folder / "log"
        theirs = ("COMPOSE_", "DOCKER_", "BUILDKIT_", "OMNISTAGE_", "MAKE", "MFLAGS")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        self.environment |= {
            "DOCKER_HOST": f"unix://{self.folder}/socket",
            "DOCKER_CONFIG": str(self.folder / "config"),
            # One after the other: the classic builder takes from its cache only what another build has finished.
            "COMPOSE_PARALLEL_LIMIT": "1",
        }
        self._unshare: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """The process id of dockerd, as this machine sees it."""

    def start(self) -> None:
        """Return when it takes calls. Raises AssertionError with its log."""
        in_memory = _in_memory() if self._kept is None else 0
        command = ["setpriv", "--pdeathsig", "KILL", *UNSHARED, "sh", "-c", START, "sh", str(self.folder), str(in_memory)]
        command += [f"--data-root={self._kept or self.folder / 'data'}", f"--exec-root={self.folder}/exec", f"--pidfile={self.folder}/pid"]
        command += ["--storage-driver=overlay2", "--host", self.environment["DOCKER_HOST"], "--cgroup-parent", f"/{self.cgroup}"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, self.log_path.open("wb") as log:
            notified.bind(str(self.folder / "notify"))
            environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify")}
            self._unshare = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            self._wait_ready(notified, self._unshare.pid)
        (self.pid,) = _children(self._unshare.pid)

    def _wait_ready(self, notified: socket.socket, pid: int) -> None:
        ended = os.pidfd_open(pid)
        try:
            readable, _, _ = select.select([notified.fileno(), ended], [], [], START_TIMEOUT_S)
        finally:
            os.close(ended)
        told = notified.recv(1024) if notified.fileno() in readable else b""
        assert b"READY=1" in told, f"dockerd did not start:\n{self.log()}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def run(self, *command: str, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None) -> str:
        """The output of a command that talks to this daemon. Raises AssertionError with all of it if the command fails."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}"
        return done.stdout

    def docker(self, *arguments: str, timeout_s: float = 60.0) -> str:
        return self.run("docker", *arguments, timeout_s=timeout_s)

    def import_image(self, name: str, write: Callable[[IO[bytes]], None], timeout_s: float) -> None:
        """Make an image of one layer from the tar that `write` writes. Raises AssertionError with what docker complains of."""
        pipe, command = subprocess.PIPE, ("docker", "import", "-", name)
        with subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as importing:
            assert importing.stdin is not None
            try:
                write(importing.stdin)
                _, complaint = importing.communicate(timeout=timeout_s)
            except BrokenPipeError:  # it has ended, and says why
                _, complaint = importing.communicate(timeout=timeout_s)
            finally:
                importing.kill()
        assert importing.returncode == 0, (
            f"{' '.join(command)} ended with {importing.returncode}:\n{complaint.decode(errors='replace')[-8000:]}"
        )

    def lay(self, name: str, files: Iterable[tuple[Path, str]]) -> None:
        """Put files into the layer of an image that no container has yet, as hard links where the disk is the same: a tar of gigabytes
        would be read, hashed and written. Nobody writes to a layer, but to one above it. A file that only its owner can read is copied,
        because containers have another user."""
        layer = Path(self.docker("image", "inspect", "--format", "{{.GraphDriver.Data.UpperDir}}", name).strip())
        if not layer.exists():  # It is in memory that the daemon alone sees.
            layer = Path(f"/proc/{self.pid}/root", layer.relative_to("/"))
        for path, place in files:
            target = layer / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() or path.stat().st_mode & stat.S_IROTH:
                with suppress(OSError):  # Another disk, or memory.
                    os.link(path, target, follow_symlinks=False)
                    continue
            shutil.copy2(path, target, follow_symlinks=False)
            if not target.is_symlink():
                target.chmod(0o644)

    def inspect(self, container: str, template: str) -> str:
        return self.docker("inspect", "--format", template, container).strip()

    def beside(self, *command: str) -> list[str]:
        """A command line that runs in the daemon's network, where published ports are."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def crash(self, container: str) -> None:
        """SIGKILL to the main process of a container. After `docker kill` docker restarts nothing: it takes that for a decision."""
        pid = self.inspect(container, "{{.State.Pid}}")
        assert int(pid) > 1
        self.run("nsenter", "--target", str(self.pid), "--pid", "--", "kill", "-KILL", pid)

    def stop(self) -> None:
        """End it and remove what it stored, but for images that are kept. May be called again."""
        unshare, self._unshare = self._unshare, None
        if unshare is not None:
            # The first process of a process namespace takes all others with it, and ends after them.
            for pid in _children(unshare.pid):
                os.kill(pid, signal.SIGTERM)
                if not wait_end(pid, STOP_TIMEOUT_S):
                    os.kill(pid, signal.SIGKILL)
                    wait_end(pid, STOP_TIMEOUT_S)
            unshare.wait(STOP_TIMEOUT_S)
        for cgroup in self.cgroups():
            # A group goes after those in it.
            for group in [*sorted((path for path in cgroup.rglob("*") if path.is_dir()), reverse=True), cgroup]:
                group.rmdir()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def cgroups(self) -> list[Path]:
        return [path for pattern in ("", "*/") for path in Path("/sys/fs/cgroup").glob(f"{pattern}{self.cgroup}")]


def compose_program() -> str:
    return str(Path(sys.executable).parent / "docker-compose")


def _in_memory() -> int:
    """How many bytes of images the memory may hold; 0 where they are better put on the disk."""
    available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return FREE_BYTES if available and int(available[1]) << 10 > FREE_BYTES * 3 // 2 else 0


def _children(pid: int) -> list[int]:
    """None of a process that is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


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
        with suppress(OSError):  # It has ended, or is another user's.
            if folder.name.isdecimal() and str((folder / "ns" / "pid").readlink()) == namespace:
                found.append(int(folder.name))
    return found


def _rules(program: str) -> list[str]:
    """Chains and rules without their counters."""
    if shutil.which(program) is None:
        return []
    done = subprocess.run([program], capture_output=True, text=True, timeout=30, check=True)
    return [re.sub(r"\[\d+:\d+\]", "", line) for line in done.stdout.splitlines() if not line.startswith("#")]
