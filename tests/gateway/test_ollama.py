"""Ollama's interface: answers line by line and whole, what its clients ask about models, and errors in its form. Its own clients ask in
tests/system/test_programs.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.metrics import fetched, value
from helpers.waiting import until
from omnistage.models.toy import formulas

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
TEXT = formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy:latest", "messages": HELLO, "options": {"seed": 5}},
    GENERATE: {"model": "toy", "prompt": "Hello", "options": {"seed": 5}},
}
LINES = "application/x-ndjson"


def lines(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a streamed answer."""
    answer = httpx2.post(f"{url}{path}", json={**ASKED[path], **fields}, timeout=60)
    assert (answer.status_code, answer.headers["content-type"]) == (200, LINES), answer.text
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def text_of(line: dict[str, Any]) -> str:
    text: str = line["response"] if "response" in line else line["message"]["content"]
    return text


def error(answer: httpx2.Response) -> str:
    body = answer.json()
    assert body.keys() == {"error"}, body
    text: str = body["error"]
    return text


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_comes_line_by_line_unless_it_shall_be_whole(url: str, path: str) -> None:
    *pieces, end = lines(url, path)
    assert len(pieces) > 1 and not any(line["done"] for line in pieces)
    assert "".join(map(text_of, pieces)) == TEXT and text_of(end) == ""
    assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "stop", formulas.NATURAL_LENGTH)
    for line in (*pieces, end):
        assert line["model"] == ASKED[path]["model"] and datetime.fromisoformat(line["created_at"]).tzinfo
    answer = httpx2.post(f"{url}{path}", json={**ASKED[path], "stream": False}).json()
    assert text_of(answer) == TEXT and answer.keys() == end.keys()
    parts = sum(answer[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration"))
    assert 0 < parts <= answer["total_duration"] < 60e9 and all(
        isinstance(answer[name], int) for name in answer if name.endswith("_duration")
    )


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"num_predict": 4}, formulas.text(5, "Hello", 4), "length"),
        ({"num_predict": -1}, TEXT, "stop"),
        ({"num_predict": -2, "num_ctx": 4096, "mirostat": 0, "use_mmap": True, "top_p": 0, "repeat_penalty": 1.1}, TEXT, "stop"),
        ({"stop": TEXT.split()[3]}, " ".join(TEXT.split()[:3]) + " ", "stop"),
    ],
)
def test_options_are_those_of_the_pipeline_by_ollamas_names(url: str, options: dict[str, Any], text: str, reason: str) -> None:
    for path in ASKED:
        *pieces, end = lines(url, path, options={"seed": 5, **options}, keep_alive="5m", think=False)
        assert ("".join(map(text_of, pieces)), end["done_reason"]) == (text, reason)


def test_a_seed_below_zero_is_drawn_anew(url: str) -> None:
    firsts = {text_of(lines(url, GENERATE, options={"seed": -1, "num_predict": 2})[0]) for _ in range(8)}
    assert len(firsts) > 1


def test_the_system_stands_before_the_prompt(url: str) -> None:
    prompted = [text_of(line) for line in lines(url, GENERATE, system="Be short.")]
    turns = [{"role": "system", "content": "Be short."}, *HELLO]
    assert "".join(prompted) == "".join(text_of(line) for line in lines(url, CHAT, messages=turns)) != ""


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": []}), (CHAT, {"messages": None}), (GENERATE, {"prompt": ""})])
def test_a_model_is_loaded_without_a_question(url: str, path: str, fields: dict[str, Any]) -> None:
    answer = httpx2.post(f"{url}{path}", json={**ASKED[path], **fields, "keep_alive": 0}).json()
    assert (text_of(answer), answer["done"], answer["done_reason"]) == ("", True, "load")


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_is_json_whatever_its_type_says(url: str, kind: str) -> None:
    """As for Ollama, whose documents ask by curl without a type."""
    answer = httpx2.post(f"{url}{CHAT}", content=json.dumps(ASKED[CHAT]), headers={"Content-Type": kind})
    assert answer.status_code == 200 and text_of(json.loads(answer.text.splitlines()[0]))


def test_models_are_those_that_answer_in_text(url: str, film_url: str) -> None:
    (tag,) = httpx2.get(f"{url}/api/tags").json()["models"]
    (running,) = httpx2.get(f"{url}/api/ps").json()["models"]
    assert tag["name"] == tag["model"] == running["name"] == "toy:latest" and tag["digest"] == running["digest"]
    assert len(tag["digest"]) == 64 and tag["details"]["families"] == ["toy"]
    assert datetime.fromisoformat(tag["modified_at"]) < datetime.fromisoformat(running["expires_at"])
    assert httpx2.get(f"{film_url}/api/tags").json() == httpx2.get(f"{film_url}/api/ps").json() == {"models": []}
    for field in ("model", "name"):
        shown = httpx2.post(f"{url}/api/show", json={field: "toy:latest"}).json()
        assert (shown["capabilities"], shown["details"]) == (["completion"], tag["details"])
        assert shown["model_info"]["general.architecture"] == "toy"
    assert [int(part) for part in httpx2.get(f"{url}/api/version").json()["version"].split(".")] >= [0, 12, 11]
    assert httpx2.head(f"{url}/").status_code == httpx2.head(f"{url}/api/tags").status_code == 200


