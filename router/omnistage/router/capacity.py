"""The capacity of the router: how many answers at once the stages can take."""

from __future__ import annotations

from collections.abc import Collection

from omnistage.router.placement import DRAINING, Placement

Sessions = dict[str, dict[str, int]]
"""Sessions that each replica takes, by kind, then by address."""


def capacity(placements: Collection[Placement]) -> int:
    """How many answers all pipelines together can take at once. A pipeline takes as many as all replicas of its scarcest stage take
    sessions together. Draining replicas do not count; lost replicas do, because they may be back at once. Replicas that several pipelines
    share count once: all pipelines with a stage of one kind together take no more than all replicas of that kind.

    At least 1: if no stage takes a session, the request must reach the stages, because their refusal says best why."""
    pipelines = [_sessions(placement) for placement in placements]
    together: Sessions = {}
    for pipeline in pipelines:
        for kind, replicas in pipeline.items():
            together.setdefault(kind, {}).update(replicas)
    total = sum(map(_scarcest, pipelines))
    for kind, replicas in together.items():
        without = sum(_scarcest(pipeline) for pipeline in pipelines if kind not in pipeline)
        total = min(total, sum(replicas.values()) + without)
    return max(1, total)


def _sessions(placement: Placement) -> Sessions:
    """The sessions that each known replica of a pipeline takes; replicas that drain are left out."""
    sessions: Sessions = {}
    for replica in placement.all():
        if replica.description is not None and replica.state != DRAINING:
            sessions.setdefault(replica.kind, {})[replica.address] = replica.description.max_sessions
    return sessions


def _scarcest(pipeline: Sessions) -> int:
    """The smallest number of sessions that all replicas of one kind take together; 0 without replicas."""
    return min((sum(replicas.values()) for replicas in pipeline.values()), default=0)
