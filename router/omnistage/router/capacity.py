"""How many answers at once the stages can take."""

from __future__ import annotations

from collections.abc import Collection

from omnistage.router.placement import DRAINING, Placement

Sessions = dict[str, dict[str, int]]
"""Of each replica, by kind and address."""


def capacity(placements: Collection[Placement]) -> int:
    """Sessions of the scarcest stage of every pipeline, over all of its replicas that are known and not draining. One that was lost counts
    too, because it may be back at once; at least 1, because a stage says best why it takes nobody.

    A replica that several pipelines share counts once: for each kind, the pipelines that have it take no more together than all of its
    replicas do.
    """
    pipelines = [_sessions(placement) for placement in placements]
    together: Sessions = {}
    for pipeline in pipelines:
        for kind, replicas in pipeline.items():
            together.setdefault(kind, {}).update(replicas)
    most = sum(map(_scarcest, pipelines))
    for kind, replicas in together.items():
        without = sum(_scarcest(pipeline) for pipeline in pipelines if kind not in pipeline)
        most = min(most, sum(replicas.values()) + without)
    return max(1, most)


def _sessions(placement: Placement) -> Sessions:
    sessions: Sessions = {}
    for replica in placement.all():
        if replica.description is not None and replica.state != DRAINING:
            sessions.setdefault(replica.kind, {})[replica.address] = replica.description.max_sessions
    return sessions


def _scarcest(pipeline: Sessions) -> int:
    return min((sum(replicas.values()) for replicas in pipeline.values()), default=0)
