"""This version beside the last one, as during an upgrade: stages, router and client of either, in toy form.

Routers are upgraded before clients: the new stubs get their answers from an old router too, but the new client names its requests, so that
it can go on after the loss of a router, and the first routers refused a named request rather than promise what they could not do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from helpers.ask import ask, request
from helpers.fleet import Fleet
from helpers.ports import take_address
from helpers.previous import checkout, environment_of, spelled
from helpers.servers import CHAIN, all_free, omni_stub, stage_flags, until_serving
from omnistage.models.toy import formulas

CLIENT = """
import sys
from hashlib import sha256
import numpy as np
from omnistage.client import Omni
with Omni(address=sys.argv[1]) as omni:
    answer = omni.generate("hello", seed=int(sys.argv[2]))
sys.stdout.write(answer.text + "|" + sha256(np.rint(answer.audio.samples * 32768).astype("<i2").tobytes()).hexdigest())
"""

PROMPTED = """
import sys
from omnistage.client import Omni
with Omni(address=sys.argv[1]) as omni:
    ready = [pipeline.name for pipeline in omni.pipelines()]
    answer = omni.generate("hello", seed=int(sys.argv[2]))
    asked = {"seed": 3, "pipeline": "toy-picture"}
    drawn = [omni.generate("a walk", outputs=["image"], **asked), omni.draw("a walk", **asked)]
pictures = [[picture.data for picture in one.pictures] for one in drawn]
sys.stdout.write(f"{ready} {answer.text} {[len(one) for one in pictures]} {pictures[0] == pictures[1]}")
"""
"""What can be asked of a router in front of pipelines that answer, that draw, and that start."""

OLD, NEW = "old", "new"

MIXES = [
    (NEW, (OLD, OLD, OLD)),
    (NEW, (OLD, NEW, OLD)),
    (NEW, (NEW, OLD, NEW)),
    (OLD, (NEW, NEW, NEW)),
    (OLD, (OLD, NEW, NEW)),
    (OLD, (NEW, OLD, OLD)),
]
"""The router, then Thinker, Talker and Code2Wav: each kind of neighbours meets in both orders."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the last version."""
    folder = tmp_path_factory.mktemp("last")
    if not checkout(folder):
        pytest.skip("this clone has no earlier version")
    return folder


@pytest.fixture(scope="module")
def environments(old: Path) -> Mapping[str, Mapping[str, str]]:
    """By version."""
    return {OLD: environment_of(old), NEW: {}}


@pytest.fixture(scope="module")
def stages(old: Path, environments: Mapping[str, Mapping[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Each stage in both versions; tensors travel by shared memory."""
    running = Fleet(tmp_path_factory.mktemp("logs"))
    try:
        for kind in CHAIN:
            for version, environment in environments.items():
                flags = [*stage_flags(), "--inline-limit", "0"]
                said = spelled(old, flags) if version == OLD else flags
                running.add(f"{kind}-{version}", f"omnistage.{kind}", *said, environment=environment)
        running.ready()
        for name in running.names:
            started_with = Path(f"/proc/{running.server(name).pid}/environ").read_bytes()
            assert (os.fsencode(old) in started_with) == name.endswith(OLD), "it runs the code of its version"
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: f"{mix[0]} router, {'-'.join(mix[1])}")
async def test_old_and_new_answer_together(
    stages: Fleet, environments: Mapping[str, Mapping[str, str]], mix: tuple[str, tuple[str, ...]], seed: int
) -> None:
    router, versions = mix
    addresses = {kind: stages.address(f"{kind}-{version}") for kind, version in zip(CHAIN, versions, strict=True)}
    given = ",".join(f"{kind}={address}" for kind, address in addresses.items())
    name = f"router-{router}-{'-'.join(versions)}"
    try:
        flags = ["--pipeline", "toy", "--stages", given, "--grace", "5"]
        stages.add(name, "omnistage.router", *flags, environment=environments[router])
        await asyncio.to_thread(stages.ready, name)
        async with omni_stub(stages.address(name)) as stub:
            (await ask(stub, request("hello", seed))).check_toy(seed, "hello")
        expected = formulas.audio(seed, "hello", formulas.NATURAL_LENGTH)[:, 0] * 32768
        sound = sha256(expected.astype("<i2").tobytes()).hexdigest()
        for version, environment in environments.items():
            if (router, version) == (OLD, NEW):
                continue
            said = await _client(stages.address(name), seed, environment)
            assert said == f"{formulas.text(seed, 'hello', formulas.NATURAL_LENGTH)}|{sound}", version
        await all_free(list(addresses.values()))
    except BaseException as error:
        error.add_note(stages.logs())
        raise
    finally:
        stages.server(name).stop()


async def test_the_last_client_asks_a_router_whose_pipelines_answer_draw_and_start(
    stages: Fleet, environments: Mapping[str, Mapping[str, str]], old: Path, seed: int
) -> None:
    """In front of stages of the last version. A client that knows nothing of pipelines that start sees those that are ready."""
    stages.add("diffusion-old", "omnistage.diffusion", *spelled(old, stage_flags()), environment=environments[OLD])
    await asyncio.to_thread(stages.ready, "diffusion-old")
    addresses = [f"toy/{kind}={stages.address(f'{kind}-{OLD}')}" for kind in CHAIN]
    addresses += [f"toy-picture/diffusion={stages.address('diffusion-old')}", f"toy-film/diffusion={take_address()}"]
    try:
        stages.add("several", "omnistage.router", "--pipeline", "toy,toy-picture,toy-film", "--stages", ",".join(addresses), "--grace", "5")
        await asyncio.to_thread(stages.ready, "several")
        async with omni_stub(stages.address("several")) as stub:
            await until_serving(stub, {stages.address("diffusion-old"), *(stages.address(f"{kind}-{OLD}") for kind in CHAIN)})
        said = await _client(stages.address("several"), seed, environments[OLD], PROMPTED)
        assert said == f"['toy', 'toy-picture'] {formulas.text(seed, 'hello', formulas.NATURAL_LENGTH)} [1, 1] True"
    except BaseException as error:
        error.add_note(stages.logs())
        raise
    finally:
        stages.server("diffusion-old").stop()


async def _client(address: str, seed: int, environment: Mapping[str, str], program: str = CLIENT) -> str:
    """What the client of a version got."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, address, str(seed), env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()
