"""The gateway's guard: who may call, from where, and the log and the metrics about it; and how hosts share the router's places."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest

from helpers import servers
from helpers.ask import ask as ask_router
from helpers.chain import addresses_of, good
from helpers.gateway import gateway, local_gateway, router_of
from helpers.metrics import described, documented, fetched, value
from helpers.raw_http import CHAT, QUESTION, HttpAnswer, answer, head, post
from helpers.servers import Local, local_chain, local_router, omni_stub
from helpers.waiting import until
from omnistage.cli.stack.ending import LOOKING, asks
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

APP = "https://app.example.com"

ENDPOINTS = (CHAT, "/v1/responses", "/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/unknown", "/")


@pytest.fixture(scope="module")
def front(toy: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcess]:
    """A gateway of these tests, whose log they read."""
    with gateway(toy.address, tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture(scope="module")
def open_front(toy: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcess]:
    """One behind a proxy on this host, which pages of another host may call."""
    flags = ("--allowed-origins", f"{APP}/", "--allowed-hosts", "Api.Example.com", "--trusted-proxies", "127.0.0.1")
    with gateway(toy.address, tmp_path_factory.mktemp("open"), *flags) as server:
        yield server


def ask(server: servers.ServerProcess, method: str = "GET", path: str = "/v1/models", **headers: str) -> HttpAnswer:
    """headers: _ in a name is written as -."""
    given = {name.replace("_", "-"): value for name, value in {"Host": "localhost", **headers}.items()}
    return answer(f"http://{server.address}", head(method, path, given), method=method)


def sent(server: servers.ServerProcess, request: bytes, source: str = "127.0.0.1") -> HttpAnswer:
    return answer(f"http://{server.address}", request, source=source)


async def line(server: servers.ServerProcess, heard: HttpAnswer, event: str = "http.done", name: str = "request_id") -> dict[str, Any]:
    """The line of the log about this answer."""
    wanted = heard.header("x-request-id")

    def found() -> list[dict[str, Any]]:
        # gRPC writes lines of its own, and the last line may not be whole yet.
        lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == event and line.get(name) == wanted]

    await until(found)
    (only,) = found()
    return only


HOSTS = ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:9", "[::1]", "me.localhost", "a.b.LocalHost:3000"]
NO_HOSTS = [
    *("evil.example.com", "localhost.evil.example.com", "evil-localhost", "127.0.0.1.evil.example.com", "[::2]", "0.0.0.0"),
    *("api.example.com", "", ":80"),
]


@pytest.mark.parametrize("host", [*HOSTS, *NO_HOSTS])
def test_names_of_this_machine_alone_lead_here_so_no_name_can_be_bound_to_this_address(front: servers.ServerProcess, host: str) -> None:
    heard = ask(front, Host=host)
    assert heard.status == (200 if host in HOSTS else 403)
    assert host in HOSTS or heard.error["code"] == "host_not_allowed"


def test_a_request_has_one_host(front: servers.ServerProcess) -> None:
    for hosts, version, status in (
        ({}, "1.1", 400),
        ({"Host": "localhost", "host": "localhost"}, "1.1", 400),
        ({}, "1.0", 403),
        ({"Host": "localhost/health?"}, "1.1", 403),
    ):
        assert sent(front, head("GET", "/v1/models", hosts, version=version)).status == status


def test_probes_come_by_any_name(front: servers.ServerProcess) -> None:
    for method, path, status in (("GET", "/health", 200), ("GET", "/ready", 200), ("HEAD", "/ready", 200), ("GET", "/metrics", 403)):
        assert ask(front, method, path, Host="10.1.2.3:8000").status == status


FOREIGN = [
    *("null", "http://localhost:1", "http://evil.example.com", "HTTP://LOCALHOST:80", "http://localhost:{port}/path", "localhost:{port}"),
    "://",
]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=b", "application/x-www-form-urlencoded"])
def test_pages_of_other_hosts_post_nothing(front: servers.ServerProcess, origin: str, kind: str) -> None:
    port = front.address.rpartition(":")[2]
    for path in ENDPOINTS:
        request = post(path=path, Host=f"localhost:{port}", Origin=origin.format(port=port), Content_Type=kind)
        heard = sent(front, request)
        assert (heard.status, heard.error["code"]) == (403, "origin_not_allowed")
        assert heard.header("access-control-allow-origin") is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_sends_no_origin_says_where_its_page_is_from(front: servers.ServerProcess, site: str) -> None:
    assert sent(front, post(Sec_Fetch_Site=site)).error["code"] == "origin_not_allowed"
    assert sent(front, post(Sec_Fetch_Site="same-origin")).status == 200
    # A link that leads to the page; a picture on a page of another host.
    assert ask(front, Sec_Fetch_Site=site).status == 200


def test_our_own_page_may_call(front: servers.ServerProcess) -> None:
    assert sent(front, post(Host=front.address, Origin=f"http://{front.address.upper()}")).status == 200


def test_an_address_of_ipv6_is_a_name_too(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(toy.address, tmp_path, "--address", "[::1]:0") as server:
        url = f"http://{server.address}"
        assert server.address.startswith("[::1]:")
        assert answer(url, post(Host=server.address, Origin=url), source="::1").status == 200
        assert answer(url, post(Host=server.address, Origin="http://[::1]:1"), source="::1").status == 403
        assert answer(url, post(Host="[::2]"), source="::1").status == 403


def test_nobody_gets_leave_to_ask_from_elsewhere(front: servers.ServerProcess) -> None:
    heard = ask(front, "OPTIONS", CHAT, Origin=APP, Access_Control_Request_Method="POST")
    assert heard.status == 403 and heard.header("access-control-allow-origin") is None


def test_allowed_pages_may_call_and_read_errors_too(open_front: servers.ServerProcess) -> None:
    wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os"}
    heard = ask(open_front, "OPTIONS", CHAT, Origin=APP, Access_Control_Request_Private_Network="true", **wanted)
    assert (heard.status, heard.header("access-control-allow-origin")) == (200, APP)
    assert heard.header("access-control-allow-private-network") == "true"
    assert "x-stainless-os" in (heard.header("access-control-allow-headers") or "")
    for request, status in {
        post(Origin=APP): 200,
        post({"model": "toy"}, Origin=APP): 400,
        post(path="/v1/unknown", Origin=APP): 404,
        head("POST", CHAT, {"Host": "localhost", "Origin": APP, "Content-Length": str(1 << 40)}): 413,  # Refused by the guard itself.
    }.items():
        heard = sent(open_front, request)
        assert (heard.status, heard.header("access-control-allow-origin")) == (status, APP)
        assert "x-request-id" in (heard.header("access-control-expose-headers") or "")
    heard = sent(open_front, post(Origin="https://other.example.com"))
    assert (heard.status, heard.header("access-control-allow-origin")) == (403, None)


def test_allowed_names_lead_here(open_front: servers.ServerProcess) -> None:
    hosts = ("api.example.com", "API.EXAMPLE.COM:8443", "other.example.com")
    assert [ask(open_front, Host=host).status for host in hosts] == [200, 200, 403]


@pytest.mark.parametrize("given", ["Bearer secret-1", "bearer secret-1", "BEARER   secret-1 "])
async def test_a_key_is_known_in_any_case_of_its_scheme(front: servers.ServerProcess, given: str) -> None:
    heard = sent(front, post(Authorization=given))
    assert (await line(front, heard))["client"] == f"key:{sha256(b'secret-1').hexdigest()[:16]}"


async def test_of_several_keys_that_of_openai_counts(front: servers.ServerProcess) -> None:
    names = {key: f"key:{sha256(key.encode()).hexdigest()[:16]}" for key in ("one", "two", "three")}
    for headers, key in [
        ({"Authorization": "Bearer one", "x_api_key": "two", "api_key": "three"}, "one"),
        ({"x_api_key": "two", "api_key": "three"}, "two"),
        ({"api_key": "three"}, "three"),
        ({"Authorization": "Basic eDp5", "x_api_key": "two"}, "two"),
        ({"Authorization": "Bearer ", "x_api_key": "two"}, "two"),
    ]:
        assert (await line(front, sent(front, post(**headers))))["client"] == names[key]
    assert (await line(front, sent(front, post(Authorization="Bearer "))))["client"] == "127.0.0.1"


@pytest.mark.parametrize("key", ["schlüssel", "k" * 5000, "a\tb"])
async def test_what_is_no_key_is_refused_and_told_nowhere(front: servers.ServerProcess, key: str) -> None:
    heard = sent(front, post(Authorization=f"Bearer {key}"))
    assert (heard.status, heard.error["code"]) == (401, "invalid_api_key") and key not in heard.body.decode()
    await line(front, heard)
    assert key not in front.log()


@pytest.mark.parametrize("path", [*ENDPOINTS[:-1], "/v1/models"])
def test_what_is_no_key_is_refused_before_a_body_is_read(front: servers.ServerProcess, path: str) -> None:
    """Wherever it is sent."""
    headers = {"Host": "localhost", "Authorization": "Bearer a\tb", "Content-Type": "application/json"}
    method, length = ("GET", {}) if path == "/v1/models" else ("POST", {"Content-Length": "1000000"})
    heard = sent(front, head(method, path, {**headers, **length}))
    assert (heard.status, heard.error["reason"]) == (401, "INVALID_API_KEY")


def test_the_page_asks_for_no_key(front: servers.ServerProcess) -> None:
    assert ask(front, path="/", Authorization="Bearer a\tb").status == 200


async def test_an_error_has_one_reason(front: servers.ServerProcess) -> None:
    """In the answer, the log and the metrics."""
    form = {"response_format": {"type": "json_schema"}}
    heard = [
        sent(front, post({**QUESTION, **form})),
        sent(front, post({"model": "toy", "input": "a", "response_format": "opus", "sample_rate_hz": 22050}, "/v1/audio/speech")),
        sent(front, post({"prompt": "a", "background": "transparent"}, "/v1/images/generations")),
        sent(front, post(path="/v1/unknown")),
        sent(front, post(path="/v1/models")),
        sent(front, post(Host="evil.example.com")),
        sent(front, post(path="/v1/images/variations")),
    ]
    reasons = [each.error["reason"] for each in heard]
    assert reasons == [*["BAD_REQUEST"] * 3, "UNKNOWN_URL", "METHOD_NOT_SUPPORTED", "HOST_NOT_ALLOWED", "NOT_OFFERED"]
    assert [(await line(front, each))["reason"] for each in heard] == reasons
    page = ask(front, path="/metrics").body.decode()
    assert all(f'reason="{reason}"' in page for reason in reasons)


@pytest.mark.parametrize(
    ("path", "kind", "code", "message"),
    [
        ("/v1/audio/transcriptions", "audio/wav", "not_offered", "not offered yet"),
        ("/v1/realtime/calls", "application/sdp", "not_offered", "not offered yet"),
        ("/v1/audio/translations", "application/octet-stream", "not_offered", "not offered yet"),
        ("/v1/images/variations", "multipart/form-data; boundary=b", "not_offered", "variations of pictures are not offered"),
        ("/v1/videos/video_x/remix", "application/json", "not_offered", "remixes of videos are not offered"),
        ("/v1/unknown", "application/x-www-form-urlencoded", "unknown_url", "/v1/unknown"),
    ],
)
def test_what_is_not_offered_or_unknown_is_told_so(front: servers.ServerProcess, path: str, kind: str, code: str, message: str) -> None:
    heard = sent(front, post(b"{}" if kind == "application/json" else b"RIFF\xff\x00", path, Content_Type=kind))
    assert (heard.status, heard.error["code"]) == (404, code) and message in heard.error["message"]


ADDRESSES = {
    **dict.fromkeys(("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/", "//v1//chat/completions"), CHAT),
    **dict.fromkeys(("/openai/v1/chat/completions", "/api/v1/chat/completions", "/openai/deployments/x/chat/completions"), CHAT),
    **dict.fromkeys(("/v1/chat/completion", "/V1/chat/completions"), CHAT),
    "/completions": "/v1/completions",
    "/audio/transcriptions": "/v1/audio/transcriptions",
    "/models/toy": "/v1/models/toy",
    "/models": "/v1/models",
    "/videos/video_1/content": "/v1/videos/video_1/content",
    "/v1/audio/speach": "/v1/audio/speech",
    "/v1/health": "/health",
    **dict.fromkeys(("/v1/embeddings", "/nothing", "/v1", "/" + "a/" * 10_000), ""),
}
"""Addresses that do not exist, and those that were meant; empty: none is similar."""


@pytest.mark.parametrize("path", ADDRESSES, ids=[path[:64] for path in ADDRESSES])
def test_an_unknown_address_is_told_with_the_one_that_was_meant(front: servers.ServerProcess, path: str) -> None:
    refused = sent(front, post(path=path))
    assert (refused.status, refused.error["code"]) == (404, "unknown_url") and len(refused.body) < 1024
    similar = refused.error["message"].partition("; did you mean ")[2].removesuffix("?")
    assert similar == ADDRESSES[path] and refused.error["hint"]


@pytest.mark.parametrize("kind", ["Application/JSON", " application/json ;charset=utf-8", "application/problem+json", ""])
def test_what_is_json_is_read_by_its_own_rules(front: servers.ServerProcess, kind: str) -> None:
    heard = sent(front, post(b'{"model": "toy", "temperature": NaN}', Content_Type=kind))
    assert (heard.status, heard.error["code"]) == (400, "invalid_json")


async def test_a_key_is_told_nowhere(front: servers.ServerProcess, toy: servers.ServerProcesses) -> None:
    url, key = f"http://{front.address}", "sk-never-to-be-seen"
    bodies = (QUESTION, {"model": "none"}, {**QUESTION, "model": key[::-1]})
    heard = [answer(url, post(body, Authorization=f"Bearer {key}")) for body in bodies]
    assert [each.status for each in heard] == [200, 400, 404]
    await line(front, heard[-1])
    metrics = ask(front, path="/metrics").body
    for told in (*(each.body for each in heard), metrics, front.log().encode(), router_of(toy).log().encode()):
        assert key.encode() not in told


async def test_visitors_without_a_key_share_nothing_with_others(front: servers.ServerProcess, toy: servers.ServerProcesses) -> None:
    """The router's account says whose answer it was; who that is has what a prompt left for himself alone."""
    one, other = "127.0.0.1", "127.0.0.2"
    asked: list[tuple[str, dict[str, str]]] = [(one, {}), (one, {}), (other, {}), (one, {"x_api_key": one}), (other, {"x_api_key": "k"})]
    heard = [sent(front, post(**headers), source=source) for source, headers in asked]
    clients = [(await line(router_of(toy), each, "answer.done"))["client"] for each in heard]
    assert clients[0] == clients[1] and len(set(clients)) == 4
    assert all(client.startswith("key:") for client in clients), "one who has no key can be taken for one who has"


