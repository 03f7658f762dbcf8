"""Makes one JSON object of the result of a benchmark, for programs."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from typing import Any

from omnistage.cli.bench.level import Closed, Load
from omnistage.cli.bench.run import Result
from omnistage.cli.bench.sample import Measured, Sample
from omnistage.cli.bench.summary import Summary
from omnistage.client.version import version

DIGITS = 6
"""Digits after the point of seconds and shares: microseconds."""


def as_object(result: Result) -> dict[str, Any]:
    """The object, with the keys of docs/bench.md. Figures without a value are left out, or null."""
    plan = result.plan
    questions = plan.questions
    record: dict[str, Any] = {
        "version": version(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "address": plan.where.address,
        "stages": [asdict(stage) for stage in result.stages],
        "task": questions.task,
        "prompts": questions.prompts.told,
        "output_tokens": None if questions.tokens is None else str(questions.tokens),
        "options": dict(questions.options),
        "seed": questions.seed,
        "warmup": plan.warmup,
        "slo": None if plan.objectives is None else dict(plan.objectives.limits),
        "interrupted": bool(result.interrupted_by),
        "levels": [_level(level) for level in result.levels],
    }
    return _round_all(record)  # type: ignore[no-any-return]


def _level(summary: Summary) -> dict[str, Any]:
    """The object of one level."""
    counts = ("offered", "completed", "failed", "interrupted", "not_started", "failovers", "tokens", "audio_s", "steps", "pictures")
    rates = ("request_throughput", "token_throughput", "audio_throughput", "step_throughput", "request_goodput")
    return {
        "load": _load(summary.load),
        "wall_s": summary.wall_s,
        **{name: getattr(summary, name) for name in (*counts, *rates, "continuous", "client_cpu")},
        "errors": [asdict(error) for error in summary.errors],
        "figures": {name: asdict(values) for name, values in summary.figures.items()},
        "requests": [_request(sample) for sample in summary.samples],
    }


def _load(load: Load) -> dict[str, Any]:
    """The object of a load."""
    if isinstance(load, Closed):
        return {"loop": "closed", "concurrency": load.concurrency}
    burst = {"burst": load.burst} if load.process == "burst" else {}
    return {"loop": "open", "arrivals": load.process, "rate": load.rate, **burst, "max_open": load.most_open}


def _request(sample: Sample) -> dict[str, Any]:
    """The object of one request. It has only the number of gaps between pieces of text, because the figures of the level sum the gaps
    up."""
    record: dict[str, Any] = {name: getattr(sample, name) for name in ("number", "seed", "due_s", "begun_s", "ended_s")}
    if isinstance(sample.outcome, Measured):
        record |= {"outcome": "completed", **asdict(sample.outcome)}
        record["itl_count"] = len(record.pop("itl_s"))
    else:
        record |= {"outcome": "failed", "error": sample.outcome.error, "reason": sample.outcome.reason, "message": sample.outcome.message}
    return record


def _round_all(value: Any) -> Any:
    """The same value, with all its numbers rounded to DIGITS."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _round_all(one) for name, one in value.items()}
    return [_round_all(one) for one in value] if isinstance(value, (list, tuple)) else value
