"""A house with so many places."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from omnistage.link.errors import StageError
from omnistage.router.admission import Admission


def test_who_finds_it_full_is_told_at_once():
    admission = Admission(2)
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(admission.place())
        assert admission.running == 2
        for _ in range(3):
            with pytest.raises(StageError, match="OVERLOADED") as raised, admission.place():
                pass
            assert raised.value.retry_delay_s
        assert admission.running == 2
    assert admission.running == 0


def test_a_place_is_free_again_whatever_happened_in_it():
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.place():
            raise ZeroDivisionError
    with admission.place():
        assert admission.running == 1


async def test_draining_refuses_and_waits_for_who_is_in():
    admission = Admission(5)
    async with asyncio.timeout(5):
        await admission.idle()
        with admission.place():
            admission.drain()
            with pytest.raises(StageError, match="DRAINING"), admission.place():
                pass
            idle = asyncio.create_task(admission.idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await idle