async def test_a_trusted_proxy_says_who_asks(open_front: servers.ServerProcess, toy: servers.ServerProcesses) -> None:
    """The client is the last address of a chain that is no trusted proxy: anybody can write those before it."""
    chains = ["10.9.8.7", "1.2.3.4, 10.9.8.7", "10.9.8.7, 127.0.0.1", "2001:db8:0:1::5", "2001:db8:0:1:ffff::6", "2001:db8:0:2::5"]
    heard = [sent(open_front, post(X_Forwarded_For=chain)) for chain in chains]
    told = [(await line(open_front, each))["client"] for each in heard]
    assert told == ["10.9.8.7"] * 3 + ["2001:db8:0:1::5", "2001:db8:0:1:ffff::6", "2001:db8:0:2::5"]
    clients = [(await line(router_of(toy), each, "answer.done"))["client"] for each in heard]
    assert len({*clients[:3]}) == 1
    assert clients[3] == clients[4] != clients[5], "a network of IPv6 is one visitor"
    direct = sent(open_front, post(X_Forwarded_For="10.9.8.7"), source="127.0.0.2")
    assert (await line(open_front, direct))["client"] == "127.0.0.2"


async def test_nobody_else_says_who_asks(front: servers.ServerProcess) -> None:
    heard = sent(front, post(X_Forwarded_For="10.9.8.7"))
    assert (await line(front, heard))["client"] == "127.0.0.1"


