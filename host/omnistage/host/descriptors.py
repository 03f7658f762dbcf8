"""How many descriptors a server may have, and how many of them are for connections: the rest is for what it needs to serve those."""

from __future__ import annotations

import resource

from omnistage.wire.channel import MAX_CONNECTIONS

WANTED = 65_536
"""As many as all connections, files and processes of a server ever need. Not more: some libraries look at each descriptor that there might
be, and a limit may be a thousand million."""


def raise_limit() -> None:
    """Have as many descriptors as the system allows, at most WANTED. Most shells give 1,024, which a visitor or two use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Connections that a server takes at once: half of its descriptors at most. The others are for its log, its metrics, its neighbours,
    files that are put aside and processes that decode, whoever is at the door."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, soft // 2), 1)
