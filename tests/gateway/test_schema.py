"""The gateway's own document: whatever it allows, and much that it does not, gets an answer that it describes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import httpx2
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
from helpers.raw_http import answer, head
from omnistage.client import __version__

CHECKS: list[CheckFunction] = [content_type_conformance, response_schema_conformance, status_code_conformance]

LIMIT_S = 60.0


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
        @settings(
            max_examples=max(share, 1), deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
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
