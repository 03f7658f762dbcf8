"""The gateway's metrics for Prometheus: exactly those in docs/metrics.md, on both of its pages."""

from __future__ import annotations

from pathlib import Path

import httpx2

from helpers import servers
from helpers.gateway import gateway
from helpers.metrics import described, documented, fetched, value
from helpers.raw_http import CHAT, answer, post
from helpers.waiting import until
from omnistage.cli.stack.ending import LOOKING, asks

ENDED = "omnistage_gateway_requests_total"


async def test_both_pages_show_what_the_document_says(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(toy.address, tmp_path) as front:
        assert answer(f"http://{front.address}", post()).status == 200
        said = {row.name: row.described for row in documented() if row.section in ("Gateway", "Every process")}
        # The account of a request is closed behind its last byte.
        await until(
            lambda: any(each.labels.get("endpoint") == CHAT for family in fetched(front.metrics_address) for each in family.samples)
        )
        for address in (front.metrics_address, front.address):
            page = fetched(address)
            assert described(page) == said
            assert value(page, ENDED, endpoint=CHAT, status="200", reason="OK") == 1
            assert value(page, "omnistage_gateway_first_byte_seconds_count", endpoint=CHAT) == 1


async def test_the_launcher_knows_which_endpoints_ask_nothing(url: str) -> None:
    """By their paths: a stack that is to end when nobody asks would not, or would in the middle of a conversation."""
    documented = set(httpx2.get(f"{url}/openapi.json").json()["paths"])
    undocumented = {"/", "/page/{name}", "/openapi.json"}
    assert documented & undocumented == set()
    paths = documented | undocumented
    assert {path for path in paths if not asks({"endpoint": path, "status": "200"})} == LOOKING
    # As the metrics have them.
    for path in ("/health", "/ready", "/v1/models", "/v1/models/toy", "/v1/audio/voices", "/metrics", "/", "/page/icon.svg"):
        assert httpx2.get(f"{url}{path}").status_code == 200
    # Each is counted behind its last byte.
    named = {*LOOKING, "/", "/page/{name}"}
    await until(
        lambda: named <= {sample.labels.get("endpoint") for family in fetched(url.removeprefix("http://")) for sample in family.samples}
    )
