"""How many answers at once the stages can take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from omnistage.router.placement import DRAINING, Placement


def capacity(placements: Iterable[Placement]) -> int:
    """Sessions of the scarcest stage of every pipeline, over all of its replicas that are known and not draining. One that was lost counts
    too, because it may be back at once; at least 1, because a stage says best why it takes nobody."""
    return max(1, sum(_of_pipeline(placement) for placement in placements))


def _of_pipeline(placement: Placement) -> int:
    sessions: Counter[str] = Counter()
    for replica in placement.all():
        if replica.description is not None and replica.state != DRAINING:
            sessions[replica.kind] += replica.description.max_sessions
    return min(sessions.values(), default=0)
