"""The queue of an encoder: media take turns, share passes within bounds, and fail alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch

from omnistage.models.encoders.reader import EncoderQueue
from omnistage.models.worker import Worker


class Bad(Exception):
    """A piece that cannot be encoded."""


class Doubling:
    """An encoder of numbers: a row is twice its number; a number below zero cannot be encoded. passes: what each one had."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.may_go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, pieces: Sequence[int], between: Callable[[], None]) -> list[torch.Tensor]:
        self.passes.append(list(pieces))
        self.begun.set()
        assert self.may_go.wait(60)
        between()
        if min(pieces) < 0:
            raise Bad(str(min(pieces)))
        return [torch.tensor([[2 * piece]]) for piece in pieces]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker("encoder", 1)
    yield made
    await made.close()


def queue_of(worker: Worker, encode: Doubling, *, most_size: int = 3, together: bool = True) -> EncoderQueue[int]:
    return EncoderQueue(worker, encode, lambda piece: 1, most_size=most_size, together=together)


async def all_of(queue: EncoderQueue[int], encode: Doubling, *media: Sequence[int]) -> list[list[int] | BaseException]:
    """The results of media that wait while the first piece of the first one is computed."""
    tasks = [asyncio.create_task(queue.rows(pieces)) for pieces in media]
    await asyncio.to_thread(encode.begun.wait, 60)
    encode.may_go.set()
    made = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) else [int(rows) for rows in each] for each in made]


@pytest.mark.parametrize("together", [True, False])
async def test_media_take_turns_and_share_passes_only_where_that_is_exact(worker: Worker, together: bool) -> None:
    encode = Doubling()
    long, short, other = [1, 2, 3, 4], [10], [20, 21]
    made = await all_of(queue_of(worker, encode, together=together), encode, long, short, other)
    assert made == [[2, 4, 6, 8], [20], [40, 42]]
    if together:
        assert encode.passes == [[1, 10, 20], [2, 21, 3], [4]]
    else:
        assert encode.passes == [[1], [10], [20], [2], [21], [3], [4]], "a long one holds nobody up"


async def test_a_pass_is_bounded(worker: Worker) -> None:
    encode = Doubling()
    await all_of(queue_of(worker, encode, most_size=2), encode, [1, 2], [3], [4])
    assert [len(pieces) for pieces in encode.passes] == [2, 2]


async def test_one_that_fails_fails_alone(worker: Worker) -> None:
    """And the next good one works."""
    encode = Doubling()
    queue = queue_of(worker, encode)
    good, bad, other = await all_of(queue, encode, [1, 2], [-1, 5], [3])
    assert good == [2, 4] and other == [6] and isinstance(bad, Bad)
    assert encode.passes[1:4] == [[1], [-1], [3]] and all(5 not in pieces for pieces in encode.passes)
    assert [int(rows) for rows in await queue.rows([7])] == [14]


async def test_what_nobody_waits_for_is_given_up(worker: Worker) -> None:
    encode = Doubling()
    queue = queue_of(worker, encode, together=False)
    left = asyncio.create_task(queue.rows([1, 2, 3]))
    await asyncio.to_thread(encode.begun.wait, 60)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    encode.may_go.set()
    assert [int(rows) for rows in await queue.rows([8])] == [16]
    assert encode.passes == [[1], [8]], "no other piece was begun"
