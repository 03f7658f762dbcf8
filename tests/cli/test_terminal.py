"""What a person at a terminal sees, through a real pseudo-terminal."""

import os
import pty
import re
import subprocess
import sys

from helpers.processes import Family
from omnistage.models.toy import formulas

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*words: str, interrupt_at: str = "") -> tuple[str, int]:
    """Run the command on a terminal of its own; press Ctrl-C when `interrupt_at` is seen. Returns what was shown and the exit code."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "omnistage.cli", *words]
    # setsid and the controlling terminal, so that Ctrl-C reaches the command as it does for a person.
    with subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ) as run:
        os.close(slave)
        shown = b""
        try:
            while piece := os.read(master, 65536):
                shown += piece
                if interrupt_at and interrupt_at.encode() in shown:
                    os.write(master, b"\x03")
                    interrupt_at = ""
        except OSError:  # Linux says EIO when the last writer is gone
            pass
        code = run.wait(30)
    os.close(master)
    return shown.decode(), code


def test_the_answer_grows_above_a_line_that_shows_the_sound(toy_address: str) -> None:
    shown, code = on_terminal("ask", "Hi", "--seed", "1", "--address", toy_address)
    assert code == 0
    assert "speaking" in shown
    lines = [line.rstrip() for line in CONTROL.sub("", shown.replace("\r", "\n")).split("\n") if line.strip()]
    answer = formulas.text(1, "Hi", formulas.NATURAL_LENGTH).split()
    assert lines[-1].startswith("ttft")
    assert "speaking" not in lines[-1] + lines[-2]
    assert f"{lines[-3]} {lines[-2]}".split() == answer


def test_starting_a_stack_shows_each_process(family: Family) -> None:
    shown, code = on_terminal("ask", "Hi", "--model", "toy", "--text-only")
    assert code == 0
    for name in ("thinker", "talker", "code2wav", "router"):
        assert name in shown
    assert family.pids() == []


def test_ctrl_c_ends_the_call_and_its_stack(family: Family) -> None:
    _, code = on_terminal("ask", "Hi", "--model", "toy", "--max-tokens", "32768", interrupt_at="code2wav")
    assert code == 130
    assert family.wait_ended() == []
