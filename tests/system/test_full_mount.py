"""Real stages on a mount of shared memory that is full, or fills up meanwhile: a chain goes on with the same samples, and who streams media
to a Thinker is told so. Media larger than any request: the memory of router and stage stays small."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import lengths
from helpers.converse import PIECE, ConverseStream, TurnFailed, on_port, zeros
from helpers.lengths import LONG
from helpers.memory import Peak
from helpers.mounts import run_on_mount
from helpers.servers import ServerProcesses, all_free, omni_stub, stack
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, stage_pb2

PREAMBLE = """
    import asyncio
    import os
    import sys
    from pathlib import Path
    from helpers.ask import WholeAnswer, ask, read, read_all, request
    from helpers.mounts import BALLAST, leave_free
    from helpers.servers import all_free, omni_stub, stack, watch_until

    FOLDER, SEED = Path(sys.argv[1]), int(sys.argv[2])
    FULL = "connector.mount_full"
    MIB = 1 << 20

    def answer_of(tokens):
        return {"max_tokens": tokens, "ignore_eos": True}

    def chain():
        options = {"max_chunk": 1, "width": 65536, "interval_s": 0.002}
        return stack(FOLDER, options=options, stage_args=["--inline-limit", "0", "--arena-bytes", str(128 * MIB)])

    def check_ends(running):
        for server in running.processes():
            assert server.stop() == 0, (server.module, server.log()[-2000:])
        assert os.listdir("/dev/shm") == [BALLAST.name], os.listdir("/dev/shm")
"""

FULL_WHILE_RUNNING = """
    async def main():
        with chain() as running:
            thinker = running.stages["thinker"]
            async with omni_stub(running.address) as stub:
                (await ask(stub, request("empty", SEED))).check_toy(SEED, "empty")
                assert FULL not in thinker.log()
                before = (await watch_until(thinker.address, lambda report: not report.leases)).arena_bytes_total
                assert before > 0

                call, answer = stub.Generate(request("fills", SEED, thinker=answer_of(150)), timeout=60), WholeAnswer()
                for _ in range(20):
                    answer.take(await read(call))
                leave_free(0)
                async for event in read_all(call):
                    answer.take(event)
                answer.check_toy(SEED, "fills", 150)

                asked = [ask(stub, request(f"full {n}", SEED + n, thinker=answer_of(60))) for n in range(4)]
                for n, answer in enumerate(await asyncio.gather(*asked)):
                    answer.check_toy(SEED + n, f"full {n}", 60)
                assert FULL in thinker.log()
                await all_free(list(running.addresses.values()))

                leave_free(40 * MIB)
                await asyncio.sleep(1.1)  # as long as a stage does not try again
                asked = [ask(stub, request(f"room {n}", SEED + n, thinker=answer_of(60))) for n in range(3)]
                for n, answer in enumerate(await asyncio.gather(*asked)):
                    answer.check_toy(SEED + n, f"room {n}", 60)
                await all_free(list(running.addresses.values()))
            check_ends(running)

    asyncio.run(main())
"""

FULL_AT_THE_START = """
    async def main():
        leave_free(16384)
        with chain() as running:
            assert all("connector.inline_only" in running.stages[kind].log() for kind in running.stages)
            async with omni_stub(running.address) as stub:
                (await ask(stub, request("full", SEED))).check_toy(SEED, "full")
                leave_free(100 * MIB)
                (await ask(stub, request("later", SEED))).check_toy(SEED, "later")
            await all_free(list(running.addresses.values()))
            check_ends(running)

    asyncio.run(main())
