"""CRC-32C (Castagnoli), as in RFC 3720 section 12.1: reflected polynomial 0x82F63B78, start and final value all ones."""

import functools

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 512
_Words = npt.NDArray[np.uint32]


@functools.cache
def _byte_table() -> _Words:
    """Entry b is the register after shifting b through it, 8 bits."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1)).astype(np.uint32)
    return table


@functools.cache
def _skip_tables(zero_bytes: int) -> _Words:
    """Four tables of 256: shifting `zero_bytes` zero bytes through a register is linear, so it is four look-ups and three exclusive ors."""
    table = _byte_table()
    registers = (np.arange(256, dtype=np.uint32)[None, :] << (np.arange(4, dtype=np.uint32) * 8)[:, None]).astype(np.uint32)
    for _ in range(zero_bytes):
        registers = table[registers & 0xFF] ^ (registers >> np.uint32(8))
    return registers


def _serial(register: int, data: npt.NDArray[np.uint8]) -> int:
    table = _byte_table().tolist()
    for byte in data.tolist():
        register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def crc32c(data: npt.NDArray[np.uint8]) -> int:
    """Checksum of bytes in one dimension.

    Lanes of 512 bytes go side by side through the table; then their registers are joined in order.
    """
    lanes = data.size // _LANE_BYTES
    register = 0xFFFFFFFF
    if lanes > 1:
        table = _byte_table()
        columns = np.ascontiguousarray(data[: lanes * _LANE_BYTES].reshape(lanes, _LANE_BYTES).T)
        registers = np.zeros(lanes, np.uint32)
        for column in columns:
            registers = table[(registers ^ column) & 0xFF] ^ (registers >> np.uint32(8))
        skip = _skip_tables(_LANE_BYTES).tolist()
        for lane in registers.tolist():
            register = (
                skip[0][register & 0xFF] ^ skip[1][register >> 8 & 0xFF] ^ skip[2][register >> 16 & 0xFF] ^ skip[3][register >> 24] ^ lane
            )
        data = data[lanes * _LANE_BYTES :]
    return _serial(register, data) ^ 0xFFFFFFFF
