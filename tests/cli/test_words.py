"""Text that is none, and mistakes on the command line: one line, before any process is started and before torch is imported."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from helpers import lengths
from helpers.command import omnistage
from helpers.output import refusal
from helpers.processes import StartedProcess
from helpers.terminal import Terminal, words_of
from omnistage.cli.main import app
from omnistage.client.request import MAX_TEXT_CHARACTERS

COMMAND = (sys.executable, "-m", "omnistage.cli")


@pytest.mark.parametrize(
    ("words", "given", "told"),
    [
        (["ask", "-"], b"\xff", "the text is not UTF-8: byte 0 is 0xff"),
        (["ask", "-"], b"What is \xe9", "the text is not UTF-8: byte 8 is 0xe9"),
        (["say", b"caf\xe9"], b"", "the text is not UTF-8: byte 3 is 0xe9"),
        (["say", "-"], b"", "the text is empty"),
        (["ask", " \n"], b"", "the text is empty"),
        (["say", "-"], b"a" * (MAX_TEXT_CHARACTERS + 1), "the text is longer than 1048576 characters"),
        (["ask", "-"], "\N{GRINNING FACE}".encode() * (MAX_TEXT_CHARACTERS + 1), "the text is longer than 1048576 characters"),
        (["ask", "Hi", "--pipeline", "toy-picture"], b"", "toy-picture does not answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_and_a_hint(words: list[str | bytes], given: bytes, told: str) -> None:
    model = [] if "--pipeline" in words else ["--pipeline", "toy"]
    error, hint = refusal(*words, *model, text=given)
    assert error.startswith("error: ") and told in error and hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--json-schema", "/no/such.json"), "--json-schema /no/such.json: No such file or directory"),
        (("--json-schema", "/dev/zero"), "--json-schema /dev/zero: this is more than 4 MiB, and no JSON schema"),
    ],
    ids=str,
)
def test_a_mistake_that_says_all_has_no_hint(words: tuple[str, ...], told: str) -> None:
    assert refusal("ask", "Hi", "--pipeline", "toy", *words) == [f"error: {told}"]


def test_standard_input_that_is_closed() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "ask", "-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "error: - reads standard input, and there is none"


def test_standard_output_that_is_closed(toy_address: str, tmp_path) -> None:
    words = ("say", "one two", "--out", str(tmp_path / "x.wav"), "--address", toy_address)
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, *words], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "x.wav").stat().st_size > 44


def test_a_reader_that_has_seen_enough(toy_address: str) -> None:
    text = " ".join(["words"] * 250)
    command = [*COMMAND, "say", text, "--address", toy_address]
    with StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as call:
        assert call.stdout is not None and call.stderr is not None
        call.stdout.read(1)
        call.stdout.close()
        said = call.stderr.read()
        assert call.wait(60) in (0, 141)  # 0: it had written all before the pipe broke
    assert "Traceback" not in said and "error" not in said


@lengths.drawn_cells(1, "size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
@lengths.drawn_cells(
    2,
    "words",
    [
        ["draw", "  "],
        ["ask", "Hi", "--pipeline", "toy-picture"],
        ["ask", "Hi", "--pipeline", "nobody-has-this"],
        ["ask", "Hi", "--choise", "yes"],
        ["draw", "a red heart", "--background", "#ffffff"],
        ["status"],
        ["say", "--help"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_lines_of_a_terminal_are_broken_between_words(words: list[str], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads them in a pipe gets them whole."""
    monkeypatch.setenv("OMNISTAGE_ROUTER", "none")
    piped = omnistage(*words)
    terminal = Terminal(*size)
    assert terminal.run(words) == piped.returncode
    said = words_of(terminal.lines)
    assert set(re.findall(r"\w+", piped.stderr)) <= set(re.findall(r"\w+", " ".join(said))), terminal.lines
    if "--help" in words:
        assert set(re.findall(r"[\w-]+", piped.stdout)) <= set(re.findall(r"[\w-]+", " ".join(said))), terminal.lines
        assert max(map(len, terminal.lines)) < size[0]


def test_no_option_takes_a_number_that_is_none(seed: int) -> None:
    """Each option of every command that takes a number is tried, bounded or not."""
    chance, options = random.Random(seed), 0
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        text = ["x"] if any(parameter.required for parameter in command.params) else []
        for option in (parameter.opts[0] for parameter in command.params if parameter.type_descriptor.annotation is float):
            options += 1
            value = chance.choice(["inf", "-inf", "nan", "1e400"])
            output = CliRunner().invoke(app, [name, f"{option}={value}", *text]).stderr
            assert f"'{option}'" in output and "it must be" in " ".join(output.split()), (name, option, value, output)
    assert options > 20


# Mistakes in what serve is told


WATCHED = """
import json, os, sys
started = []
sys.addaudithook(lambda event, arguments: started.append(str(arguments[1])) if event == "subprocess.Popen" else None)
import omnistage.cli.stack.serve
from omnistage.cli.main import app
for words in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with open(reading) as pipe:
            said = pipe.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)
        continue
    os.dup2(writing, 2)
    try:
        app(words, prog_name="omnistage")
    finally:
        print(json.dumps({"started": started, "torch": "torch" in sys.modules}), file=sys.stderr)
"""
"""Each command is forked by one Python that has imported what they need."""


