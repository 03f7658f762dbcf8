"""`omnistage serve` takes HTTP: where, how long, and what becomes of the stack without it; a stack that nobody asks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from helpers.serving import pid_of, serving
from helpers.toy_pipeline import toy_pipeline
from helpers.waiting import until
from omnistage.cli.stack.ending import count_requests
from omnistage.cli.stack.layout import DEFAULT_HTTP, Layout, PipelineLayout, ServerOptions, StageLayout, move_port, reachable_address, room
from omnistage.cli.stack.pipelines import GATEWAY_NEEDS, with_gateway
from omnistage.cli.stack.served import Served, all_served, open_page
from omnistage.cli.stack.settings import check
from omnistage.client import Omni
from omnistage.client.errors import StackError
from omnistage.host.metrics import serve_metrics
from omnistage.models.toy import formulas

LIMIT_S = 100.0


def name_of_only_model(page: str) -> str:
    (model,) = json.loads("".join(opened(f"{page}/v1/models")))["data"]
    name: str = model["id"]
    return name


def opened(url: str, *, host: str = "localhost", **body: object) -> Iterator[str]:
    """The lines of an answer, as they come. host: by which it is called. body: what is posted, if anything is."""
    data = json.dumps(body).encode() if body else None
    asking = Request(url, data, {"Content-Type": "application/json", "Host": host})
    with build_opener(ProxyHandler({})).open(asking, timeout=LIMIT_S) as answer:
        for line in answer:
            yield line.decode()


def answered(page: str, name: str) -> str:
    body = "".join(opened(f"{page}/v1/chat/completions", model=name, seed=1, messages=[{"role": "user", "content": "Hi"}]))
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text


def test_it_takes_http_at_one_port_for_as_long_as_it_serves(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is kept and watched as every process is; a status names it; its answers are those of the router. A default port that is
    taken is not in its way, and its own is still its own when it is started again. Variables tell it what no option of `serve` does."""
    monkeypatch.setenv("OMNISTAGE_ALLOWED_HOSTS", "box.example.com")
    monkeypatch.setenv("OMNISTAGE_MODEL_NAMES", "gpt-of-a-test=toy-of-a-test")
    monkeypatch.setenv("OMNISTAGE_SERVE_NO_HTTP", "false")
    logs, words = tmp_path / "logs", ("--metrics", "127.0.0.1:0", "--log-dir", str(tmp_path / "logs"))
    with taken(DEFAULT_HTTP), serving(family, toy_pipeline(tmp_path), *words) as server:
        address = server.address()
        page, _, about = server.report("page: ").partition(" ")
        assert page != f"http://{DEFAULT_HTTP}"
        assert about.strip() == f"(the port of {DEFAULT_HTTP} is taken; OpenAI's interface is below /v1; any key is taken)"
        metrics = server.report("metrics: ")
        name = name_of_only_model(page)
        assert [*opened(f"{page}/v1/models", host="box.example.com")], "a host that is not known is refused"
        text = answered(page, "gpt-of-a-test")
        assert text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        assert f"page  {page}" in omnistage("status", "--address", address).stdout.splitlines()
        assert json.loads(omnistage("status", "--address", address, "--json").stdout)["page"] == page
        at_page = omnistage("status", "--address", page.removeprefix("http://"))
        assert at_page.returncode == 1 and f"over HTTP; its router is at {address}" in at_page.stderr
        assert 'omnistage_process_up{process="gateway"} 1.0\n' in opened(metrics)
        pid = pid_of("omnistage.gateway", family)
        assert b"OMNISTAGE_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
        os.kill(pid, signal.SIGKILL)
        assert server.report("lost ").startswith(f"gateway (pid {pid}) ")
        assert server.report("restarted ").startswith("gateway ")
        assert answered(page, name) == text
    assert '"http.done"' in (logs / "gateway.log").read_text()


@contextmanager
def taken(address: str) -> Iterator[None]:
    """Somebody listens there: who does already, or this test."""
    host, _, port = address.rpartition(":")
    with ExitStack() as exits:
        with suppress(OSError):
            exits.enter_context(socket.create_server((host, int(port))))
        yield


