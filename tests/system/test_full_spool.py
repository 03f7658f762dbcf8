"""A Thinker that sees, on a mount that is full or fills up while media come: who asked is told so, nobody else notices, nothing stays."""

from __future__ import annotations

from pathlib import Path

from helpers.mounts import run_on_mount

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
