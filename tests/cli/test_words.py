"""Text that is none, and mistakes on the command line: one line, before anything is started."""

import random
import re
import subprocess
import sys

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