def test_a_typed_port_that_is_taken_is_refused_with_who_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was typed, the default port too."""
    file = tmp_path / "stack.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other, taken(DEFAULT_HTTP):
        used = "{}:{}".format(*other.getsockname())
        file.write_text(f"http: {used}\n")
        ways: list[tuple[str, list[str], dict[str, str]]] = [
            (used, ["--http", used], {}),
            (used, [], {"OMNISTAGE_SERVE_HTTP": used, "OMNISTAGE_SERVE_NO_HTTP": "false"}),
            (used, ["--config", str(file)], {"OMNISTAGE_SERVE_NO_HTTP": "false"}),
            (DEFAULT_HTTP, ["--http", DEFAULT_HTTP], {}),
        ]
        for address, words, variables in ways:
            done = omnistage("serve", "toy", "--address", "127.0.0.1:0", *words, variables=variables)
            (error,) = done.stderr.splitlines()
            assert done.returncode == 1
            pattern = re.escape(f"error: cannot listen on {address}: the port is taken by ") + ".*; choose another --http"
            assert re.fullmatch(pattern, error), error
            assert address != used or f"(pid {os.getpid()})" in error
        done = omnistage("serve", "toy", "--address", used, "--http", used)
        assert done.stderr == f"error: --http: {used} is the --address too; give each its own port\n"


def test_films_outlive_a_gateway_and_go_with_the_stack(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(family, "toy-film", "--http", "127.0.0.1:0") as server:
        videos = f"{server.report('page: ').split()[0]}/v1/videos"

        def shown(url: str, **body: Any) -> dict[str, Any]:
            video: dict[str, Any] = json.loads("".join(opened(url, **body)))
            return video

        name = shown(videos, prompt="a cat", frames=11, steps=1, seed=1)["id"]
        asyncio.run(until(lambda: shown(f"{videos}/{name}")["status"] == "completed"))
        (folder,) = tmp_path.glob("omnistage-films-*")
        (file,) = folder.glob(f"{name}.*")
        film = file.read_bytes()
        os.kill(pid_of("omnistage.gateway", family), signal.SIGKILL)
        assert server.report("restarted ").startswith("gateway ")
        assert shown(f"{videos}/{name}")["status"] == "completed"
        assert file.read_bytes() == film
    assert [*tmp_path.glob("omnistage-films-*")] == []


@lengths.long_form(
    "gateway/test_disconnect.py::test_a_gateway_that_is_told_to_end_lets_answers_end",
    "system/test_host.py::test_sigterm_lets_a_running_session_end_and_refuses_a_new_one",
    unkept="router and stages end behind the gateway",
)
def test_an_answer_over_http_ends_before_the_stack_does(family: ProcessFamily, tmp_path: Path) -> None:
    """Its router is there until then, and its stages."""
    with serving(family, toy_pipeline(tmp_path, interval_s=0.05), "--http", "127.0.0.1:0", "--grace", "100") as server:
        page = server.report("page: ").split()[0]
        question = {"stream": True, "seed": 1, "messages": [{"role": "user", "content": "Hi"}]}
        answer = opened(f"{page}/v1/chat/completions", model=name_of_only_model(page), **question)  # type: ignore[arg-type]
        lines = [next(answer)]
        server.terminate()
        assert server.report("ending ").startswith("on SIGTERM")
        lines += answer
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
        assert text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        assert lines[-2:] == ["data: [DONE]\n", "\n"]
        assert server.wait(LIMIT_S) == 0


def test_a_stack_whose_gateway_cannot_start_goes_on_without(family: ProcessFamily, tmp_path: Path) -> None:
    wrong = {"OMNISTAGE_VIDEO_FOLDER": "/dev/null"}
    with serving(family, toy_pipeline(tmp_path), "--http", "127.0.0.1:0", environment=wrong) as server:
        assert server.report("given up ").startswith("gateway cannot start: ")
        with Omni(address=server.address()) as omni:
            assert omni.generate("Hi").text


def test_a_detached_one_that_nobody_asks_ends_by_itself(family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    words = ("--detach", "--address", "127.0.0.1:0", "--http", "127.0.0.1:0", "--idle-limit", "1")
    done = omnistage("serve", toy_pipeline(tmp_path), *words, "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^page: +http:\S+:\d+ ", done.stderr)
    assert "idle:     it ends by itself when nobody has asked for 1 s\n" in done.stderr
    assert family.wait_ended(LIMIT_S) == []
    assert "ending as nobody has asked for 1 s\n" in (tmp_path / "logs" / "serve.log").read_text()
    assert all_served() == []


async def test_who_looks_has_not_asked() -> None:
    router, gateway = CollectorRegistry(), CollectorRegistry()
    running = Gauge("omnistage_router_inflight", "Of a test.", registry=router)
    answers = Counter("omnistage_router_requests_total", "Of a test.", ("pipeline", "reason"), registry=router)
    calls = Counter("omnistage_gateway_requests_total", "Of a test.", ("endpoint", "status", "reason"), registry=gateway)
    addresses = {
        "thinker": "127.0.0.1:1",
        "router": f"127.0.0.1:{serve_metrics('127.0.0.1', 0, router)}",
        "gateway": f"127.0.0.1:{serve_metrics('127.0.0.1', 0, gateway)}",
    }
    before = await count_requests(addresses)
    assert before is not None
    for endpoint in ("/health", "/ready", "/metrics", "/v1/models"):
        calls.labels(endpoint, "200", "OK").inc()
    calls.labels("other", "404", "UNKNOWN_URL").inc()
    assert await count_requests(addresses) == before
    calls.labels("/", "200", "OK").inc()
    opened_page = await count_requests(addresses)
    answers.labels("toy", "BAD_REQUEST").inc()
    assert before != opened_page != await count_requests(addresses) != before
    running.set(1)
    assert await count_requests(addresses) is None, "an answer that runs"
    running.set(0)
    assert await count_requests({**addresses, "router": "127.0.0.1:1"}) is None, "nobody knows"
    assert await count_requests({**addresses, "gateway": ""}) is not None, "it was given up"


@pytest.mark.parametrize("missing", GATEWAY_NEEDS)
def test_without_its_packages_there_is_none_and_a_line_says_so(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(http=DEFAULT_HTTP)
    assert with_gateway(options) == (options, [])
    monkeypatch.setitem(sys.modules, missing, None)  # As where it is not installed.
    without, (note,) = with_gateway(options)
    assert without == ServerOptions()
    assert f"need {missing}: " in note and "pip install --find-links dist 'omnistage[gateway]', or --no-http" in note
    assert with_gateway(without) == (without, [])


@pytest.mark.parametrize(
    ("address", "said"),
    [("8000", "--http: '8000' has no host"), ("192.0.2.1:8000", "cannot listen on 192.0.2.1:8000: .*; choose another --http")],
)
def test_an_address_where_nobody_can_listen_is_told_before_anything_starts(address: str, said: str) -> None:
    layout = Layout([PipelineLayout("toy", "toy", [StageLayout("thinker", "toy")])], ServerOptions(http=address))
    with pytest.raises(StackError, match=said):
        check(layout)


def test_a_page_that_nobody_serves_is_not_told(free_port: int) -> None:
    """As of a gateway that was given up."""
    for http in ("", f"127.0.0.1:{free_port}"):
        assert open_page(Served("127.0.0.1:1", 1, "toy", "", 5.0, http)) == ""


def test_it_has_a_port_of_its_own_and_is_reached_on_this_machine() -> None:
    assert move_port("[::]:8000", ["127.0.0.1:8001", "127.0.0.1:0", ""]) == "[::]:8000"
    assert move_port("[::]:8000", ["127.0.0.1:8000", "0.0.0.0:8001"]) == "[::]:8002"
    assert move_port("127.0.0.1:0", ["127.0.0.1:0"]) == "127.0.0.1:0"
    assert [room("[::]:8000", others, 20) for others in (["h:8001"], ["h:7999", "h:8019", ""], ["h:8020", "h:0"])] == [1, 19, 20]
    everywhere = {"[::]:1": "[::1]:1", "[0::0]:1": "[::1]:1", "0.0.0.0:1": "127.0.0.1:1", "0:1": "127.0.0.1:1"}
    one = {address: address for address in ("h:1", "[fe80::1]:1", "10.0.0.1:1", "a:1,b:2")}
    assert {address: reachable_address(address) for address in everywhere | one} == everywhere | one
    assert re.fullmatch(r"127\.0\.0\.1:\d+", DEFAULT_HTTP)
