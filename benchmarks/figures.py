"""Figures: measured, printed as a table, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. goal: what it should be, in words, empty where it is only stated. note: how it was measured."""

    figure: str
    value: float
    unit: str
    goal: str = ""
    note: str = ""


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def publish(name: str, figures: Sequence[Figure]) -> Path:
    """Print a table and write benchmarks/out/NAME.json; returns the file."""
    table = Table(title=name)
    for column in ("figure", "value", "unit", "goal", "note"):
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for figure in figures:
        table.add_row(figure.figure, f"{figure.value:.4g}", figure.unit, figure.goal, figure.note)
    Console(width=150).print(table)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return path