"""


@lengths.drawn_cells(1, "story", [FULL_WHILE_RUNNING, FULL_AT_THE_START], ids=["while running", "at the start"])
def test_a_chain_on_a_full_mount_gives_the_same_samples(tmp_path: Path, seed: int, story: str) -> None:
    run_on_mount("160m", PREAMBLE, story, arguments=[str(tmp_path), str(seed)], timeout_s=110)


STORY = """
    import asyncio
    import os
    import signal
    import sys
    from collections import Counter
    from pathlib import Path

    import grpc

    from helpers import media_files
    from helpers.converse import PIECE, ConverseStream, TurnFailed, file_chunks, on_port
    from helpers.mounts import BALLAST, leave_free
    from helpers.processes import open_files
    from helpers.servers import all_free, omni_stub, stack
    from helpers.waiting import until
    from omnistage.v1 import omni_pb2, stage_pb2

    FOLDER, CHECKPOINT, SEED = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    SPOOL = Path("/dev/shm/spool")
    SPOOL.mkdir()
    os.environ["TMPDIR"] = str(SPOOL)
    FILM = media_files.film(SEED)
    LARGE = FILM + (4 << 20).to_bytes(4, "big") + b"free" + bytes((4 << 20) - 8)  # the same film with nothing behind it

    def question(*parts):
        message = stage_pb2.Message(role="user", parts=[*parts, stage_pb2.Part(text="What?")])
        thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=12, ignore_eos=True)
        return omni_pb2.GenerateRequest(seed=SEED, thinker=thinker)

    IN_REQUEST = question(stage_pb2.Part(media=stage_pb2.Media(data=FILM, media_type="video/mp4")))
    STREAMED = question(on_port("media0", "video/mp4"))

    def streamed(data, *sizes):
        return {"media0": file_chunks("media0", data, sizes or (PIECE,))}

    class Gate:
        "Lets so many pieces through, and the others when it is opened."

        def __init__(self, count):
            self.left = count
            self.open = asyncio.Event()

        async def wait(self):
            if not self.left:
                await self.open.wait()
            else:
                self.left -= 1

    def descriptors(pid):
        "What a process has open but sockets, which come and go: a file without a name too, be it in a folder or in memory."
        opened = Counter(target for _, target in open_files(pid))
        return Counter({name: count for name, count in opened.items() if not name.startswith("socket:")})

    def children(pid):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]

    def used():
        mount = os.statvfs("/dev/shm")
        return (mount.f_blocks - mount.f_bfree) * mount.f_frsize

    async def is_told(conversation):
        try:
            await conversation.turn(STREAMED, streamed(LARGE))
        except TurnFailed as told:
            failed = told.failed
            assert (failed.reason, failed.code) == ("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]), failed
            assert failed.retry_delay.ToTimedelta().total_seconds() > 0
            assert f"{SPOOL} (No space left on device)" in failed.message and "another TMPDIR" in failed.message, failed.message
        else:
            raise AssertionError("it was answered")

    async def main():
        arguments = ["--checkpoint", CHECKPOINT]
        with stack(FOLDER, kinds=("thinker",), pipeline="qwen2_5_omni-text", family="qwen2_5_omni", stage_args=arguments) as running:
            thinker = running.stages["thinker"]
            async with omni_stub(running.address) as stub:
                conversation = ConverseStream(stub)
                leave_free(0)
                await is_told(conversation)  # The very first medium of this process.
                tokens = (await conversation.turn(IN_REQUEST)).tokens()
                assert len(tokens) == 12
                before = descriptors(thinker.pid)

                leave_free(1 << 20)
                free = used()
                gate = Gate(1)
                held = asyncio.create_task(ConverseStream(stub).turn(STREAMED, streamed(FILM, len(FILM) // 2), gate.wait))
                await until(lambda: used() > free)  # A part of its film is there.
                for _ in range(2):
                    await is_told(conversation)
                gate.open.set()
                assert (await held).tokens() == tokens

                BALLAST.unlink()
                assert (await conversation.turn(STREAMED, streamed(LARGE))).tokens() == tokens
                await all_free([thinker.address])
                assert os.listdir(SPOOL) == []
                await until(lambda: descriptors(thinker.pid) == before)
                (decoding,) = [child for child in children(thinker.pid) if "media.child" in Path(f"/proc/{child}/cmdline").read_text()]
                await until(lambda: sum(descriptors(decoding).values()) == 3)
                empty = used()  # A file that was removed takes its room until nobody has it open.

                lost = asyncio.create_task(ConverseStream(stub).turn(STREAMED, streamed(LARGE), Gate(3).wait))
                await until(lambda: used() >= empty + 3 * PIECE)
                os.kill(thinker.pid, signal.SIGKILL)
                try:
                    await lost
                except TurnFailed as told:
                    assert told.reason == "STAGE_LOST", told
                else:
                    raise AssertionError("it was answered by nobody")
                thinker.wait()
                assert (used(), os.listdir(SPOOL)) == (empty, [])
                conversation.call.cancel()

    asyncio.run(main())
"""


def test_media_that_cannot_be_put_aside_cost_their_own_turn_only(tmp_path: Path, omni_checkpoint: Path, seed: int) -> None:
    run_on_mount("160m", STORY, arguments=[str(tmp_path), str(omni_checkpoint), str(seed)], timeout_s=110)


MAX_GROWTH = 64 << 20
"""Bytes that a process may need for one turn: 12 MiB in the router and 16 in the stage, the buffers of gRPC, and what Python does not give
back. Media that were held would be five times that at least."""

LENGTH = 12


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    films = {"thinker": {"films": True}}
    with stack(tmp_path_factory.mktemp("media"), pipeline="toy-omni", family="toy-omni", options_of=films) as running:
        yield running


def film(size: int, *, said: bool) -> omni_pb2.GenerateRequest:
    message = stage_pb2.Message(role="user", parts=[on_port("media0", "video/mp4", size if said else 0)])
    return omni_pb2.GenerateRequest(seed=1, thinker=stage_pb2.ThinkerParams(messages=[message], max_tokens=LENGTH), outputs=["text"])


def seen(size: int) -> str:
    """The answer to a film of zeros."""
    digest = hashlib.sha256()
    for _ in range(size // PIECE):
        digest.update(bytes(PIECE))
    items = formulas.items(["u", formulas.film(digest.digest())])
    return "".join(formulas.word(formulas.omni_token(1, items, n)) for n in range(LENGTH))


def peaks(standing: ServerProcesses) -> list[Peak]:
    assert standing.router is not None
    return [Peak(server.pid) for server in (standing.router, standing.stages["thinker"])]


async def test_300_mb_pass_in_little_memory(standing: ServerProcesses):
    async with omni_stub(standing.address) as stub:
        conversation = ConverseStream(stub)
        await conversation.turn(film(PIECE, said=True), {"media0": zeros("media0", PIECE)})
        before = peaks(standing)
        answer = await conversation.turn(film(300 << 20, said=True), {"media0": zeros("media0", 300 << 20)})
        assert answer.text() == seen(300 << 20)
        assert [peak.growth for peak in before if peak.growth > MAX_GROWTH] == []
    await all_free(list(standing.addresses.values()))


@pytest.mark.parametrize("said", [pytest.param(True, id="said before"), pytest.param(False, id="found on the way", marks=LONG)])
async def test_a_film_of_1_gib_is_refused_by_its_limit_and_not_by_memory(standing: ServerProcesses, said: bool):
    """It is 512 MiB: one that says its size is refused before a byte of it is sent, another one there."""
    async with omni_stub(standing.address) as stub:
        conversation = ConverseStream(stub)
        before = peaks(standing)
        with pytest.raises(TurnFailed) as told:
            await conversation.turn(film(1 << 30, said=said), {"media0": zeros("media0", 1 << 30)})
        assert told.value.reason == "BAD_REQUEST" and "more than 536870912 bytes" in told.value.failed.message
        if said:
            assert not conversation.room
        else:
            assert (512 << 20) // PIECE < conversation.room["media0"] < (600 << 20) // PIECE
        assert [peak.growth for peak in before if peak.growth > MAX_GROWTH] == []
        answer = await conversation.turn(film(PIECE, said=False), {"media0": zeros("media0", PIECE)})
        assert answer.text() == seen(PIECE)
    await all_free(list(standing.addresses.values()))
