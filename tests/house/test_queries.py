"""The queries of docs/metrics.md, of the board and of the alerts use existing metrics: tests/system/test_metrics.py compares that page with
processes. The parser says whether a query is PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from helpers.metrics import PAGE, PROCESS, series
from omnistage.router.replica import STATES
from omnistage.v1 import error_pb2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
BOARD = ROOT / "deploy" / "grafana" / "omnistage.json"
ALERTS = EXAMPLE.parent / "alerts.yml"

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
    return found | {rule["alert"]: rule["expr"] for rule in alerts()}


def alerts() -> list[dict[str, Any]]:
    """The rules of the alerts. A name that stands twice, or an unknown key, would make Prometheus refuse the file, or drop a rule."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def known_series() -> dict[str, frozenset[str]]:
    """The series of the page, and the one that Prometheus itself makes of each scrape."""
    return {**series(), "up": frozenset()}


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


def selectors_of(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    """The metrics that the expression reads, each with the labels that it demands."""
    parts = visited(expression)
    found = [part for part in parts if isinstance(part, promql_parser.VectorSelector)]
    return found + [part.vector_selector for part in parts if isinstance(part, promql_parser.MatrixSelector)]


def problems(query: str) -> Iterator[str]:
    """The metrics and labels of a query that do not exist."""
    known = known_series()
    parts = visited(parsed(query))
    selectors = selectors_of(parsed(query))
    for selector in selectors:
        if selector.name not in known:
            yield f"no metric {selector.name}"
            continue
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
    return labels_within(expression, known_series()) | SCRAPED


REASONS = (name.removeprefix("ERROR_REASON_") for name in dict(error_pb2.ErrorReason.items()))
LABELS: dict[str, frozenset[str]] = {
    "reason": frozenset({"OK", "CANCELLED", "INTERNAL", *REASONS}),
    "state": frozenset(STATES.values()),
    "process": frozenset({"router", "gateway", "launcher"}),
    "code": frozenset(map(str.upper, re.findall(r"`(\w+)`", (PAGE.parent / "http.md").read_text(encoding="utf-8")))),
}
"""Labels whose values in a query are words of our code, which a new name would leave behind."""


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_can_be_loaded_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Omnistage[A-Z]\w+", rule["alert"]) and rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[1-9][0-9]*m", rule.get("for", "1m")) and rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    texts = rule["annotations"]
    assert list(texts) == ["summary", "meaning", "action", "runbook"] and all(texts.values())
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
    assert named <= left_over(parsed(rule["expr"]))
    page, _, anchor = texts["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert not anchor or anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_the_words_that_an_alert_looks_for_are_those_of_the_servers(rule: dict[str, Any]) -> None:
    for selector in selectors_of(parsed(rule["expr"])):
        for matcher in selector.matchers.matchers:
            if matcher.name in LABELS:
                assert set(matcher.value.split("|")) <= LABELS[matcher.name], matcher.name


def test_the_example_for_prometheus_reads_the_alerts_and_each_has_its_own_name() -> None:
    assert yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["rule_files"] == [ALERTS.name]
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    groups = [group["name"] for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]]
    assert len(set(groups)) == len(groups)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True, capture_output=True, timeout=60)
    subprocess.run(["promtool", "check", "config", "--syntax-only", EXAMPLE], check=True, capture_output=True, timeout=60)


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