async def test_one_line_of_every_request(front: servers.ServerProcess) -> None:
    done = await line(front, sent(front, post(X_Client_Request_Id="mine-1")))
    fields = ("method", "path", "status", "reason", "pipeline", "finish_reason", "tokens", "client_request_id", "message", "field")
    assert [done[name] for name in fields] == ["POST", CHAT, 200, "OK", "toy", "length", 4, "mine-1", None, None]
    assert done["ttft_s"] <= done["total_s"]
    bad = await line(front, sent(front, post({**QUESTION, "temperature": 9, "model": "Quoted"}, X_Client_Request_Id="n\xe4")))
    assert [bad[name] for name in ("status", "reason", "field", *fields[-3:-1])] == [400, "BAD_REQUEST", "temperature", None, None]
    unknown = await line(front, sent(front, post({**QUESTION, "model": "Quoted"})))
    assert [unknown[name] for name in ("status", "reason", "field", "message")] == [404, "UNKNOWN_MODEL", "model", None]
    assert "Quoted" not in front.log()
    cut = await line(front, sent(front, head("GET", f"/v1/{'x' * 5000}", {"Host": "localhost"})))
    assert len(cut["path"]) == 128


def test_metrics_know_routes_and_no_paths(front: servers.ServerProcess) -> None:
    for path in ("/v1/models/toy", "/v1/models/other", "/v1/no-such-thing"):
        ask(front, path=path)
    page = ask(front, path="/metrics").body.decode()
    assert 'omnistage_gateway_requests_total{endpoint="/v1/models/{model}",reason="OK",status="200"}' in page
    assert 'endpoint="/v1/models/{model}",reason="UNKNOWN_MODEL",status="404"' in page
    assert 'endpoint="other",reason="UNKNOWN_URL",status="404"' in page and "no-such-thing" not in page


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/videos/video_x/content", "/health", "/"])
def test_a_method_without_a_body_gets_none(method: str, path: str, url: str, seed: int) -> None:
    """However the body is announced; without one the method is answered as before."""
    body = b"[" + b"0," * random.Random(seed).randrange(1, 100_000) + b"0]"
    for content in (body, iter([body])):
        refused = httpx2.request(method, f"{url}{path}", content=content)
        assert refused.status_code == 400
        assert method == "HEAD" or refused.json()["error"]["code"] == "body_not_taken"
    assert httpx2.request(method, f"{url}{path}").status_code != 400


