"""The part of a client's trace context that goes on to the stages: never so much that a hop refuses it, which would look like a lost
stage."""

from __future__ import annotations

import re

import pytest

from omnistage.router.answer import MAX_TRACESTATE, trace_metadata

PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def test_a_well_formed_context_goes_on():
    state = ("tracestate", "a=b")
    assert trace_metadata([("authorization", "x"), PARENT, state]) == [PARENT, state]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([], id="none"),
        pytest.param([("traceparent", "00-" + "a" * 9000)], id="too long"),
        pytest.param([("traceparent", "hello"), ("tracestate", "a=b")], id="no trace"),
        pytest.param([PARENT, PARENT], id="two"),
    ],
)
def test_without_one_a_new_trace_begins(given: list[tuple[str, str]]):
    ((key, value),) = trace_metadata(given)
    assert key == "traceparent" and value != PARENT[1]
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", value)


@pytest.mark.parametrize("states", [["x" * (MAX_TRACESTATE + 1)], ["x" * 300, "y" * 300]])
def test_state_that_is_too_long_is_left_behind(states: list[str]):
    assert trace_metadata([PARENT, *(("tracestate", state) for state in states)]) == [PARENT]
