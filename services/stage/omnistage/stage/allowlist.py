"""Which addresses a stage may dial."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")


class AllowList:
    """HOST:PORT patterns with * and ?; brackets are those of an IPv6 address.

    An address that is not plain HOST:PORT, such as a gRPC target with a scheme, never matches.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(pattern.replace("[", "[[]") for pattern in patterns)

    def allows(self, address: str) -> bool:
        return _ADDRESS.fullmatch(address) is not None and any(fnmatchcase(address, pattern) for pattern in self._patterns)
