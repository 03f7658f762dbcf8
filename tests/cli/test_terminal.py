"""What a person at a terminal sees, through a real pseudo-terminal."""

from helpers.processes import Family
from helpers.terminal import CTRL_C, Terminal, words_of
from omnistage.models.toy import formulas


class Press:
    """Ctrl-C, once, when something is on the terminal."""

    def __init__(self, seen: str) -> None:
        self._seen = seen.encode()
        self._pressed = False

    def __call__(self, terminal: Terminal) -> None:
        if not self._pressed and self._seen in terminal.written:
            self._pressed = True
            terminal.press(CTRL_C)


def test_the_answer_grows_above_a_line_that_shows_the_sound(toy_address: str) -> None:
    terminal = Terminal(200, 24)
    assert terminal.run(("ask", "Hi", "--seed", "1", "--address", toy_address)) == 0
    assert b"thinking" in terminal.written
    assert b"speaking" in terminal.written
    *answer, figures = terminal.lines
    assert figures.startswith("ttft")
    assert words_of(answer) == formulas.text(1, "Hi", formulas.NATURAL_LENGTH).split()


def test_starting_a_stack_shows_each_process(family: Family) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--pipeline", "toy", "--text-only")) == 0
    for name in (b"thinker", b"talker", b"code2wav", b"router"):
        assert name in terminal.written
    assert family.pids() == []


def test_ctrl_c_ends_the_call_and_its_stack(family: Family) -> None:
    terminal = Terminal()
    assert terminal.run(("ask", "Hi", "--pipeline", "toy", "--max-tokens", "32768"), Press("code2wav")) == 130
    assert b"Traceback" not in terminal.written
    assert family.wait_ended() == []
