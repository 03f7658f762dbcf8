"""The devices that compute a decoder: copies of tensors to one of them, and the group of ranks that compute one decoder together, each with
its part of the weights (Shoeybi et al. 2019)."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import FileStore


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to a device. The device makes the copy after its earlier work, and the caller does not wait for it. So the
    caller must not change `values` afterwards."""
    if device.type == "cpu":
        return values
    # Pinned memory, because the caller would wait for any other. The allocator keeps it until the copy is made.
    return values.pin_memory().to(device, non_blocking=True)


EXCHANGE_LIMIT_S = 1800.0
"""Seconds that a rank waits for the others in one exchange. In a server the watchdog finds a hanging rank much earlier; this limit ends
processes that nobody watches. Its clock goes on while a machine is paused, so it is longer than any such pause."""


class RanksApart(Exception):
    """Ranks are no longer at the same place of the same step, because a rank has ended, or a step failed in the middle. From then on their
    results are void. The engine does not count it as an error of a step, because it would try such a step again."""


class Group(Protocol):
    """All ranks, as one of them sees them. rank: the number of this process, from 0 to size - 1."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the parts of all ranks, with the same bits on every rank. part: [rows, width]."""

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks side by side, [rows, size * width]. part: [rows, width]."""


class OneRank:
    """Implements `Group` for one process."""

    rank = 0
    size = 1

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return part


ONE_RANK = OneRank()


class Distributed:
    """Implements `Group` with torch.distributed, one process for each rank. A process is in one group at a time.

    Parts are gathered, then added in the order of the ranks. A library's own sum adds the parts in an order that depends on the size of the
    tensor, so the bits of a row would depend on the number of rows. For two ranks both ways move the same number of bytes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def connect(self, store: str, device: torch.device) -> None:
        """Wait until all ranks have called this too. store: path of a file that all ranks use, in a folder made for them; it may be removed
        when this returns. Raises RanksApart.

        On CPUs the environment names the network interface (GLOO_SOCKET_IFNAME)."""
        try:
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=FileStore(store, self.size),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=EXCHANGE_LIMIT_S),
                device_id=device if device.type == "cuda" else None,
            )
            distributed.barrier()
        except RuntimeError as error:
            raise RanksApart(f"rank {self.rank} of {self.size} did not meet the others: {error}") from error

    def close(self) -> None:
        """Leave the group. The other ranks may have ended already."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See Group. It adds in float32 and returns the dtype of `part`."""
        first, *others = self._parts(part)
        total = first.float()
        for other in others:
            total += other
        return total.to(part.dtype)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts(part), -1)

    def _parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks, in the order of the ranks. Raises RanksApart."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            distributed.all_gather(parts, part)
        except RuntimeError as error:
            raise RanksApart(f"rank {self.rank} of {self.size} lost the others: {error}") from error
        return parts
