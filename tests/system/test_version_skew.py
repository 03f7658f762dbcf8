"""This version beside the last one, as during an upgrade: stages, router and client of either, in toy form."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from helpers import lengths
from helpers.ask import ask, request
from helpers.fleet import Fleet
from helpers.ports import take_address
from helpers.servers import CHAIN, all_free, omni_stub, stage_flags, until_serving
from omnistage.models.toy import formulas
from tools.breaking import ROOT, last_version


def environment_of(folder: Path) -> dict[str, str]:
    """Variables with which Python imports omnistage from a checkout: its folders stand before those of the installed package, and all of
    them are portions of one namespace. Raises AssertionError if something would come from elsewhere."""
    layout = tomllib.loads((folder / "pyproject.toml").read_text())
    portions = [str(folder / portion) for portion in layout["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    environment = {"PYTHONPATH": os.pathsep.join(portions)}
    imported = (
        "import sys, omnistage.router.__main__, omnistage.client; print(*(m.__file__ for n, m in sys.modules.items() if 'omnistage.' in n))"
    )
    files = subprocess.run(
        [sys.executable, "-c", imported], env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert files and all(file == "None" or Path(file).is_relative_to(folder) for file in files), files
    return environment


def checkout(folder: Path) -> bool:
    """Write the last version into a folder; False if this clone does not have it."""
    revision = last_version()
    if revision is None:
        return False
    packed = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return True


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
"""The requests to a router in front of pipelines that answer, that draw, and that start."""

DRAWN = """
import sys
from omnistage.client import BadRequestError, Omni
with Omni(address=sys.argv[1], api_key="somebody") as omni:
    states = [(pipeline.name, pipeline.state) for pipeline in omni.pipelines()]
    answer, picture = omni.generate("hello", seed=int(sys.argv[2])), omni.draw("a walk", seed=3)
    try:
        omni.generate("a walk", pipeline="toy-picture")
        said = "drawn"
    except BadRequestError as error:
        said = error.fields[0].field
sys.stdout.write(f"{states} {answer.text} {picture.pipeline} {said}")
"""
"""The same of a router that draws no prompts: a drawing by name is one everywhere."""

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
    with Fleet(tmp_path_factory.mktemp("logs")) as running:
        for kind in CHAIN:
            for version, environment in environments.items():
                flags = [*stage_flags(), "--inline-limit", "0"]
                running.add(f"{kind}-{version}", f"omnistage.{kind}", *flags, environment=environment)
        running.ready()
        for name in running.names:
            started_with = Path(f"/proc/{running.server(name).pid}/environ").read_bytes()
            assert (os.fsencode(old) in started_with) == name.endswith(OLD), "it runs the code of its version"
        yield running


@lengths.drawn_cells(1, "mix", MIXES, ids=lambda mix: f"{mix[0]} router, {'-'.join(mix[1])}")
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
            said = await _client(stages.address(name), seed, environment)
            assert said == f"{formulas.text(seed, 'hello', formulas.NATURAL_LENGTH)}|{sound}", version
        await all_free(list(addresses.values()))
    except BaseException as error:
        error.add_note(stages.logs())
        raise
    finally:
        stages.server(name).stop()


@lengths.long_form(
    "system/test_version_skew.py::test_old_and_new_answer_together",
    unkept="A client of the last version is answered and draws where other pipelines still start.",
)
async def test_the_last_client_asks_a_router_whose_pipelines_answer_draw_and_start(
    stages: Fleet, environments: Mapping[str, Mapping[str, str]], seed: int
) -> None:
    """In front of stages of the last version. A client that knows nothing of pipelines that start sees those that are ready. This client
    draws and talks at the last version's router."""
    stages.add("diffusion-old", "omnistage.diffusion", *stage_flags(), environment=environments[OLD])
    await asyncio.to_thread(stages.ready, "diffusion-old")
    addresses = [f"toy/{kind}={stages.address(f'{kind}-{OLD}')}" for kind in CHAIN]
    addresses += [f"toy-picture/diffusion={stages.address('diffusion-old')}"]
    given = ",".join(addresses)
    try:
        flags = ["--pipeline", "toy,toy-picture", "--stages", given, "--grace", "5"]
        stages.add("both-old", "omnistage.router", *flags, environment=environments[OLD])
        starting = f"{given},toy-film/diffusion={take_address()}"
        stages.add("several", "omnistage.router", "--pipeline", "toy,toy-picture,toy-film", "--stages", starting, "--grace", "5")
        await asyncio.to_thread(stages.ready, "several")
        async with omni_stub(stages.address("several")) as stub:
            await until_serving(stub, {stages.address("diffusion-old"), *(stages.address(f"{kind}-{OLD}") for kind in CHAIN)})
        said = await _client(stages.address("several"), seed, environments[OLD], PROMPTED)
        text = formulas.text(seed, "hello", formulas.NATURAL_LENGTH)
        assert said == f"['toy', 'toy-picture'] {text} [1, 1] True"
        await asyncio.to_thread(stages.ready, "both-old")
        said = await _client(stages.address("both-old"), seed, environments[NEW], DRAWN)
        assert said == f"[('toy', 'ready'), ('toy-picture', 'ready')] {text} toy-picture thinker"
    except BaseException as error:
        error.add_note(stages.logs())
        raise
    finally:
        for name in ("several", "both-old", "diffusion-old"):
            if name in stages.names:
                stages.server(name).stop()


async def _client(address: str, seed: int, environment: Mapping[str, str], program: str = CLIENT) -> str:
    """The output of the client of a version."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, address, str(seed), env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()
