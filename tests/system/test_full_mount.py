"""A chain of real stages on a mount of shared memory that is full, or fills up meanwhile: the same samples, and no process falls."""

from __future__ import annotations

from pathlib import Path

from helpers import lengths
from helpers.mounts import run_on_mount

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
