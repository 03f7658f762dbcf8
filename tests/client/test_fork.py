"""A process that uses the client and forks: the child is told at once, and the parent is not disturbed, whatever the child does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from helpers import lengths
from helpers.processes import ProcessFamily, wait_end
from helpers.toy_pipeline import toy_pipeline

PATIENCE_S = 60.0
ENDS = {
    "at once": "os._exit(0)",
    "exit": "sys.exit(0)",
    "collected": "gc.collect(); sys.exit(0)",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', ''])",
}

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
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            child = context.Process(target=use_all, args=(address, omni, stream))
            child.start()
            child.join()
            assert child.exitcode == 0, child.exitcode
        events += stream
        print("".join(getattr(event, "text", "") for event in events) == omni.generate("Hi", seed=1).text)
        omni.close()
        child = context.Process(target=lambda: told(lambda: Omni(address=address)))  # what was used stays used
        child.start()
        child.join()
        print(child.exitcode)
    """
    assert run(program(TELL, USE_IN_CHILD, code), toy_address) == "True\n0\n"


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

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=ask, args=(sys.argv[1],)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
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
        assert all(wait_end(pid, PATIENCE_S) for pid in servers)
        assert family.pids() == [child]
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
    assert owner.returncode == 0
    assert family.wait_ended() == []
    assert os.getpid() not in family.pids()
