"""What a gateway shows to Prometheus: exactly what docs/metrics.md says, on both of its pages."""

from __future__ import annotations

from pathlib import Path

from helpers import servers
from helpers.gateway import gateway
from helpers.metrics import described, documented, fetched, value
from helpers.raw_http import CHAT, answer, post
from helpers.waiting import until

ENDED = "omnistage_gateway_requests_total"


async def test_both_pages_show_what_the_document_says(toy: servers.Stack, tmp_path: Path) -> None:
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
