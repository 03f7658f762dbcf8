"""`make examples`: installs what the clients of examples/ in other languages need, builds them, and runs each, and the Python client,
against stacks of toys. It expects the same text, the same samples, and errors with their reasons, and prints a line for each language."""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from omnistage.cli.show.commands import write_protos
from omnistage.client import Omni
from omnistage.client.files import to_pcm16

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


QUESTION, SEED = "Why is the sky blue?", 2**63 + 7
"""The seed does not fit into a signed number of 64 bits: languages without unsigned numbers must pass it on correctly too."""

SLOW_INTERVAL_S = 0.05
SLOW_TOKENS = 30_000
ANSWER_TIMEOUT_S = 110.0
"""Longest wait for an example, which itself gives up after 120 s."""


class Mismatch(AssertionError):
    """An example did not do what was expected of it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer that the Python client gets, with which the examples are compared. samples: little-endian, signed, 16 bit."""

    text: str
    samples: bytes
    sample_rate_hz: int


@dataclass(frozen=True, slots=True)
class Example:
    """A built example. command: runs it. folder: where it runs and writes answer.wav."""

    command: Sequence[str]
    folder: Path

    def start(self, address: str, *words: str) -> subprocess.Popen[str]:
        """Start the example. address: HOST:PORT of the router. words: further arguments after the question."""
        # Without these, some languages would send calls to this machine through a proxy that the environment names.
        environment = {**os.environ, "PROTOS": str(PROTOS), "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
        # A shell that runs this in the background lets the example ignore Ctrl-C; `env` undoes that.
        command = ["env", "--default-signal=INT", *self.command, address, QUESTION, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def run(self, address: str, *words: str) -> tuple[int, str, str]:
        """Run the example to its end. Returns exit status, standard output, standard error."""
        with self.start(address, *words) as process:
            return _end_of(process)


def get_expected(address: str) -> Expected:
    """The answer to the question, as the Python client gets it."""
    with Omni(address=address) as omni:
        answer = omni.generate(QUESTION, seed=SEED)
    if answer.audio is None:
        raise Mismatch("the pipeline gives no sound")
    return Expected(answer.text, to_pcm16(answer.audio.samples), answer.audio.sample_rate)


def check_answer(example: Example, address: str, expected: Expected) -> None:
    """Run the example; expect the text on standard output and the samples in answer.wav. Raises Mismatch."""
    status, out, err = example.run(address, str(SEED))
    _is((status, err), (0, ""), "exit status and standard error")
    _is(out, expected.text + "\n", "text")
    with wave.open(str(example.folder / "answer.wav")) as file:
        form = (file.getframerate(), file.getsampwidth(), file.getnchannels())
        samples = file.readframes(file.getnframes())
    _is(form, (expected.sample_rate_hz, 2, 1), "sample rate, bytes a sample, channels")
    _is(len(samples), len(expected.samples), "bytes of samples in answer.wav")
    different = np.flatnonzero(np.frombuffer(samples, "<i2") != np.frombuffer(expected.samples, "<i2"))
    _is(different.tolist()[:8], [], "samples that are others")


def check_unknown(example: Example, address: str) -> None:
    """Ask for a model that does not exist; expect the reason and the bad field. Raises Mismatch."""
    status, _, err = example.run(address, str(SEED), "no-such-model")
    _is(status, 1, "exit status for an unknown model")
    _matches(err, r"error: UNKNOWN_MODEL: .*'no-such-model'.*; field model")


def check_full_and_cancelled(example: Example, address: str) -> str:
    """While one example answers, run a second one: expect that it is refused with a delay until it may ask again. Then expect that Ctrl-C
    cancels the first one. address: of a router with one place and slow stages. Returns the delay in seconds as it was shown. Raises
    Mismatch."""
    with _answering(example, address) as first:
        status, _, err = example.run(address)
        _is(status, 1, "exit status when the house is full")
        delay = _matches(err, r"error: OVERLOADED: .*; ask again in ([0-9.]+) s")
        first.send_signal(signal.SIGINT)
        status, _, err = _end_of(first)
    _is(status, 1, "exit status after Ctrl-C")
    _matches(err, r"error: (?i:.*cancell?ed.*)")
    return delay


@contextmanager
def _answering(example: Example, address: str) -> Iterator[subprocess.Popen[str]]:
    """Yield an example that has begun to print an answer which takes half an hour. It is started again while the router's only place is not
    yet free. At the end of the block it is killed. Raises Mismatch."""
    until = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        with example.start(address) as process:
            try:
                if _has_begun(process, until - time.monotonic()):
                    yield process
                    return
            finally:
                process.kill()
            _, err = process.communicate()
        if "OVERLOADED" not in err or time.monotonic() > until:
            raise Mismatch(f"no text came of the slow answer: {err}")


def _has_begun(process: subprocess.Popen[str], patience_s: float) -> bool:
    """Whether the process prints text within patience_s."""
    assert process.stdout is not None
    readable = select.select([process.stdout], [], [], max(patience_s, 0.0))[0]
    return bool(readable) and bool(os.read(process.stdout.fileno(), 1).strip())


def _end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a process. Returns exit status, standard output, standard error. Raises Mismatch if it does not end in time."""
    try:
        out, err = process.communicate(timeout=ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Mismatch(f"it did not end: {out[-500:]!r} {err[-500:]!r}") from None
    return process.returncode, out, err


def _is(value: object, expected: object, subject: str) -> None:
    """Raise Mismatch unless `value` equals `expected`. subject: names the compared thing in the error."""
    if value != expected:
        raise Mismatch(f"{subject}: {value!r}, expected {expected!r}")


def _matches(err: str, pattern: str) -> str:
    """Match the last line of standard error. Returns the first group of the pattern, or the line if the pattern has no group. Raises
    Mismatch."""
    last = err.strip().rpartition("\n")[2]
    match = re.fullmatch(pattern, last)
    if match is None:
        raise Mismatch(f"the error is told as {err!r}, expected {pattern}")
    return match[1] if match.re.groups else match[0]


def slow_pipeline(folder: Path) -> Path:
    """Write the file of a pipeline of toys whose answers take half an hour; returns its path."""
    pipeline = yaml.safe_load((ROOT / "deploy" / "pipelines" / "toy.yaml").read_text(encoding="utf-8"))
    pipeline["stages"][0]["options"] = {"interval_s": SLOW_INTERVAL_S, "length": SLOW_TOKENS, "max_chunk": 1}
    pipeline["defaults"] = {"thinker": {"max_tokens": SLOW_TOKENS}}
    path = folder / "slow.yaml"
    path.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    return path


def main() -> int:
    """Build and run the examples. Exit status 1 if one could not be built, or did something else than expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("languages", nargs="*", default=list(LANGUAGES), help=f"some of {', '.join(LANGUAGES)}; default: all")
    parser.add_argument("--pipeline", default="toy", help="which answers are compared (default: toy, which needs no model)")
    options = parser.parse_args()
    if unknown := sorted(set(options.languages) - set(LANGUAGES)):
        parser.error(f"no example in {', '.join(unknown)}; there are {', '.join(LANGUAGES)}")
    commands, failed = _build([LANGUAGES[name] for name in options.languages])
    if commands:
        with (
            tempfile.TemporaryDirectory() as folder,
            Omni(pipeline=options.pipeline) as omni,
            Omni(pipeline=str(slow_pipeline(Path(folder))), max_sessions=1) as slow,
        ):
            expected = get_expected(omni.address)
            for name, command in commands.items():
                example = Example(command, Path(folder, name))
                example.folder.mkdir()
                try:
                    check_answer(example, omni.address, expected)
                    check_unknown(example, omni.address)
                    delay = check_full_and_cancelled(example, slow.address)
                except Mismatch as error:
                    failed.append(name)
                    print(f"FAIL {name:<5} {error}", flush=True)
                    continue
                result = f"the text and the {len(expected.samples) // 2} samples of the Python client"
                print(f"ok   {name:<5} {result}; UNKNOWN_MODEL, OVERLOADED with {delay} s, Ctrl-C", flush=True)
    print(f"examples: {len(failed)} failed ({', '.join(failed)})" if failed else "examples: all good")
    return 1 if failed else 0


def _build(languages: Sequence[Language]) -> tuple[dict[str, list[str]], list[str]]:
    """Install and build what these languages need. Returns the commands of the built examples, by language, and the names of the languages
    that failed."""
    commands, failed = {}, []
    for language in languages:
        try:
            install(language)
            commands[language.name] = build(language)
        except ToolchainError as error:
            failed.append(language.name)
            print(f"FAIL {language.name:<5} {error}", flush=True)
    return commands, failed


if __name__ == "__main__":
    sys.exit(main())
