"""Words of others never steer the terminal: of a router that means harm, of a model, of names and files; on stdout and on stderr, in every
command that there is."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
import typer

from helpers.lengths import draw_of, some_or_all
from helpers.terminal import Terminal
from omnistage.cli.console import Console
from omnistage.cli.main import app
from omnistage.host.terminal import Guarded, escape_text
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2

STEERING = (
    *("\x1b]0;TITLE\x07", "\x1b]52;c;Q0xJUA==\x1b\\", "\x1b[2J\x1b[3J", "\x1b[6n", "\x1bc", "\x9b2J", "\x9d0;T\x9c", "\x90q\x9c"),
    *("\x07", "\x08\x08", "\r\x1b[2KHIDDEN", "\x0b", "\x0c", "\x0e", "\x7f", "\x1b[8m", "\u202eesrever\u202c", "\u2066in\u2069"),
)
"""Sequences that a terminal obeys, in every form: of a title, the clipboard, an answer on the keyboard, erased or hidden text."""
MARKUP = "[/nothing] [link=file:///etc/passwd]click[/link] [bold] \\[x] \\\\\\"
"""Markup that rich obeys, or that it cannot parse."""
EVIL = f"{MARKUP}{''.join(STEERING)}{MARKUP}"
OURS = re.compile(rb"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[\?2004[lh]|\x1b\[[0-9]*[ABCDGJK]|\x1b\[6n|\x1b[78DM]|[\r\n\t]")
"""Sequences that the command itself draws with: colours, and lines that are drawn anew."""
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

KINDS = (stage_pb2.STAGE_KIND_THINKER, stage_pb2.STAGE_KIND_TALKER, stage_pb2.STAGE_KIND_CODE2WAV)

COMMANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ask", "say"), ("Hi", "-v", "--no-play")),
    "chat": ("-v",),
    **{name: ("Hi", "-v", "--out", f"FOLDER/heart{end}") for name, end in (("draw", ".png"), ("film", ".webm"), ("sound", ".wav"))},
    "bench": ("--requests", "1", "-c", "1", "--text-only"),
    "status": ("-v",),
    **dict.fromkeys(("pipelines", "models", "voices", "doctor"), ()),
    **dict.fromkeys(("serve", "stop", "logs", "list", "pull", "fetch-default", "launch"), (EVIL,)),
    "make-tiny": (EVIL, EVIL),
    "protos": (f"/dev/null/{EVIL}",),
}
"""How each command meets words of others: from a router where it asks one, else from the command line, as names of files come."""


class Hostile(omni_pb2_grpc.OmniServiceServicer):
    """Says what steers a terminal wherever it may say anything. fails: by errors, too."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def ListModels(self, request: omni_pb2.ListModelsRequest, context: grpc.ServicerContext) -> omni_pb2.ListModelsResponse:
        self._fail(context)
        ports: dict[str, Any] = {"inputs": ["text", EVIL], "outputs": ["text", "audio", "image", EVIL]}
        model = omni_pb2.Model(name=EVIL, stages=list(KINDS), voices=[EVIL], description=EVIL, **ports)
        return omni_pb2.ListModelsResponse(models=[model])

    def ListReplicas(self, request: omni_pb2.ListReplicasRequest, context: grpc.ServicerContext) -> omni_pb2.ListReplicasResponse:
        self._fail(context)
        replica = omni_pb2.Replica(pipeline=EVIL, kind=stage_pb2.STAGE_KIND_THINKER, model=EVIL, address=EVIL, pid=1)
        replica.settings[EVIL] = EVIL
        return omni_pb2.ListReplicasResponse(replicas=[replica])

    def Generate(self, request: omni_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[omni_pb2.GenerateResponse]:
        self._fail(context)
        yield omni_pb2.GenerateResponse(started=omni_pb2.Started(session_id=EVIL, model=EVIL, seed=1, revisions=[EVIL]))
        yield omni_pb2.GenerateResponse(failover=stage_pb2.Failover(kind=stage_pb2.STAGE_KIND_TALKER, lost=EVIL, replica=EVIL, reason=EVIL))
        text = chunk_pb2.TextChunk(text=f"words {EVIL} more", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
        yield omni_pb2.GenerateResponse(chunk=chunk_pb2.Chunk(port="text", count=1, last=True, text=text))
        yield omni_pb2.GenerateResponse(usage=omni_pb2.Usage(finish_reason=chunk_pb2.FINISH_REASON_STOP))

    def Converse(self, requests: Iterator[omni_pb2.ConverseRequest], context: grpc.ServicerContext) -> Iterator[omni_pb2.ConverseResponse]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, EVIL)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.fails:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"bad {EVIL}")