# Metrics


ENDED = "omnistage_gateway_requests_total"


async def test_both_pages_show_what_the_document_says(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(toy.address, tmp_path) as front:
        assert sent(front, post()).status == 200
        said = {row.name: row.described for row in documented() if row.section in ("Gateway", "Every process")}
        # The account of a request is closed behind its last byte.
        await until(
            lambda: any(each.labels.get("endpoint") == CHAT for family in fetched(front.metrics_address) for each in family.samples)
        )
        for address in (front.metrics_address, front.address):
            page = fetched(address)
            assert described(page) == said and value(page, ENDED, endpoint=CHAT, status="200", reason="OK") == 1
            assert value(page, "omnistage_gateway_first_byte_seconds_count", endpoint=CHAT) == 1


async def test_the_launcher_knows_which_endpoints_ask_nothing(url: str) -> None:
    """By their paths: a stack that is to end when nobody asks would not, or would in the middle of a conversation."""
    documented = set(httpx2.get(f"{url}/openapi.json").json()["paths"])
    undocumented = {"/", "/page/{name}", "/openapi.json", "/docs"}
    assert documented & undocumented == set()
    paths = documented | undocumented
    assert {path for path in paths if not asks({"endpoint": path, "status": "200"})} == LOOKING
    # As the metrics have them.
    for path in (*(path.replace("{model}", "toy") for path in LOOKING), "/", "/page/icon.svg"):
        answer = httpx2.post(f"{url}{path}", json={"model": "toy"}) if path == "/api/show" else httpx2.get(f"{url}{path}")
        assert answer.status_code == 200, path
    # Each is counted behind its last byte.
    named = {*LOOKING, "/", "/page/{name}"}
    await until(
        lambda: named <= {sample.labels.get("endpoint") for family in fetched(url.removeprefix("http://")) for sample in family.samples}
    )


# Hosts


TOKEN = Token("s" * 32)
PLACES = 8
LONG = {**QUESTION, "max_tokens": 20_000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def crowded(token: Token | None) -> AsyncIterator[tuple[Local, str]]:
    """A router, and the URL of a gateway with this token. One host wants more places than there are, each with a key of its own."""
    async with (
        local_chain({"interval_s": 0.01}) as stages,
        local_router(addresses_of(stages), max_sessions=PLACES, token=TOKEN) as router,
        local_gateway(router.address, token) as (url, _),
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(local_address="127.0.0.2"), timeout=60) as greedy,
        AsyncExitStack() as streams,
    ):
        statuses: list[int] = []

        async def begin(number: int) -> None:
            headers = {"Authorization": f"Bearer invented-{number}"}
            answer = await streams.enter_async_context(greedy.stream("POST", f"{url}{CHAT}", json=LONG, headers=headers))
            statuses.append(answer.status_code)

        asking = [asyncio.create_task(begin(number)) for number in range(2 * PLACES)]
        await until(lambda: statuses.count(200) >= PLACES * 3 // 4)
        yield router, url
        await asyncio.gather(*asking)
        assert sorted(statuses) == [200] * (PLACES * 3 // 4) + [503] * (2 * PLACES - PLACES * 3 // 4)


async def status_for(url: str, host: str, key: str = "") -> int:
    transport = httpx2.AsyncHTTPTransport(local_address=host)
    async with httpx2.AsyncClient(transport=transport, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60) as client:
        return (await client.post(f"{url}{CHAT}", json=QUESTION)).status_code


@pytest.mark.parametrize("key", ["", "invented-0", "mine"])
async def test_another_host_gets_its_place_at_once(key: str) -> None:
    async with crowded(TOKEN.for_gateway()) as (_, url):
        assert [await status_for(url, "127.0.0.9", key) for _ in range(3)] == [200] * 3


async def test_behind_a_gateway_without_a_token_all_are_of_one_host() -> None:
    """That is the gateway's own host. A caller whose host the right token names gets a place beside it."""
    async with crowded(None) as (router, url), omni_stub(router.address) as stub:
        assert await status_for(url, "127.0.0.9") == 503
        proof = [(GATEWAY_KEY, TOKEN.for_gateway().secret), (GATEWAY_HOST, "elsewhere")]
        (await ask_router(stub, good(), metadata=proof)).check_toy(5, "good")
