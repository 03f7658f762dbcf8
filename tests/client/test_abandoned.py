"""Streams and clients that nobody closes: garbage on any thread, the end of a loop, of the interpreter, an interrupt.

Nothing hangs, nothing is left at the router, and nothing is printed."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from helpers import lengths
from helpers.servers import Local, local_chain, local_router
from helpers.waiting import until
from omnistage.client import AsyncOmni, Omni, OmniError, WrongLoopError
from omnistage.client.threads import LoopThread

pytestmark = pytest.mark.usefixtures("collected_by_hand")

ENDLESS = 32768
STREAMS = 12
PATIENCE_S = 60.0


@pytest.fixture
async def router() -> AsyncIterator[Local]:
    options = {"interval_s": 0.02}
    async with local_chain(options) as chain, local_router({kind: stage.address for kind, stage in chain.items()}) as running:
        yield running


def running(router: Local) -> float:
    """Answers under way at the router."""
    value = router.registry.get_sample_value("omnistage_router_inflight")
    assert value is not None
    return value


def cancelled(router: Local) -> float:
    return router.registry.get_sample_value("omnistage_router_requests_total", {"pipeline": "toy", "reason": "CANCELLED"}) or 0.0


async def ended(router: Local, count: int) -> None:
    """So many answers were cancelled, and none runs."""
    await until(lambda: cancelled(router) >= count and not running(router))
    assert cancelled(router) == count


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


def on_loop_thread(act: Callable[[], object]) -> None:
    """Do it on the thread that runs the calls of every Omni."""
    shared = LoopThread._shared
    assert shared is not None
    done = threading.Event()

    def work() -> None:
        assert shared.is_current
        act()
        done.set()

    shared._loop.call_soon_threadsafe(work)
    assert done.wait(PATIENCE_S)


def leave_streams(omni: Omni, count: int = STREAMS) -> None:
    """Half-read streams in cycles."""
    for seed in range(count):
        stream = omni.stream("Hi", seed=seed, max_tokens=ENDLESS, ignore_eos=True)
        next(stream)
        Cycle(stream)
        del stream


@lengths.drawn_cells(1, "collect", [on_loop_thread, lambda act: act()], ids=["loop thread", "own thread"])
async def test_streams_that_are_garbage_on_any_thread(router: Local, collect: Callable[[Callable[[], object]], None]) -> None:
    def ask() -> None:
        with Omni(address=router.address) as omni, Omni(address=router.address) as other:
            leave_streams(omni)
            collect(gc.collect)
            assert other.say("Hi", timeout_s=PATIENCE_S).text and omni.say("Hi", timeout_s=PATIENCE_S).text

    await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE_S)
    await ended(router, STREAMS)


async def test_clients_that_are_garbage_on_the_loop_thread(router: Local) -> None:
    def ask() -> None:
        with Omni(address=router.address) as omni:
            users = LoopThread._users
            for _ in range(4):
                left = Omni(address=router.address)
                Cycle((left, left.stream("Hi")))
                leave_streams(left, 1)
            del left
            on_loop_thread(gc.collect)
            assert omni.say("Hi", timeout_s=PATIENCE_S).text
            until = threading.Event()
            while LoopThread._users > users:
                until.wait(0.01)

    await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE_S)
    await ended(router, 4)


async def test_the_last_client_is_garbage_on_the_loop_thread(router: Local) -> None:
    def ask() -> None:
        others = LoopThread._users  # a fixture of the session may have one
        omni = Omni(address=router.address)
        thread = omni._thread._thread
        leave_streams(omni, 1)
        Cycle(omni)
        del omni
        on_loop_thread(gc.collect)
        deadline = time.monotonic() + PATIENCE_S / 2
        while LoopThread._users > others or (not others and thread.is_alive()):
            assert time.monotonic() < deadline
            thread.join(0.1)
            gc.collect()  # what the loop was just doing for the client was no garbage yet

    await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE_S)
    await ended(router, 1)


async def test_garbage_while_a_client_is_made_or_closed(router: Local) -> None:
    """The collector runs while the thread that it runs on holds the lock of the loop thread."""

    def ask() -> None:
        with Omni(address=router.address) as omni:
            leave_streams(omni, 2)
            left = Omni(address=router.address)
            Cycle(left)
            del left
            with LoopThread._lock:
                gc.collect()
            assert omni.say("Hi", timeout_s=PATIENCE_S).text

    await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE_S)
    await ended(router, 2)


async def test_a_call_on_the_loop_thread_is_refused(router: Local) -> None:
    def ask() -> None:
        told: list[BaseException] = []
        with Omni(address=router.address) as omni:

            def call() -> None:
                for act in (lambda: omni.say("Hi"), lambda: next(omni.stream("Hi")), omni.pipelines, lambda: Omni(address=router.address)):
                    with pytest.raises(WrongLoopError) as caught:
                        act()
                    told.append(caught.value)

            on_loop_thread(call)
            assert len(told) == 4 and omni.say("Hi").text
            on_loop_thread(omni.close)

    await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE_S)


async def test_one_client_on_two_loops_is_told(router: Local) -> None:
    omni = AsyncOmni(address=router.address)
    assert (await omni.say("Hi")).text

    def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            asyncio.run(omni.say("Hi"))
        with pytest.raises(WrongLoopError):
            asyncio.run(omni.close())

    await asyncio.to_thread(elsewhere)
    assert (await omni.say("Hi")).text
    await omni.close()


async def run(code: str, address: str, *, interrupt: str = "") -> tuple[int, str, str]:
    """A program: its exit code, and what it wrote. interrupt: SIGINT when it has written this line."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(code), address]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    written = ""
    try:
        async with asyncio.timeout(PATIENCE_S):
            if interrupt:
                while (line := (await process.stdout.readline()).decode()) != interrupt + "\n":
                    assert line
                    written += line
                process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait(), written + out.decode(), err.decode()


