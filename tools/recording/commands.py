"""Records command lines of `omnistage`: exit code, both outputs, and the files that were written.

`commands.yaml` has the lines: whole ones, and for each command its options by kind, of which each takes every value of that kind.
`configs.yaml` has values of settings in files and in variables, for `omnistage serve --print-config`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.recording.stack import Recording, read_table

LIMIT_S = 60.0
AT_ONCE = 2
CLOSED = "127.0.0.1:9"
"""An address at which nothing listens."""

VOLATILE = ("timeline*", "bench*", "plot*")
"""Names of files whose contents have times."""

PRINT = "serve --print-config"
PRINT_FILE = f"{PRINT} --config stack.yaml"


def record(recording: Recording) -> dict[str, Any]:
    """The results of all command lines, by line. Lines of `in_order` run one after the other and share a home."""
    table = read_table("commands.yaml")
    folder, shared = recording.folder / "commands", recording.folder / "shared"
    in_order = {line: run_line(recording, line, folder / f"in-order-{number}", shared) for number, line in enumerate(table["in_order"])}
    lines = [*table["lines"], *_option_lines(table["options"], table["values"])]
    return in_order | _run_all(recording, {line: (line, None) for line in lines}, folder)


def record_configs(recording: Recording) -> dict[str, Any]:
    """The results of `omnistage serve --print-config`, by the file or the variables that it reads."""
    table = read_table("configs.yaml")
    texts = [*table["files"], *(f"{name}: {value}" for name, values in table["settings"].items() for value in values)]
    files = {f"file {text!r}": (PRINT_FILE, text) for text in texts}
    variables = {words: (f"{words} {PRINT}", None) for words in table["variables"]}
    return _run_all(recording, {**files, **variables}, recording.folder / "configs")


def _option_lines(options: Mapping[str, Mapping[str, Any]], values: Mapping[str, list[str]]) -> Iterator[str]:
    """For each option of each command a line with every value of its kind, and lines with an option that is unknown, or misspelt."""
    for command, row in options.items():
        base = f"{command} {row['words']}".strip()
        for kind, names in row.items():
            if kind != "words":
                for option in names.split():
                    yield from (f"{base} {option} {shlex.quote(value)}" for value in values[kind])
                yield f"{base} {names.split()[0]}"  # Without its value.
                yield f"{base} {names.split()[-1]}x 1"
        yield f"{base} --no-such-option"


def _run_all(recording: Recording, cases: Mapping[str, tuple[str, str | None]], folder: Path) -> dict[str, Any]:
    """Run lines, `AT_ONCE` at a time, each in a folder and with a home of its own; returns their results by case. cases: a line, and the
    text of its file stack.yaml or None, by case."""

    def run(number: int, line: str, config: str | None) -> dict[str, Any]:
        return run_line(recording, line, folder / str(number), folder / str(number) / "home", config)

    lines, configs = zip(*cases.values(), strict=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(cases, pool.map(run, range(len(cases)), lines, configs), strict=True))


def run_line(recording: Recording, line: str, folder: Path, home: Path, config: str | None = None) -> dict[str, Any]:
    """Run one line in a new folder. Words NAME=VALUE before the command are variables; a word after <<< is the standard input.
    config: text of a file stack.yaml there. The figures of a benchmark are recorded as 0."""
    workplace = folder / "workplace"
    workplace.mkdir(parents=True)
    home.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (workplace / "stack.yaml").write_text(config, encoding="utf-8")
    for name, place in (("{files}", str(recording.files)), ("{router}", recording.router), ("{closed}", CLOSED)):
        line = line.replace(name, place)
    words = shlex.split(line)
    variables: dict[str, str] = {}
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    text = ""
    if "<<<" in words:
        *words, _, text = words  # The mark stands last but one.
    command, environment = [sys.executable, "-m", "omnistage.cli", *words], recording.variables(home) | variables
    stdin_data, pipe = text.encode().decode("unicode_escape").encode("latin-1"), subprocess.PIPE
    with subprocess.Popen(command, cwd=workplace, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(stdin_data, LIMIT_S)
        except BaseException as error:  # Also where the recording itself is ended.
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    if words[:1] == ["bench"] and process.returncode == 0:
        zeroed = (re.sub(rb"\d[\d.]*(?:e-?\d+)?", b"0", output) for output in (out, err))
        out, err = (re.sub(rb" {2,}", b" ", output) for output in zeroed)  # The width of columns depends on the figures.
    files = {str(path.relative_to(workplace)): _description(path) for path in sorted(workplace.rglob("*")) if path.is_file()}
    return {"exit": process.returncode, "stdout": shown(out), "stderr": shown(err), "files": files}


def _description(path: Path) -> str:
    """The size and hash of a file; of a file that has times, only that it is there."""
    return "with times" if any(fnmatchcase(path.name, pattern) for pattern in VOLATILE) else digest(path.read_bytes())


def shown(data: bytes) -> Any:
    """The lines of an output, an object of JSON for a line that is one, or the digest of an output that is no text."""
    try:
        return [json.loads(line) if line.startswith("{") and line.endswith("}") else line for line in data.decode().split("\n")]
    except ValueError:
        return digest(data)


def digest(data: bytes) -> str:
    """The length and the hash of bytes; of an Ogg file, whose number is drawn, the length."""
    return f"{len(data)} bytes, {'Ogg' if data.startswith(b'OggS') else f'SHA-256 {hashlib.sha256(data).hexdigest()}'}"
