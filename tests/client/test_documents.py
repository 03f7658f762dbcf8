"""The documents and the page of the package show what runs: Python, commands, and each message of docs/grpc.md."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.main import get_command

from helpers.ask import Refusal, WholeAnswer, refusal
from helpers.run import RunStream
from helpers.servers import ServerProcess, stage_stub
from omnistage.cli.main import app
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omnistage.client import AsyncOmni, Omni

omni = Omni(address="127.0.0.1:50050")
"""
"""The names that the text around a snippet has introduced."""

WRONG = {
    'omni.generate("Hi", max_token=3)\n': "max_token",
    'omni.generate("Hi", temperature="hot")\n': "temperature",
    'Omni(devise="cpu")\n': "devise",
    'omni.chat([{"role": "user", "content": "Hi"}]).txt\n': "txt",
}
"""Snippets as they must never be, and what is told of each."""


def pages() -> list[Path]:
    """All that people read, with Python in it. Files that a page shows by name are run by tests of their own."""
    return [page for page in documents() if snippets(page)]


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/*.md")]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def program(snippet: str) -> str:
    """A snippet with what it takes for granted; one that waits is the body of a coroutine."""
    waits = (ast.AsyncWith, ast.AsyncFor, ast.Await)
    if any(isinstance(node, waits) for statement in ast.parse(snippet).body for node in _outside_functions(statement)):
        snippet = "async def main() -> None:\n" + "".join(f"    {line}\n" for line in snippet.splitlines())
    return PRELUDE + snippet


def _outside_functions(node: ast.AST) -> Sequence[ast.AST]:
    if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
        return ()
    return [node, *(found for child in ast.iter_child_nodes(node) for found in _outside_functions(child))]


def checked(paths: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_snippets_have_types(tmp_path: Path) -> None:
    found = {page.relative_to(ROOT).as_posix(): snippets(page) for page in pages()}
    assert {"README.md", "docs/client.md"} <= found.keys()
    paths = []
    for name, several in found.items():
        for number, snippet in enumerate(several):
            paths.append(tmp_path / f"{re.sub(r'[^a-z]', '_', name.lower())}_{number}.py")
            paths[-1].write_text(program(snippet), encoding="utf-8")
    done = checked(paths)
    assert done.returncode == 0, done.stdout


def test_a_snippet_that_is_wrong_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(PRELUDE + "".join(WRONG), encoding="utf-8")
    first = len(PRELUDE.splitlines()) + 1
    told: dict[str, str] = {}
    for line, error in re.findall(r"wrong\.py:(\d+): (?:error|note): (.*)", checked([path]).stdout):
        told[line] = f"{told.get(line, '')} {error}"
    assert {int(line) for line in told} == set(range(first, first + len(WRONG)))
    assert all(word in told[str(line)] for line, word in enumerate(WRONG.values(), first))


def test_what_is_on_no_index_is_installed_from_the_folder_where_it_was_built() -> None:
    """Until both wheels are given out; `make wheels` fills the folder."""
    install = re.compile(r"\b(?:pip|pipx|uv tool) install [^`|\n]*\bomnistage\b[^`|\n]*")
    told = [page for page in documents() if page.name != "CHANGELOG.md"]  # that one tells what was
    found = {page.relative_to(ROOT).as_posix(): install.findall(page.read_text(encoding="utf-8")) for page in told}
    assert {"docs/client.md", "docs/http.md", "docs/tracing.md", "sdk/README.md"} <= {page for page, lines in found.items() if lines}
    assert {page: lines for page, lines in found.items() if any("--find-links dist" not in line for line in lines)} == {}


def test_the_idiom_of_a_conversation_is_among_them() -> None:
    shown = "".join(snippets(ROOT / "docs" / "client.md"))
    assert "conversation += [answer, " in shown


PAGE = ROOT / "sdk" / "README.md"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


def test_its_python_runs(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    monkeypatch.setenv("OMNISTAGE_ROUTER", toy_address)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split()
    assert (tmp_path / "kite.wav").read_bytes()[:4] == b"RIFF"


def test_its_commands_are_commands_with_these_options() -> None:
    """None of them runs: the words alone are read."""
    root = get_command(app)
    lines = [shlex.split(line) for block in blocks("") for line in block.splitlines() if line.startswith("omnistage ")]
    assert {line[1] for line in lines} >= {"ask", "draw", "say", "chat", "serve", "stop", "status"}
    for _, name, *words in lines:
        command = root.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words)


GRPC_PAGE = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
TIMEOUT_S = 60.0

M = TypeVar("M", bound=Message)


def shown(kind: type[M]) -> list[M]:
    """The messages of this kind that the page shows, in their order."""
    texts = re.findall(r"`(\w+)`:\n```json\n(.*?)^```", GRPC_PAGE, re.DOTALL | re.MULTILINE)
    return [json_format.Parse(text, kind()) for name, text in texts if name == kind.__name__]


ASKED, RESUMED = shown(omni_pb2.GenerateRequest)
GOOD_TURN, BAD_TURN = shown(omni_pb2.ConverseRequest)
THINKER_OPEN, MORE_CREDIT, CODE2WAV_OPEN, CODES = shown(stage_pb2.RunRequest)


def test_every_message_of_the_page_is_sent_by_a_test_here() -> None:
    assert GRPC_PAGE.count("```json") == 8


@pytest.fixture
async def router(toy_address: str) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    async with grpc.aio.insecure_channel(toy_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield omni_pb2_grpc.OmniServiceStub(channel)


async def answered(router: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest) -> list[omni_pb2.GenerateResponse]:
    return [event async for event in router.Generate(request, timeout=TIMEOUT_S)]


async def refused(router: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answered(router, request)
    return refusal(raised.value)


def whole(events: list[omni_pb2.GenerateResponse]) -> WholeAnswer:
    answer = WholeAnswer()
    for event in events:
        answer.take(event)
    answer.check_toy(7, "Hi")
    return answer


async def test_a_request_as_it_is_printed_is_answered(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    events = await answered(router, ASKED)
    whole(events)
    assert (events[0].WhichOneof("event"), events[-1].WhichOneof("event")) == ("started", "usage")
    (audio, *_) = [event.chunk.audio for event in events if event.chunk.HasField("audio")]
    assert (audio.encoding, audio.sample_rate_hz, audio.channel_count) == (1, formulas.SAMPLE_RATE_HZ, 1)


async def test_several_chunks_in_one_message_come_only_where_they_are_asked_for(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    assert not any(event.HasField("chunks") for event in await answered(router, ASKED))
    batched = copy_of(ASKED)
    batched.batches = True
    whole(await answered(router, batched))


def test_grpcurl_can_do_what_its_line_says(toy_address: str) -> None:
    """By reflection alone, from the method and the JSON of the line."""
    (line,) = re.findall(r"^grpcurl .*", GRPC_PAGE, re.MULTILINE)
    match = re.fullmatch(r"grpcurl -plaintext -d '(.*)' 127.0.0.1:50050 (\S+)/(\S+)", line)
    assert match is not None
    with grpc.insecure_channel(toy_address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(match[2]).FindMethodByName(match[3])
        asked = json_format.Parse(match[1], GetMessageClass(method.input_type)())
        call: grpc.UnaryStreamMultiCallable[Message, Message] = channel.unary_stream(
            f"/{match[2]}/{match[3]}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        events = [json_format.MessageToDict(event) for event in call(asked, timeout=TIMEOUT_S)]
    seed = int(events[0]["started"]["seed"])
    text = "".join(event["chunk"]["text"]["text"] for event in events if "text" in event.get("chunk", {}))
    assert text == formulas.text(seed, "Hi", formulas.NATURAL_LENGTH)


async def test_an_answer_goes_on_where_it_was_cut(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    """The rest begins at the place that the request says, and what the client has and the rest are the answer."""
    started, *rest = await answered(router, RESUMED)
    assert (started.started.model, started.started.seed, list(started.started.revisions)) == ("toy", 7, ["1", "1", "1"])
    text = [event.chunk for event in rest if event.chunk.port == "text"]
    audio = [event.chunk for event in rest if event.chunk.port == "audio"]
    assert [(text[0].seq, text[0].first), (audio[0].seq, audio[0].first)] == [(2, 4), (1, 120)]
    held = RESUMED.resume.history[0].text.text
    assert held + "".join(chunk.text.text for chunk in text) == formulas.text(7, "Hi", formulas.NATURAL_LENGTH)
    samples = np.frombuffer(b"".join(chunk.audio.data for chunk in audio), "<i2")
    np.testing.assert_array_equal(samples, formulas.audio(7, "Hi", formulas.NATURAL_LENGTH)[120:, 0] * 32768)


def copy_of(message: M) -> M:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


async def test_where_only_started_came_resume_is_empty(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    request = copy_of(RESUMED)
    request.resume.Clear()
    request.resume.SetInParent()
    whole(await answered(router, request))


async def test_other_revisions_and_text_without_its_history_are_refused(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    request = copy_of(RESUMED)
    request.revisions[0] = "another"
    assert (await refused(router, request)).reason == "REVISION_MISMATCH"
    request = copy_of(RESUMED)
    del request.resume.history[:]
    assert (await refused(router, request)).reason == "BAD_REQUEST"


async def test_a_bad_request_names_its_field(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    told = await refused(router, omni_pb2.GenerateRequest(model="no-such-model"))
    assert (told.reason, told.code, told.retry_delay_s) == ("UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND, None)
    assert told.metadata["field"] == "model"
    told = await refused(router, BAD_TURN.turn)
    assert (told.reason, told.code, told.fields) == ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT, ["thinker.max_tokens"])


async def test_a_conversation_goes_on_after_a_turn_that_failed(router: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    call = router.Converse(timeout=TIMEOUT_S)
    await call.write(BAD_TURN)
    failed = await call.read()
    assert isinstance(failed, omni_pb2.ConverseResponse)
    assert (failed.turn_failed.reason, failed.turn_failed.metadata["field"]) == ("BAD_REQUEST", "thinker.max_tokens")
    await call.write(GOOD_TURN)
    answer = WholeAnswer()
    while answer.usage is None:
        event = await call.read()
        assert isinstance(event, omni_pb2.ConverseResponse)
        answer.take(as_generated(event))
    answer.check_toy(7, "Hi")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


def as_generated(event: omni_pb2.ConverseResponse) -> omni_pb2.GenerateResponse:
    """The same event of a call of Generate."""
    name = event.WhichOneof("event")
    assert name in ("started", "chunk", "usage"), event
    return omni_pb2.GenerateResponse(**{name: getattr(event, name)})


@contextmanager
def by_hand(kind: str, folder: Path) -> Iterator[str]:
    """The address of a stage that is started as the page starts one, on a free port."""
    (flags,) = re.findall(r"^python -m omnistage\.thinker (.*) --address 127.0.0.1:50051$", GRPC_PAGE, re.MULTILINE)
    with ServerProcess(f"omnistage.{kind}", *flags.split(), "--address", "127.0.0.1:0", log_folder=folder) as process:
        process.wait_ready()
        yield process.address


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with by_hand("thinker", tmp_path_factory.mktemp("thinker")) as address:
        yield address


async def test_a_thinker_alone(thinker: str) -> None:
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(THINKER_OPEN)
        await caller.opened()
        await caller.until(lambda heard: len(heard.of("text")) == 2)
        await caller.until_silent()
        assert len(caller.heard.of("text")) == 2, "more than there was credit for"
        await caller.call.write(MORE_CREDIT)
        heard = await caller.finish()
    heard.check_whole(["text"])
    assert heard.text() == formulas.text(7, "Hi", formulas.NATURAL_LENGTH)


async def test_tensors_come_inline_to_who_takes_no_offer(thinker: str) -> None:
    request = copy_of(THINKER_OPEN)
    del request.open.unwanted[:]
    del request.open.credits[:]
    request.open.credits.extend(stage_pb2.Credit(port=port, total=1000) for port in ("text", "hidden"))
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(request)
        assert (await caller.opened()).offers
        heard = await caller.finish()
    heard.check_whole(["text", "hidden"])
    np.testing.assert_array_equal(heard.rows("hidden")[0], formulas.row(formulas.token(7, "Hi", 0)))


async def test_an_interrupt_ends_a_session_well(thinker: str) -> None:
    async with stage_stub(thinker) as stub:
        caller = RunStream(stub)
        await caller.call.write(THINKER_OPEN)
        await caller.until(lambda heard: len(heard.of("text")) == 2)
        await caller.send(interrupt=stage_pb2.Interrupt())
        await caller.call.write(MORE_CREDIT)
        heard = await caller.finish()
    heard.check_whole(["text"])
    assert len(heard.text()) < len(formulas.text(7, "Hi", formulas.NATURAL_LENGTH))


async def test_a_code2wav_alone(tmp_path: Path) -> None:
    with by_hand("code2wav", tmp_path) as address:
        async with stage_stub(address) as stub:
            caller = RunStream(stub)
            await caller.call.write(CODE2WAV_OPEN)
            (credit,) = (await caller.opened()).credits
            assert (credit.port, credit.total > 0) == ("codes", True)
            await caller.call.write(CODES)
            heard = await caller.finish()
    heard.check_whole(["audio"])
    codes = np.array(CODES.chunk.codes.codes, np.uint32).reshape(2, 4)
    np.testing.assert_array_equal(heard.samples(), formulas.samples(codes)[:, 0] * 32768)


def test_every_message_is_the_json_that_it_is_printed_as() -> None:
    """A name that json_format does not know would have been an error; one that is written twice would not."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    for text in re.findall(r"^```json\n(.*?)^```", GRPC_PAGE, re.DOTALL | re.MULTILINE):
        json.loads(text, object_pairs_hook=once)