def refusals(*commands: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """For each of these words of `serve` the one line that it ends with. The launcher has started nothing and not imported torch."""
    words = json.dumps([["serve", *map(str, command)] for command in commands])
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run([sys.executable, "-c", WATCHED, words], capture_output=True, text=True, timeout=100, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands)
    for code, said in ended:
        assert code == 1, said
        line, watched = said.splitlines()
        assert json.loads(watched) == {"started": [], "torch": False}
        assert line.startswith("error: ")
        yield line.removeprefix("error: ")


ANYWHERE = ("--address", "127.0.0.1:0")
MISTAKES: Sequence[tuple[Sequence[str], str]] = [
    (["--address", "50051"], "--address: '50051' has no host: give HOST:PORT such as 127.0.0.1:50051"),
    (["--address", ":50051"], "--address: ':50051' has no host: give HOST:PORT such as 127.0.0.1:50051"),
    (["--address", "0.0.0.0:99999"], "--address: '0.0.0.0:99999' has no possible port"),
    (["--metrics-address", "http://127.0.0.1:9464"], "--metrics-address: 'http://127.0.0.1:9464' is a URL: leave http:// out"),
    (["--metrics", "9464"], "--metrics: '9464' has no host: give HOST:PORT such as 127.0.0.1:9464"),
    (["--metrics", "192.0.2.1:9464"], "cannot listen on 192.0.2.1:9464: 192.0.2.1 is not an address of this machine"),
    (["--address", "192.0.2.1:50050"], "cannot listen on 192.0.2.1:50050: 192.0.2.1 is not an address of this machine"),
    (["--device", "talker=cuda:0"], "device cuda:0: the talker of smol computes on cpu only"),
    (["--device", "gpu"], "--device: 'gpu' is no device: give cpu, cuda or cuda:N"),
    (["--dtype", "float64"], "--dtype: no stage of smol, picture computes in float64"),
    (["toy", "--dtype", "bfloat16"], "--dtype: no stage of toy computes in bfloat16"),
    (["--checkpoint", "/"], "/thinker/config.json is missing: give the whole folder of a checkpoint"),
    (["toy", "--checkpoint", "/"], "the models of toy have no weights"),
    (["smol", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2: no stage of smol has a use for it"),
    (["--tensor-parallel-size", "talker=2"], "tensor_parallel_size 2: the talker of smol computes on one device; for more answers at once"),
    (["--max-batch-size", "code2wav=2"], "max_batch_size 2: the code2wav of smol computes one session after the other"),
    (["--max-batch-size", "many"], "--max-batch-size: is 'many'; it must be a whole number"),
    (["--max-batch-tokens", "-1"], "--max-batch-tokens: is '-1'; it must be at least 0"),
    (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: is '1.5'; it must be at most 1"),
    (["--enable-cache", "perhaps"], "--enable-cache: is 'perhaps'; it must be true or false"),
    (["toy", "--kv-cache-bytes", "65536"], "--kv-cache-bytes 65536: no stage of toy has a use for it"),
    (["toy", "--threads", "2"], "--threads 2: no stage of toy has a use for it"),
    (["toy", "--stall-limit", "-1"], "--stall-limit: is '-1.0'; it must be above 0"),
    (["toy", "--log-dir", "/dev/null/logs"], "Not a directory: /dev/null/logs"),
]


def test_a_mistake_is_told_in_one_line() -> None:
    told = refusals(*([*words, *([] if "--address" in words else ANYWHERE)] for words, _ in MISTAKES))
    wrong = {" ".join(words): line for (words, expected), line in zip(MISTAKES, told, strict=True) if expected not in line}
    assert wrong == {}


def test_a_bad_variable_of_the_environment_is_named() -> None:
    (told,) = refusals(ANYWHERE, environment={"OMNISTAGE_LOG_LEVEL": "loud"})
    assert told == "OMNISTAGE_LOG_LEVEL: is 'loud'; it must be 'debug', 'info', 'warning' or 'error'"


def test_two_servers_on_one_port(free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    of_router, of_launcher = ["--address", address, "--metrics-address", address], ["--metrics-address", address, "--metrics", address]
    router, metrics = refusals(of_router, [*ANYWHERE, *of_launcher])
    assert router.startswith(f"--metrics-address: {address} is the --address too")
    assert metrics.startswith(f"--metrics: {address} is the --metrics-address too")


def test_an_unknown_family_in_a_pipeline_file(tmp_path: Path) -> None:
    unknown, speedy = tmp_path / "unknown.yaml", tmp_path / "speedy.yaml"
    unknown.write_text("name: own\ndescription: x\ninputs: [text]\noutputs: [text]\nstages:\n  - {kind: thinker, family: smoll}\n")
    speedy.write_text(unknown.read_text().replace("smoll", "toy, options: {speed: 3}"))
    family, options = refusals([unknown, *ANYWHERE], [speedy, *ANYWHERE])
    assert family.startswith("no thinker named 'smoll'; there are qwen2_5_omni, qwen3_omni, smol, toy")
    assert "unknown options ['speed'] of the toy models" in options
