"""The languages of the clients in examples/: what each needs on this machine, and how its example is built."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnistage.cli.show.commands import write_protos

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "examples"
PROTOS = BUILT / "protos"
INSTALL_TIMEOUT_S = 600.0
BUILD_TIMEOUT_S = 900.0

GO_PACKAGES = Path("/usr/share/gocode/src/google.golang.org")
JARS = Path("/usr/share/java")


class ToolchainError(RuntimeError):
    """Something that a language needs is missing, or failed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Language:
    """A language of a client in examples/. programs, files: the toolchain is there if all of them exist. packages: of Debian 12, which
    bring them. command: runs the built example; {built} stands for the folder of the build."""

    name: str
    programs: tuple[str, ...]
    files: tuple[Path, ...]
    packages: tuple[str, ...]
    command: tuple[str, ...] = ("{built}/ask",)

    @property
    def source(self) -> Path:
        return ROOT / "examples" / self.name

    @property
    def built(self) -> Path:
        return BUILT / self.name

    def missing(self) -> list[str]:
        """Programs and files that this machine lacks."""
        return [
            *(program for program in self.programs if shutil.which(program) is None),
            *(str(path) for path in self.files if not path.exists()),
        ]


# protoc's package only recommends libprotobuf-dev, which has the protos that our protos import.
_PROTOC = ("protobuf-compiler", "libprotobuf-dev", "make")
_DURATION = Path("/usr/include/google/protobuf/duration.proto")

LANGUAGES: Mapping[str, Language] = {
    language.name: language
    for language in (
        Language("node", ("node", "npm"), (), ("nodejs", "npm"), ("node", "{built}/ask.js")),
        Language(
            "go",
            ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc", "make"),
            (_DURATION, GO_PACKAGES / "grpc", GO_PACKAGES / "protobuf"),
            # Two packages of protobuf fit its gRPC. The newer is named, because the older lacks functions that protoc-gen-go's output uses.
            (
                "golang-go",
                "golang-google-grpc-dev",
                "golang-github-golang-protobuf-1-5-dev",
                "protoc-gen-go",
                "protoc-gen-go-grpc",
                *_PROTOC,
            ),
        ),
        Language(
            "cpp",
            ("g++", "protoc", "grpc_cpp_plugin", "pkg-config", "make"),
            (_DURATION, Path("/usr/include/grpcpp/grpcpp.h")),
            ("g++", "libgrpc++-dev", "protobuf-compiler-grpc", "pkg-config", *_PROTOC),
        ),
        Language(
            "java",
            ("javac", "java", "protoc", "grpc_java_plugin", "make"),
            (_DURATION, *(JARS / f"{name}.jar" for name in ("grpc-netty", "protobuf", "guava", "netty-codec-http2", "perfmark-api"))),
            (
                *("default-jdk-headless", "libgrpc-java", "protobuf-compiler-grpc-java-plugin", "libprotobuf-java", "libguava-java"),
                # libgrpc-java uses these, but does not require them.
                *("libnetty-java", "libperfmark-java", "libgeronimo-annotation-1.3-spec-java"),
                *_PROTOC,
            ),
        ),
    )
}


def install(language: Language) -> None:
    """Install the toolchain of a language from Debian, if any of it is missing. Raises ToolchainError."""
    missing = language.missing()
    if not missing:
        return
    fault = f"{language.name}: {', '.join(missing)} missing"
    command = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", "--no-remove", *language.packages]
    if shutil.which("apt-get") is None:
        raise ToolchainError(f"{fault}; install what Debian has as {' '.join(language.packages)}")
    if os.geteuid() != 0:
        raise ToolchainError(f"{fault}; install them first: sudo apt-get install {' '.join(language.packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _alone(BUILT):
        try:
            _run(command, environment, INSTALL_TIMEOUT_S)
        except ToolchainError:
            # The lists of packages may be old or missing.
            _run(["apt-get", "update", "--quiet=2"], environment, INSTALL_TIMEOUT_S)
            _run(command, environment, INSTALL_TIMEOUT_S)
    if missing := language.missing():
        raise ToolchainError(f"{language.name}: {', '.join(missing)} missing after {' '.join(command)}")


def build(language: Language) -> list[str]:
    """Build the example of a language from the protos of this checkout. Returns the command that runs it. Raises ToolchainError."""
    with _alone(BUILT):
        _write_protos()
        language.built.mkdir(parents=True, exist_ok=True)
        if language.name == "node":
            # npm installs next to package.json, and the program must be there too.
            shutil.copy(language.source / "ask.js", language.built)
            install_modules((language.source / "package.json").read_bytes(), language.built)
        else:
            make = ["make", "--silent", "--jobs=2", f"--directory={language.source}", f"PROTOS={PROTOS}", f"OUT={language.built}"]
            _run(make, os.environ, BUILD_TIMEOUT_S)
    return [word.format(built=language.built) for word in language.command]


def _write_protos() -> None:
    """Bring the protos for the builds up to date. An unchanged file is not copied, because the copy would be newer than its build."""
    fresh = BUILT / "fresh"
    for path in write_protos(fresh, errors=True):
        place = PROTOS / path.relative_to(fresh)
        if not place.exists() or place.read_bytes() != path.read_bytes():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    shutil.rmtree(fresh)


def with_modules(source: Path, program: str) -> Path:
    """Copy a program of Node to a folder, and install the packages of its package.json there. Returns the path of the copy. Raises
    ToolchainError."""
    built = BUILT / source.relative_to(ROOT / "examples")
    built.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / program, built)
    install_modules((source / "package.json").read_bytes(), built)
    return built / program


def install_modules(package: bytes, folder: Path) -> None:
    """Install packages by npm into a folder; nothing is fetched if that is done already. package: contents of package.json. Raises
    ToolchainError."""
    with _alone(folder):
        done = folder / "installed.json"
        if done.exists() and done.read_bytes() == package and (folder / "node_modules").is_dir():
            return
        (folder / "package.json").write_bytes(package)
        options = ["--no-package-lock", "--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--prefer-offline"]
        _run(["npm", "install", f"--prefix={folder}", *options], os.environ, INSTALL_TIMEOUT_S)
        done.write_bytes(package)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside this block no other process builds in the folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> None:
    """Run a command to its end. Raises ToolchainError if it fails, or takes longer than timeout_s."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"{' '.join(command)}: took more than {timeout_s:g} s") from None
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