def test_openais_clients_may_write_the_tag_too(url: str) -> None:
    assert httpx2.get(f"{url}/v1/models/toy:latest").json()["id"] == "toy"
    body = {"model": "toy:latest", "messages": HELLO, "max_tokens": 2}
    assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 200


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"model": "none"}, 404, "'none' does not exist here; there are: toy"),
    (CHAT, {"model": None}, 400, "model: is missing"),
    (CHAT, {"options": {"temperature": 3}}, 400, "options.temperature: must be at most 2"),
    (CHAT, {"options": {"num_predict": 100_000}}, 400, "options.num_predict: must be from 1 to 32768"),
    (CHAT, {"options": {"num_predict": "many"}}, 400, "options.num_predict: must be a whole number"),
    (CHAT, {"options": {"temprature": 1}}, 400, "options.temprature"),
    (CHAT, {"colour": "red"}, 400, "colour"),
    (CHAT, {"format": "xml"}, 400, 'format: give "json" or a JSON schema'),
    (CHAT, {"format": "json"}, 400, "format: "),  # This toy cannot keep to one.
    (CHAT, {"think": 3}, 400, "think: must be true or false"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs: goes with logprobs"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools: nothing here does that yet"),
    (CHAT, {"messages": [{"role": "tool", "content": "3", "tool_name": "f"}]}, 400, "messages[0].role: is tool"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "messages[1].tool_calls: "),
    (CHAT, {"messages": [{**HELLO[0], "images": "cat.png"}]}, 400, "messages[0].images: must be a list of pictures in base64"),
    (CHAT, {"messages": [{**HELLO[0], "images": ["?"]}]}, 400, "messages[0].images[0]: is not base64"),
    (CHAT, {"messages": [{**HELLO[0], "images": [__file__]}]}, 400, "messages[0].images[0]: is not base64"),
    (GENERATE, {"images": ["?"]}, 400, "images[0]: is not base64"),
    (GENERATE, {"suffix": "end"}, 400, "suffix: "),
    (GENERATE, {"raw": True}, 400, "raw: "),
    (GENERATE, {"template": "{{ .Prompt }}"}, 400, "template: "),
    (GENERATE, {"context": [1, 2]}, 400, "context: "),
    (GENERATE, {"width": 64}, 400, "width: "),
]


@pytest.mark.parametrize(("path", "fields", "status", "text"), REFUSED)
def test_what_cannot_be_done_is_told_in_ollamas_form(url: str, path: str, fields: dict[str, Any], status: int, text: str) -> None:
    answer = httpx2.post(f"{url}{path}", json={**ASKED[path], **fields})
    assert answer.status_code == status and text in error(answer)


@pytest.mark.parametrize(
    ("path", "text"), [("pull", "omnistage pull"), ("create", "omnistage serve"), ("embed", "embeddings"), ("blobs/sha256:0", "operator")]
)
def test_what_is_not_offered_says_what_would_do(url: str, path: str, text: str) -> None:
    answer = httpx2.post(f"{url}/api/{path}", json={"model": "toy"})
    assert answer.status_code == 404 and text in error(answer)


def test_whoever_is_refused_at_the_door_is_told_in_ollamas_form(url: str) -> None:
    for method, path, headers, status, text in (
        ("DELETE", "/api/delete", {}, 404, "its operator adds and removes them"),
        ("POST", "/api/none", {}, 404, "Unknown request URL: POST /api/none"),
        ("GET", CHAT, {}, 405, "GET is not for /api/chat"),
        ("POST", CHAT, {"Host": "evil.example.com"}, 403, "OMNISTAGE_ALLOWED_HOSTS"),
        ("POST", CHAT, {"Origin": "https://evil.example.com", "Content-Type": "text/plain"}, 403, "evil.example.com"),
        ("POST", CHAT, {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}, 403, "another host"),
        ("POST", CHAT, {"Authorization": "Bearer \x01"}, 401, "API key"),
    ):
        body = json.dumps({"model": "toy"}) if method != "GET" else None
        answer = httpx2.request(method, f"{url}{path}", headers=headers, content=body)
        assert (answer.status_code, text in error(answer)) == (status, True), answer.text
    for content, text in (("{bad", "the body is no JSON"), ("", "the body is no JSON object"), ("[]", "the body is no JSON object")):
        answer = httpx2.post(f"{url}{CHAT}", content=content)
        assert answer.status_code == 400 and text in error(answer)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[servers.ServerProcesses, servers.ServerProcess]]:
    """A toy whose answers take minutes, and a gateway."""
    with servers.stack(tmp_path, options={"interval_s": 0.05, "length": 10_000}) as stack, gateway(stack.address, tmp_path) as door:
        yield stack, door


async def test_a_stage_that_is_lost_ends_a_stream_with_why(slow: tuple[servers.ServerProcesses, servers.ServerProcess]) -> None:
    """And requests of this interface have their line in the log, and their metrics."""
    stack, door = slow
    with httpx2.stream("POST", f"http://{door.address}{CHAT}", json=ASKED[CHAT], timeout=60) as answer:
        pieces = (json.loads(line) for line in answer.iter_lines())
        assert text_of(next(pieces))
        os.kill(stack.stages["thinker"].pid, signal.SIGKILL)
        *_, last = pieces
    assert last.keys() == {"error"} and "thinker" in last["error"]

    def ends() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in door.log().splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in logged if line["event"] == "http.done"]

    await until(ends)
    (line,) = ends()
    assert (line["path"], line["status"], line["reason"]) == (CHAT, 200, "STAGE_LOST") and line["ttft_s"] > 0
    labels = {"endpoint": CHAT, "status": "200", "reason": "STAGE_LOST"}
    assert value(fetched(door.address), "omnistage_gateway_requests_total", **labels) == 1
