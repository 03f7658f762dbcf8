"""Servers that the tests of a file treat badly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.mistreated import Mistreated, mistreated


@pytest.fixture(scope="module")
def house() -> Iterator[Mistreated]:
    with mistreated() as opened:
        yield opened
