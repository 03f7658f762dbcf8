"""A process that uses the client and forks, or has several event loops: a child is told at once, and what it leaves disturbs nobody."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.processes import ProcessFamily, wait_end
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AsyncOmni, UnavailableError
from omnistage.client.threads import is_of_another_loop

PATIENCE_S = 60.0
ENDS = {"at once": "os._exit(0)", "exit": "sys.exit(0)", "collected": "gc.collect(); sys.exit(0)"}
ENDS["exec"] = "os.execv(sys.executable, [sys.executable, '-c', ''])"

TELL = """
    import asyncio, faulthandler, gc, multiprocessing, os, sys, threading
    from omnistage.client import AsyncOmni, ForkedError, Omni
    faulthandler.enable()

    def told(act):
        try:
            act()
        except ForkedError as error:
            assert "spawn" in error.hint
            return
        raise AssertionError("not told")

    def exit_codes(target, *arguments, count=1):
        children = [multiprocessing.get_context("fork").Process(target=target, args=arguments) for _ in range(count)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        return [child.exitcode for child in children]
"""

USE_IN_CHILD = """
    def use_all(address, omni, stream):
        told(lambda: omni.say("Hi"))
        told(lambda: omni.pipelines())
        told(lambda: next(omni.stream("Hi")))
        told(lambda: next(stream))
        told(lambda: Omni(address=address))
        told(lambda: Omni(pipeline="toy"))
        async def ask():
            async with AsyncOmni(address=address) as mine:
                await mine.say("Hi")
        told(lambda: asyncio.run(ask()))
        stream.close()
        omni.close()
        gc.collect()
"""


def run(code: str, *arguments: str) -> str:
    """The output of a program, which must end well and print nothing else."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def program(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in parts)


def test_a_child_is_told_at_once_and_disturbs_nothing(toy_address: str) -> None:
    code = """
        address = sys.argv[1]
        omni = Omni(address=address, resume_timeout_s=0)
        stream = omni.stream("Hi", seed=1)
        events = [next(stream)]
        for _ in range(5):
            assert exit_codes(use_all, address, omni, stream) == [0]
        events += stream
        print("".join(getattr(event, "text", "") for event in events) == omni.generate("Hi", seed=1).text)
        omni.close()
        print(exit_codes(lambda: told(lambda: Omni(address=address))))  # what was used stays used
    """
    assert run(program(TELL, USE_IN_CHILD, code), toy_address) == "True\n[0]\n"


@lengths.one_or_all("name", ENDS)
def test_answers_of_the_parent_go_on_while_children_come_and_go(toy_address: str, name: str, seed: int) -> None:
    end = ENDS[lengths.draw(name, ENDS, seed)]
    code = f"""
        omni = Omni(address=sys.argv[1], resume_timeout_s=0)
        begun, over = threading.Barrier(4), []

        def listen(seed):
            stream = omni.stream("Hi", seed=seed, max_tokens=600, ignore_eos=True)
            first = next(stream)
            begun.wait()
            over.append([first, *stream])

        half_read = omni.stream("Hi", max_tokens=32768, ignore_eos=True)
        next(half_read)
        listening = [threading.Thread(target=listen, args=(seed,)) for seed in range(3)]
        for thread in listening:
            thread.start()
        begun.wait()
        codes = []
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                half_read.close()
                del half_read
                {end}
            codes.append(os.waitpid(pid, 0)[1])
        for thread in listening:
            thread.join()
        print(set(codes), len(over), type(over[0][-1]).__name__)
        assert next(half_read)
        half_read.close()
        print(len(omni.say("Hi").text) > 0)
    """
    assert run(program(TELL, code), toy_address) == "{0} 3 Done\nTrue\n"


def test_the_async_client_of_a_child_is_told_too(toy_address: str) -> None:
    code = """
        async def main(address):
            async with AsyncOmni(address=address, resume_timeout_s=0) as omni:
                stream = omni.stream("Hi", seed=1)
                texts = [(await anext(stream)).text]
                for _ in range(10):
                    pid = os.fork()
                    if pid == 0:
                        try:
                            for act in (omni.say("Hi"), omni.pipelines()):
                                try:
                                    await act
                                except ForkedError:
                                    continue
                                os._exit(1)
                            await stream.aclose()
                            await omni.close()
                            del stream, omni
                            gc.collect()
                            os._exit(0)
                        finally:
                            os._exit(2)
                    assert os.waitpid(pid, 0)[1] == 0
                texts += [getattr(event, "text", "") async for event in stream]
                print("".join(texts) == (await omni.generate("Hi", seed=1)).text)
        asyncio.run(main(sys.argv[1]))
    """
    assert run(program(TELL, code), toy_address) == "True\n"


def test_children_of_a_parent_that_only_imported_it_work(toy_address: str) -> None:
    code = """
        def ask(address):
            with Omni(address=address) as omni:
                assert omni.say("Hi").text
            async def more():
                async with AsyncOmni(address=address) as omni:
                    assert (await omni.say("Hi")).text
            asyncio.run(more())

        print(exit_codes(ask, sys.argv[1], count=3))
        ask(sys.argv[1])
    """
    assert run(program(TELL, code), toy_address) == "[0, 0, 0]\n"


def test_spawned_children_work(toy_address: str, tmp_path: Path) -> None:
    """The hint of the error works."""
    script = tmp_path / "spawns.py"
    script.write_text(
        program("""
        import multiprocessing, sys
        from omnistage.client import Omni

        def ask(address):
            with Omni(address=address) as omni:
                assert omni.say("Hi").text

        if __name__ == "__main__":
            with Omni(address=sys.argv[1]) as omni:
                child = multiprocessing.get_context("spawn").Process(target=ask, args=(sys.argv[1],))
                child.start()
                child.join()
                print(child.exitcode, len(omni.say("Hi").text) > 0)
        """)
    )
    done = subprocess.run([sys.executable, str(script), toy_address], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 True\n", "")


LIVES_ON = """
    omni = Omni(pipeline=sys.argv[1])
    pid = os.fork()
    if pid == 0:
        told(lambda: omni.say("Hi"))
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
"""


@lengths.one_or_all("name", ["SIGKILL", "SIGTERM"])
def test_a_stack_ends_with_its_owner_though_a_child_lives_on(family: ProcessFamily, tmp_path: Path, name: str, seed: int) -> None:
    number = signal.Signals[lengths.draw(name, ["SIGKILL", "SIGTERM"], seed)]
    command = [sys.executable, "-c", program(TELL, LIVES_ON, "sys.stdin.read()"), toy_pipeline(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        servers = set(family.pids()) - {owner.pid, child}
        assert len(servers) == 3
        owner.send_signal(number)
        owner.wait(PATIENCE_S)
        assert all(wait_end(pid, PATIENCE_S) for pid in servers) and family.pids() == [child]
    assert wait_end(child, PATIENCE_S)


@lengths.long_form(
    "client/test_fork.py::test_a_child_is_told_at_once_and_disturbs_nothing",
    "client/test_fork.py::test_answers_of_the_parent_go_on_while_children_come_and_go",
    unkept="no child ends the stack of its parent",
)
def test_a_stack_outlives_the_children_of_its_owner(family: ProcessFamily, tmp_path: Path) -> None:
    code = """
        omni = Omni(pipeline=sys.argv[1])
        for end in (lambda: os._exit(0), lambda: sys.exit(0), omni.close, lambda: gc.collect()):
            pid = os.fork()
            if pid == 0:
                end()
                del omni
                gc.collect()
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert omni.generate("Hi").text
        print(len(omni.replicas()))
        pid = os.fork()
        if pid == 0:
            sys.stdin.read()  # lives while the parent ends its stack
            os._exit(0)
        omni.close()
        print("closed", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", program(TELL, code), toy_pipeline(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert [owner.stdout.readline(), owner.stdout.readline()] == ["1\n", "closed\n"]
        assert len(family.pids()) == 2  # the owner and its child
    assert (owner.returncode, family.wait_ended()) == (0, []) and os.getpid() not in family.pids()


LOOPS, ROUNDS = 3, 25


async def leave_a_stream(omni: AsyncOmni, chance: random.Random) -> None:
    """Break off in the middle; the generator is left to the garbage collector."""
    async for _ in omni.stream("hello " * 20):
        break


async def cancel_an_answer(omni: AsyncOmni, chance: random.Random) -> None:
    answering = asyncio.create_task(omni.generate("hello " * 50))
    await asyncio.sleep(chance.random() * 0.05)
    answering.cancel()
    with suppress(asyncio.CancelledError):
        await answering


async def close_one_of_two(omni: AsyncOmni, chance: random.Random) -> None:
    one, other = omni.stream("hello " * 20), omni.stream("hello " * 30)
    await anext(one)
    await anext(other)
    await one.aclose()


@lengths.drawn_cells(1, "leave", [leave_a_stream, cancel_an_answer, close_one_of_two])
def test_a_loop_that_ends_leaves_nothing_to_others(leave: Any, toy_address: str, seed: int) -> None:
    async def use(chance: random.Random) -> None:
        async with AsyncOmni(address=toy_address) as omni:
            await leave(omni, chance)

    assert complaints_of(use, seed) == []


def test_a_loop_that_ends_while_it_connects_leaves_nothing_to_others(free_port: int, seed: int) -> None:
    async def use(chance: random.Random) -> None:
        omni = AsyncOmni(address=f"127.0.0.1:{free_port}", connect_timeout_s=0.01 + chance.random() * 0.2)
        with pytest.raises(UnavailableError):
            await omni.generate("hello")
        await omni.close()

    assert complaints_of(use, seed) == []


def complaints_of(use: Callable[[random.Random], Awaitable[None]], seed: int) -> list[dict[str, Any]]:
    """The errors without an owner of event loops of several threads in which it runs again and again."""
    complaints: list[dict[str, Any]] = []

    async def use_heard(chance: random.Random) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        await use(chance)

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            asyncio.run(use_heard(random.Random(f"{seed} {number} {turn}")))

    with ThreadPoolExecutor(LOOPS) as threads:
        list(threads.map(work, range(LOOPS)))
    return complaints


def test_what_is_about_another_loop_is_told_from_what_is_not() -> None:
    message = "Exception in callback PollerCompletionQueue._handle_events(...)"
    assert is_of_another_loop({"message": message, "exception": RuntimeError("Event loop is closed")})
    assert is_of_another_loop({"message": message, "exception": BlockingIOError()})
    assert not is_of_another_loop({"message": message, "exception": RuntimeError("a bug")})
    assert not is_of_another_loop({"message": "Exception in callback work()", "exception": RuntimeError("Event loop is closed")})
