"""Numbers as humans read them."""

from __future__ import annotations

import pytest

from omnistage.models.reports import bytes_told


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"),
        (5, "5 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        ((1 << 20) - 1, "1024 KiB"),
        (3 << 20, "3 MiB"),
        (12_340_000, "11.77 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1073741824 GiB"),
    ],
)
def test_bytes_are_told_with_their_unit(size: int, told: str) -> None:
    assert bytes_told(size) == told
