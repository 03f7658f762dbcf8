"""CRC-32C against published values and the definition, bit by bit."""

import numpy as np
import pytest

from omnistage.connector.crc32c import crc32c


def by_definition(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(data: bytes, checksum: int) -> None:
    assert crc32c(np.frombuffer(data, np.uint8)) == checksum


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1023, 1024, 1025, 20_001])
def test_lanes_of_any_number_and_rest(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32c(data) == by_definition(data.tobytes())
