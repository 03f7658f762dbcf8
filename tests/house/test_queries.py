"""The queries of docs/metrics.md and of the board use existing metrics: tests/system/test_metrics.py compares that page with processes. The
parser says whether a query is PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from helpers.metrics import PAGE, PROCESS, series

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
BOARD = ROOT / "deploy" / "grafana" / "omnistage.json"

SCRAPED = {"job", "instance", PROCESS}
"""Labels that a scrape adds, or the launcher."""

VARIABLES = {"$__rate_interval": "5m", "$job": "omnistage", "$pipeline": "smol"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def variables() -> list[dict[str, Any]]:
    return list(json.loads(BOARD.read_text(encoding="utf-8"))["templating"]["list"])


def queries() -> dict[str, str]:
    """The queries by the place where they stand."""
    found = {f"{PAGE.name} {number}": query for number, query in enumerate(re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL))}
    for panel in panels():
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel["targets"]}
    for variable in variables():
        if asked := re.fullmatch(
            r"label_values\((.*), (\w+)\)", str(variable["query"].get("query") if variable["type"] == "query" else "")
        ):
            found[f"variable {variable['name']}"] = f"count by ({asked[2]}) ({asked[1]})"
    return found


def parsed(query: str) -> promql_parser.Expr:
    """Parse a query. Raises ValueError if it is not PromQL."""
    for name, standing in VARIABLES.items():
        query = query.replace(name, standing)
    assert "$" not in query
    return promql_parser.parse(query)


def visited(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    """The expression and all its parts."""
    parts: list[promql_parser.Expr] = []
    promql_parser.walk(expression, parts.append)
    return parts


def problems(query: str) -> Iterator[str]:
    """The metrics and labels of a query that do not exist."""
    known = series()
    parts = visited(parsed(query))
    selectors = [part for part in parts if isinstance(part, promql_parser.VectorSelector)]
    selectors += [part.vector_selector for part in parts if isinstance(part, promql_parser.MatrixSelector)]
    asked = set[str]()
    for selector in selectors:
        if selector.name not in known:
            yield f"no metric {selector.name}"
            continue
        asked |= known[selector.name]
        labels = {matcher.name for matcher in selector.matchers.matchers}
        yield from (f"{selector.name} has no label {label}" for label in labels - known[selector.name] - SCRAPED)
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            yield from (
                f"nothing in it has a label {label}" for label in set(part.modifier.labels) - labels_within(part.expr, known) - SCRAPED
            )
        if isinstance(part, promql_parser.BinaryExpr) and part.modifier is not None and part.modifier.matching is not None:
            for side in (part.lhs, part.rhs):
                missing = set(part.modifier.matching.labels) - labels_within(side, known) - SCRAPED
                yield from (f"one side has no label {label}" for label in missing)
    if not selectors:
        yield "it asks for no metric"


def labels_within(expression: promql_parser.Expr, known: dict[str, frozenset[str]]) -> set[str]:
    """Labels that some metric in the expression has."""
    return {label for part in visited(expression) for label in known.get(name_of(part), ())}


def name_of(part: promql_parser.Expr) -> str:
    if isinstance(part, promql_parser.MatrixSelector):
        part = part.vector_selector
    return (part.name or "") if isinstance(part, promql_parser.VectorSelector) else ""


@pytest.mark.parametrize("where", queries())
def test_a_query_asks_for_what_there_is(where: str) -> None:
    assert list(problems(queries()[where])) == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(omnistage_router_request_total[5m])", "no metric omnistage_router_request_total"),
        ('omnistage_router_replicas{status="lost"}', "omnistage_router_replicas has no label status"),
        ("sum by (model) (omnistage_router_inflight)", "nothing in it has a label model"),
        ("sum by (le) (rate(omnistage_router_rtf_count[5m]))", "nothing in it has a label le"),
        ("omnistage_stage_kv_pages * on (pipeline) group_left () omnistage_router_replicas", "one side has no label pipeline"),
        ("1 + 1", "it asks for no metric"),
    ],
)
def test_one_that_does_not_is_found(query: str, problem: str) -> None:
    assert problem in list(problems(query))


def test_the_legends_of_the_board_name_labels_that_are_left() -> None:
    wrong = []
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            wrong += [(panel["title"], label) for label in named - left_over(parsed(target["expr"]))]
    assert wrong == []


def left_over(expression: promql_parser.Expr) -> set[str]:
    """Labels that the outermost aggregation keeps, or all labels of the metric."""
    for part in visited(expression):
        if isinstance(part, promql_parser.AggregateExpr):
            return set(part.modifier.labels) if part.modifier is not None else set()
    return labels_within(expression, series()) | SCRAPED


def test_the_board_can_be_imported_anywhere() -> None:
    """The board's panels ask the source that a variable names, and do not overlap."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert [variable["name"] for variable in variables()] == ["datasource", "job", "pipeline"]
    sources = [panel["datasource"] for panel in panels()] + [target["datasource"] for panel in panels() for target in panel["targets"]]
    sources += [variable["datasource"] for variable in variables() if variable["type"] == "query"]
    assert {source["uid"] for source in sources} == {"${datasource}"} and {source["type"] for source in sources} == {"prometheus"}
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers) and "id" not in board
    cells = [cell for panel in board["panels"] for cell in covered(panel["gridPos"])]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(x < 24 for x, _ in cells)


def test_the_example_for_prometheus_finds_every_server_in_containers() -> None:
    """The example uses the names of the services of the default stack, and the port of the images. The gateway shares no network with
    stages, and has its page at its public port, too."""
    jobs = {job["job_name"]: job for job in yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["scrape_configs"]}
    (found,) = jobs["omnistage-compose"]["dns_sd_configs"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    default = {name for name, service in services.items() if "profiles" not in service}
    assert set(found["names"]) == default - {"model", "token", "gateway-token", "gateway"}
    assert all("stages" in services[name]["networks"] for name in found["names"])
    for images in ("router", "services"):
        assert f"OMNISTAGE_METRICS_ADDRESS=0.0.0.0:{found['port']}" in (ROOT / images / "Dockerfile").read_text(encoding="utf-8")


def covered(place: dict[str, int]) -> list[tuple[int, int]]:
    return [(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
