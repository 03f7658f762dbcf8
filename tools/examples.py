"""`make examples`: installs what the clients of examples/ in other languages need, builds them, and runs their tests.

`tests/client/test_examples.py` has these tests: each client gives the text and the samples of the Python client, and says what is wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnistage.cli.show.commands import write_protos

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BUILT = ROOT / "build" / "examples"
PROTOS = BUILT / "protos"
INSTALL_TIMEOUT_S = 600.0
BUILD_TIMEOUT_S = 900.0


class ToolchainError(RuntimeError):
    """Something that a language needs is missing, or failed; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Language:
    """A language of a client in examples/. needs: names of programs, and paths of files; the toolchain is there if all of them are.
    packages: of Debian 12, which bring them."""

    name: str
    needs: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def source(self) -> Path:
        return EXAMPLES / self.name

    @property
    def built(self) -> Path:
        return BUILT / self.name

    def missing(self) -> list[str]:
        """Programs and files that this machine lacks."""
        return [need for need in self.needs if not (Path(need).exists() if "/" in need else shutil.which(need))]


# protoc's package only recommends libprotobuf-dev, which has the protos that our protos import.
PROTOC = ("protoc", "make", "/usr/include/google/protobuf/duration.proto")
PROTOC_PACKAGES = ("protobuf-compiler", "libprotobuf-dev", "make")
GO = "/usr/share/gocode/src/google.golang.org"
JARS = ("grpc-netty", "protobuf", "guava", "netty-codec-http2", "perfmark-api")
# Two packages of protobuf fit Go's gRPC. The newer is named, because the older lacks functions that protoc-gen-go's output uses.
GO_PACKAGES = "golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go protoc-gen-go-grpc"
# libgrpc-java uses the last three, but does not require them.
JAVA_PACKAGES = """default-jdk-headless libgrpc-java protobuf-compiler-grpc-java-plugin libprotobuf-java libguava-java
    libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java"""

_LANGUAGES = (
    Language("node", ("node", "npm"), ("nodejs", "npm")),
    Language(
        "go",
        ("go", "protoc-gen-go", "protoc-gen-go-grpc", f"{GO}/grpc", f"{GO}/protobuf", *PROTOC),
        (*GO_PACKAGES.split(), *PROTOC_PACKAGES),
    ),
    Language(
        "cpp",
        ("g++", "grpc_cpp_plugin", "pkg-config", "/usr/include/grpcpp/grpcpp.h", *PROTOC),
        ("g++", "libgrpc++-dev", "protobuf-compiler-grpc", "pkg-config", *PROTOC_PACKAGES),
    ),
    Language(
        "java",
        ("javac", "java", "grpc_java_plugin", *(f"/usr/share/java/{name}.jar" for name in JARS), *PROTOC),
        (*JAVA_PACKAGES.split(), *PROTOC_PACKAGES),
    ),
)
LANGUAGES: Mapping[str, Language] = {language.name: language for language in _LANGUAGES}


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
    with _hold_folder(BUILT):
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
    with _hold_folder(BUILT):
        _write_protos()
    if language.name == "node":
        return ["node", str(with_modules(language.source, "ask.js"))]
    with _hold_folder(language.built):
        make = ["make", "--silent", "--jobs=2", f"--directory={language.source}", f"PROTOS={PROTOS}", f"OUT={language.built}"]
        _run(make, os.environ, BUILD_TIMEOUT_S)
    return [str(language.built / "ask")]


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
    built = BUILT / source.relative_to(EXAMPLES)
    built.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / program, built)
    install_modules((source / "package.json").read_bytes(), built)
    return built / program


def install_modules(package: bytes, folder: Path) -> None:
    """Install packages by npm into a folder; nothing is fetched if that is done already. package: contents of package.json. Raises
    ToolchainError."""
    with _hold_folder(folder):
        done = folder / "installed.json"
        if done.exists() and done.read_bytes() == package and (folder / "node_modules").is_dir():
            return
        (folder / "package.json").write_bytes(package)
        options = ["--no-package-lock", "--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--prefer-offline"]
        _run(["npm", "install", f"--prefix={folder}", *options], os.environ, INSTALL_TIMEOUT_S)
        done.write_bytes(package)


@contextmanager
def _hold_folder(folder: Path) -> Iterator[None]:
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


def main() -> int:
    """Install, build and test the examples. Exit status 1 if one could not be built, or did something else than expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("languages", nargs="*", default=list(LANGUAGES), help=f"some of {', '.join(LANGUAGES)}; default: all")
    languages: list[str] = parser.parse_args().languages
    if unknown := sorted({*languages} - LANGUAGES.keys()):
        parser.error(f"no example in {', '.join(unknown)}; there are {', '.join(LANGUAGES)}")
    ready = []
    for name in languages:
        try:
            install(LANGUAGES[name])
            build(LANGUAGES[name])
            ready.append(name)
        except ToolchainError as error:
            print(f"FAIL {name:<5} {error}", flush=True)
    if not ready:
        return 1
    command = [sys.executable, "-m", "pytest", "--verbose", "-m", "", "-k", " or ".join(ready), "tests/client/test_examples.py"]
    tests = subprocess.run(command, cwd=ROOT, check=False)
    return 1 if tests.returncode or len(ready) < len(languages) else 0


if __name__ == "__main__":
    sys.exit(main())
