"""Both ends of what the client may stand beside: the oldest packages that pyproject.toml lets it have, and those of this environment.

The same program asks the same router from both, with warnings as errors, and gets the same. In the long form from the other Pythons too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.metadata import distributions, version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.lengths import LONG
from helpers.servers import CHAIN, family_logic, local_router, local_stage
from omnistage.models.toy import formulas
from omnistage.router.pipeline import load_pipeline
from tools import apart, lock
from tools.commands import pip
from tools.groups import CORE, read_groups

PROGRAM = apart.ROOT / "tests" / "helpers" / "client_program.py"
MP4 = b"\0\0\0\x18ftypmp42"
PYTHON = f"3.{sys.version_info.minor}"
OTHERS = [python for python in lock.PYTHONS if python != PYTHON]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a router of this environment that speaks, sees films and draws."""
    async with AsyncExitStack() as house:
        stages = {}
        for name, kind in (*(product(("toy-omni", "toy"), CHAIN)), ("toy-film", "diffusion")):
            logic = family_logic(name, kind, {"films": True} if (name, kind) == ("toy-omni", "thinker") else None)
            stages[f"{name}/{kind}"] = (await house.enter_async_context(local_stage(logic))).address
        pipelines = [load_pipeline(name) for name in ("toy-omni", "toy", "toy-film")]
        yield (await house.enter_async_context(local_router(stages, *pipelines))).address


def program_of(python: str) -> str:
    """Another Python, which can be there without being usable: pyenv has names on PATH that say only that."""
    found = shutil.which(f"python{python}")
    for candidate in (found, *map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))):
        if candidate and os.spawnvp(os.P_WAIT, candidate, [candidate, "-c", "import pip"]) == 0:
            return candidate
    pytest.skip(f"there is no Python {python} with pip on this machine")


async def answers(command: list[str], variables: dict[str, str], address: str, folder: Path) -> dict[str, Any]:
    """The answers that the program got."""
    film = folder / "film.mp4"
    film.write_bytes(MP4)
    os.truncate(film, 20 << 20)
    words = [*command, "-W", "error", str(PROGRAM), address, str(film), str(folder)]
    process = await asyncio.create_subprocess_exec(*words, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert not err, err.decode()
    got: dict[str, Any] = json.loads(out)
    return got


async def answers_of_oldest(python: str, address: str, folder: Path) -> dict[str, Any]:
    packages = await asyncio.to_thread(apart.folder_of, "oldest", python)
    return await answers([python, "-S"], apart.variables(apart.ROOT / "sdk", packages), address, folder)


async def test_the_oldest_packages_do_what_the_newest_do(address: str, tmp_path: Path) -> None:
    old = await answers_of_oldest(sys.executable, address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert old.pop("versions") == ["1.68.0", "5.29.1"]
    assert new.pop("versions") == [version("grpcio"), version("protobuf")]
    assert old == new
    assert old["text"] == old["streamed"] and len(old["large"].split()) == 12 and old["done"]
    assert old["chunks"] and old["steps"] == [1, 2, 3] and old["pipelines"] == ["toy-omni", "toy", "toy-film"]
    items = formulas.items(["u", "What is a kite?"])
    assert old["text"] == "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))
    assert [words for words in ("steps", "none", "images[0]", "no server answers") if words not in " ".join(old["errors"])] == []


@pytest.mark.parametrize("python", [pytest.param(one, marks=LONG) for one in OTHERS])
async def test_so_they_do_on_other_pythons(python: str, address: str, tmp_path: Path) -> None:
    old = await answers_of_oldest(program_of(python), address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert old.pop("versions") != new.pop("versions")
    assert old == new


@pytest.mark.parametrize("protobuf", [pytest.param("6.33.5", marks=LONG)])
async def test_so_they_do_with_the_major_version_in_between(protobuf: str, address: str, tmp_path: Path) -> None:
    between = tmp_path / "between"
    await asyncio.to_thread(pip, sys.executable, "--quiet", "--no-deps", f"--target={between}", f"protobuf=={protobuf}")
    folders = (apart.ROOT / "sdk", between, apart.folder_of("oldest"))
    got = await answers([sys.executable, "-S"], apart.variables(*folders), address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert got.pop("versions") == ["1.68.0", protobuf] and new.pop("versions")
    assert got == new


def test_the_oldest_packages_need_nothing_beside_them_and_are_what_pyproject_begins_with() -> None:
    folder = apart.folder_of("oldest")
    found = {canonicalize_name(one.name): one for one in distributions(path=[str(folder)])}
    core = {canonicalize_name(Requirement(line).name): Requirement(line) for line in read_groups(apart.ROOT)[CORE]}
    assert found.keys() == core.keys()
    packages: dict[str, lock.LockedPackage] = {
        name: lock.LockedPackage(one.name, one.version, tuple(one.requires or ())) for name, one in found.items()
    }
    assert lock.find_unmet(map(str, core.values()), packages, PYTHON) == []
    for name, one in found.items():
        (floor,) = [spec.version for spec in core[name].specifier if spec.operator == ">="]
        assert one.version.split(".")[:2] == floor.split(".")[:2], f"the floor of {name} is older than what was tried: make lock"