@pytest.fixture(params=[False, True], ids=["answers", "errors"])
def hostile_address(request: pytest.FixtureRequest) -> Iterator[str]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        omni_pb2_grpc.add_OmniServiceServicer_to_server(Hostile(fails=request.param), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def obeyed(written: bytes) -> list[str]:
    """The sequences in the output that a terminal obeys and the command does not draw with."""
    pieces = [piece for piece in STEERING if piece.encode() in written and piece not in ("\x1b[6n",)]
    return pieces + OBEYED.findall(OURS.sub(b"", written).decode(errors="replace"))


def commands() -> dict[str, typer.core.TyperCommand]:
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    return {name: command for name, command in found.commands.items() if isinstance(command, typer.core.TyperCommand)}


def test_it_is_known_how_each_command_meets_words_of_others() -> None:
    assert set(COMMANDS) == set(commands())


def run(name: str, address: str, **streams: Any) -> Terminal:
    """The command on a terminal to its end; what it asks is the hostile router."""
    terminal = Terminal(200)
    asks = any("--address" in option.opts for option in commands()[name].params)
    with TemporaryDirectory() as folder, os.fdopen(os.memfd_create("question"), "w+b", buffering=0) as typed:
        typed.write(b"Hi\n")
        typed.seek(0)
        words = [word.replace("FOLDER", folder) for word in COMMANDS[name]]
        terminal.run((name, *words, *(("--address", address) if asks else ())), stdin=typed.fileno(), **streams)
    return terminal


@some_or_all("command", COMMANDS, 6)
def test_no_command_lets_words_steer_the_terminal(command: str, hostile_address: str) -> None:
    name = draw_of(command, COMMANDS, 6, "steering")
    terminal = run(name, hostile_address)
    assert obeyed(terminal.written) == []
    assert b"MarkupError" not in terminal.written, "nothing stumbles over them either"


@pytest.mark.parametrize("hostile_address", [False], indirect=True)
def test_names_can_still_be_read_and_copied(hostile_address: str) -> None:
    terminal = run("voices", hostile_address)
    assert terminal.exit_code == 0 and "\\x1b]0;TITLE\\x07" in " ".join(terminal.lines)
    assert "[/nothing] [link=file:///etc/passwd]click[/link] [bold] \\[x]" in " ".join(terminal.lines)


@pytest.mark.parametrize("hostile_address", [False], indirect=True)
@pytest.mark.parametrize("sent_away", ["stdout", "stderr"])
def test_each_stream_decides_for_itself(hostile_address: str, sent_away: str, tmp_path: Path) -> None:
    """The one that is a terminal is not steered; a file gets an answer as it is."""
    with (tmp_path / "file").open("wb") as file:
        terminal = run("ask", hostile_address, **{sent_away: file.fileno()})
    assert obeyed(terminal.written) == []
    if sent_away == "stdout":
        assert f"words {EVIL} more" in (tmp_path / "file").read_bytes().decode()


def test_there_is_one_console() -> None:
    """One of rich's own would write colours as escapes, or words of others as they are."""
    root = Path(__file__).parents[2]
    sources = [path for folder in ("sdk", "benchmarks", "tools") for path in (root / folder).rglob("*.py")]
    found = {path.name for path in sources if re.search(r"rich\.console import .*\bConsole\b(?!Options)|import rich\b", path.read_text())}
    assert found == {"console.py", "bars.py"}, "bars.py names it as a type alone"


PRINTED = """
import logging, sys, warnings
from omnistage.host.logs import configure_logs, drain_logs
from omnistage.host.terminal import guard_standard_streams
guard_standard_streams()
evil = sys.stdin.read()
print(evil)
print(evil, file=sys.stderr)
sys.stderr.writelines([evil])
warnings.warn(evil)
configure_logs("info", "auto")
import structlog
log = structlog.get_logger("x")
log.info("event", value=evil.split()[-1], whole=evil, many=[evil], **{evil: 1})
logging.getLogger("y").error("of a library %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    log.exception("failed")
    logging.getLogger("y").exception(evil)
drain_logs()
raise ValueError(evil)
"""


def test_servers_on_a_terminal_guard_it_too() -> None:
    """Their output, their logs, and Python's own output when they end are guarded."""
    master, slave = pty.openpty()
    with (
        os.fdopen(master, "rb", buffering=0) as terminal,
        subprocess.Popen([sys.executable, "-c", PRINTED], stdin=subprocess.PIPE, stdout=slave, stderr=slave) as process,
    ):
        os.close(slave)
        assert process.stdin is not None
        process.stdin.write(EVIL.encode())
        process.stdin.close()
        written = b""
        with suppress(OSError):  # Linux says EIO when the last writer is gone
            while piece := terminal.read(65536):
                written += piece
    assert all(text in written for text in (b"failed", b"of a library", b"Traceback", b"UserWarning"))
    assert obeyed(written) == []


@pytest.mark.parametrize("text", STEERING)
def test_what_steers_is_shown_as_an_escape(text: str) -> None:
    shown = escape_text(text)
    assert not OBEYED.search(shown) and escape_text(shown) == shown


def test_words_of_all_scripts_are_shown_as_they_are() -> None:
    words = "Grüße, 你好, שלום, مرحبا, नमस्ते, e\u0301, 👩\u200d🚀\ttab\nline"
    assert escape_text(words) == words


def test_what_is_drawn_and_what_is_printed_come_out_in_order() -> None:
    raw = io.BytesIO()
    below = io.TextIOWrapper(io.BufferedWriter(io.BufferedRandom(raw).detach()), "utf-8")  # type: ignore[arg-type]
    guarded = Guarded(below)
    for number in range(3):
        guarded.write(f"{number}\x1b[1m")
        below.write("\x1b[1m")
    guarded.flush()
    assert raw.getvalue() == b"".join(b"%d\\x1b[1m\x1b[1m" % number for number in range(3))


@pytest.mark.parametrize("name", ["[/x]", "a\\\\\\", "[bold", "[/]", "\\[/x]"])
def test_a_console_never_stumbles_over_a_name(name: str) -> None:
    from rich.markup import escape

    console = Console(file=io.StringIO(), width=200)
    console.print(f"{escape(name)}[bold]{escape(name)}[/]")
    console.print(name)