PRELUDE = """
import asyncio, gc, sys
from omnistage.client import AsyncOmni, Omni
endless = {"max_tokens": 32768, "ignore_eos": True}
"""
HALF_READ = """
omni = Omni(address=sys.argv[1])
stream = omni.stream("Hi", **endless)
next(stream)
"""
HALF_READ_BY_ASYNC = """
        omni = AsyncOmni(address=sys.argv[1])
        stream = omni.stream("Hi", **endless)
        await anext(stream)
"""


def of_async(body: str) -> str:
    return f"async def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nasyncio.run(main())"


ENDS = {
    "the sync client": HALF_READ,
    "the sync client in a cycle": HALF_READ + "omni.me = omni; omni.stream = stream\ndel omni, stream\n",
    "the async client, its loop closing": of_async("        global omni, stream" + HALF_READ_BY_ASYNC),
    "the async client, dropped before its loop closes": of_async("""
        async with AsyncOmni(address=sys.argv[1]) as omni:
            await anext(omni.stream("Hi", **endless))
    """),
    "the async client, left while it is waited for": of_async("""
        global heard
        async def listen(omni):
            async for event in omni.stream("Hi", **endless):
                heard.set()
        heard = asyncio.Event()
        omni = AsyncOmni(address=sys.argv[1])
        task = asyncio.create_task(listen(omni))
        await heard.wait()
    """),
    "the async client, collected on another thread": of_async(f"""
        gc.disable()
        {HALF_READ_BY_ASYNC}
        cycle = [stream, omni]
        cycle.append(cycle)
        del stream, omni, cycle
        await asyncio.to_thread(gc.collect)
    """),
}


@lengths.drawn_cells(2, "code", ENDS.values(), ids=ENDS.keys())
async def test_a_program_that_ends_with_a_half_read_stream(router: Local, code: str) -> None:
    assert await run(code, router.address) == (0, "", "")
    await ended(router, 1)


async def test_two_loops_one_after_the_other(router: Local) -> None:
    code = """
        async def main():
            async with AsyncOmni(address=sys.argv[1]) as omni:
                await anext(omni.stream("Hi", **endless))
                assert (await omni.say("Hi")).text
        for _ in range(3):
            asyncio.run(main())
        with Omni(address=sys.argv[1]) as omni:
            assert omni.say("Hi").text
    """
    assert await run(code, router.address) == (0, "", "")
    await ended(router, 3)


@pytest.mark.parametrize("call", ["omni.generate('Hi', **endless)", "list(stream)"])
async def test_an_interrupt_cancels_and_the_client_goes_on(router: Local, call: str) -> None:
    code = f"""
        import threading
        with Omni(address=sys.argv[1]) as omni:
            stream = omni.stream("Hi", **endless)
            next(stream)
            if "stream" not in {call!r}:
                stream.close()
            threading.Timer(0.2, print, ["now"], {{"flush": True}}).start()
            try:
                {call}
            except KeyboardInterrupt:
                print("interrupted")
            print(len(omni.say("Hi").text) > 0)
    """
    assert await run(code, router.address, interrupt="now") == (0, "interrupted\nTrue\n", "")
    await ended(router, 1 if "stream" in call else 2)


def test_every_call_ends_although_the_loop_is_stuck(toy_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.client.threads.ALLOWANCE_S", 0.3)
    omni = Omni(address=toy_address)
    stream = omni.stream("Hi", max_tokens=ENDLESS, ignore_eos=True, timeout_s=0.5)
    next(stream)
    assert LoopThread._shared is not None
    go_on = threading.Event()
    LoopThread._shared._loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
    for act in (lambda: omni.say("Hi", timeout_s=0.2), lambda: list(stream), lambda: omni.pipelines(timeout_s=0.2)):
        with pytest.raises(OmniError, match="own thread did not answer") as caught:
            act()
        assert isinstance(caught.value, TimeoutError)
    stream.close()
    monkeypatch.setattr("omnistage.client.omni.CLOSE_TIMEOUT_S", 0.2)
    with pytest.raises(OmniError, match="own thread did not answer"):
        omni.close()
    omni.close()
    go_on.set()
    with Omni(address=toy_address) as other:
        assert other.say("Hi").text


def test_a_loop_that_cannot_be_made_is_an_error() -> None:
    code = """
        import resource, sys
        import omnistage.client
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        import os
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
        try:
            omnistage.client.Omni(address="127.0.0.1:1")
        except OSError as error:
            print(error.strerror)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            omnistage.client.Omni(address="127.0.0.1:1", connect_timeout_s=0.1)
        except omnistage.client.UnavailableError:
            print("no router")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "Too many open files\nno router\n", done.stderr
