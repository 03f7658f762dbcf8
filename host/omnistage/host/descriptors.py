"""How many descriptors a server may have, and how many of them are for connections; the rest is for serving those connections."""

from __future__ import annotations

import resource

from omnistage.wire.channel import MAX_CONNECTIONS

MAX_DESCRIPTORS = 65_536
"""Enough for all connections, files and processes of a server. More would cost time, because some libraries look at every descriptor that
the limit allows, and the limit may be a thousand million."""


def raise_limit() -> None:
    """Raise the limit of descriptors to what the system allows, at most MAX_DESCRIPTORS. Most shells allow 1,024, which one or two visitors
    can use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_descriptors = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < max_descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, hard))


def most_connections() -> int:
    """The largest number of connections that a server takes at once: at most half of its descriptors. However many visitors come, the other
    half stays free for its log, its metrics, its neighbours, files that are put aside and processes that decode."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, soft // 2), 1)
