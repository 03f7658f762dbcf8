"""Metrics as docs/metrics.md has them, and as a page shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

PROCESS = "process"
"""The label that a launcher adds to every sample."""

PARTS = ("_bucket", "_sum", "_count")
"""The suffixes of histograms and summaries, each of which is a series of its own in a query."""


@dataclass(frozen=True)
class Described:
    """The type of one metric and the labels of its samples, le left out; the metric is named as in a query."""

    type: str
    labels: frozenset[str]


@dataclass(frozen=True)
class MetricsRow:
    """One row of the page. section: its heading. who: of the stages that have it, in the words of the page."""

    name: str
    section: str
    who: str
    described: Described


def documented() -> list[MetricsRow]:
    """All rows of the page, in its order."""
    rows: list[MetricsRow] = []
    section, columns = "", list[str]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif columns[0] == "metric" and not cells[0].startswith("-"):
            row = dict(zip(columns, cells, strict=True))
            labels = frozenset(filter(None, (label.strip() for label in row["labels"].split(","))))
            rows.append(MetricsRow(row["metric"].strip("`"), section, row.get("who", ""), Described(row["type"], labels)))
    assert rows
    return rows


def series() -> dict[str, frozenset[str]]:
    """Every name that a query can ask for, with the labels that its series have: those of histograms have le."""
    found: dict[str, frozenset[str]] = {}
    for row in documented():
        labels = row.described.labels
        match row.described.type:
            case "histogram":
                found |= {f"{row.name}{part}": labels | ({"le"} if part == "_bucket" else set()) for part in PARTS}
            case "summary":
                found |= {f"{row.name}{part}": labels for part in PARTS[1:]}
            case _:
                found[row.name] = labels
    return found


def fetched(address: str) -> list[Metric]:
    """The metrics of the page there. Raises OSError, and ValueError for what is no page."""
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=30) as page:
        return list(text_string_to_metric_families(page.read().decode()))


def described(families: Iterable[Metric], without: Collection[str] = ()) -> dict[str, Described]:
    """The metrics that the families show, by the names of `documented`. All samples of one must have the same labels. without: labels to
    leave out."""
    found: dict[str, Described] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {frozenset(sample.labels) - {"le", *without} for sample in family.samples}
        assert len(labels) == 1, f"{name} has samples with {[sorted(each) for each in labels]}"
        found[name] = Described(family.type, *labels)
    return found


def value(families: Iterable[Metric], sample: str, **labels: str) -> float:
    """The value of the one sample with this name and these labels; it may have others beside them."""
    (found,) = [
        each.value for family in families for each in family.samples if each.name == sample and labels.items() <= each.labels.items()
    ]
    return found
