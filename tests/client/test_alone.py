"""The client by itself: it needs what `pip install omnistage` brings, from the oldest packages that pyproject.toml lets it have to those of
this environment, and neither packages of servers nor POSIX shared memory. It tells its version."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.metadata import distributions, version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import omnistage.client
from helpers import lengths
from helpers.bare import bare_environment, bare_python
from helpers.lengths import LONG
from helpers.servers import CHAIN, family_logic, local_router, local_stage
from omnistage.models.toy import formulas
from omnistage.router.pipeline import load_pipeline
from tools import apart, lock
from tools.commands import pip
from tools.groups import CORE, read_groups

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in NAMES or name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

NOT_THERE = (
    *("posix_ipc", "_posixshmem", "multiprocessing.shared_memory", "_multiprocessing"),
    *("pydantic", "pydantic_core", "pydantic_settings", "yaml", "structlog", "prometheus_client"),
    *("grpc_health", "grpc_reflection", "grpc_channelz", "grpc_status", "typer", "rich", "matplotlib", "soundfile", "torch", "PIL"),
)

ASK = """
from omnistage.client import Omni
with Omni(address=sys.argv[1]) as omni:
    answer = omni.generate("Hi", seed=1)
answer.save(sys.argv[2])
print(answer.text, end="")
"""


def test_it_asks_where_nothing_of_servers_can_be_imported(toy_address: str, tmp_path: Path) -> None:
    code = f"NAMES = {NOT_THERE!r}\n{WITHOUT}\n{ASK}"
    file = tmp_path / "answer.wav"
    done = subprocess.run([sys.executable, "-c", code, toy_address, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout, file.read_bytes()[:4]) == (formulas.text(1, "Hi", formulas.NATURAL_LENGTH), b"RIFF")


def test_what_cannot_be_imported_there_is_really_not() -> None:
    code = f"""NAMES = {NOT_THERE!r}\n{WITHOUT}
import importlib
for name in NAMES:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == list(NOT_THERE), done.stderr


def test_all_that_it_imports_is_of_the_core(tmp_path: Path) -> None:
    code = "import sys, omnistage.client; print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    done = subprocess.run([*bare_python(), "-c", code], env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    imported = {name for name in done.stdout.split() if not re.match("_?cython|__main__", name)}
    assert imported == {"google", "grpc", "numpy", "omnistage", "typing_extensions"}


def test_the_core_is_no_more_than_it_needs() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in read_groups(ROOT)[CORE]}
    assert names == {"grpcio", "googleapis-common-protos", "protobuf", "numpy"}


@pytest.mark.parametrize("extra", ["cli", "models"])
def test_what_servers_need_comes_with_what_starts_them(extra: str) -> None:
    groups = read_groups(ROOT)
    assert set(groups["server"]) <= set(groups[extra])


@lengths.drawn_cells(2, "server", ["router", "thinker", "talker", "code2wav", "diffusion"])
def test_a_server_says_what_to_install(server: str, tmp_path: Path) -> None:
    command = [*bare_python(), "-m", f"omnistage.{server}"]
    done = subprocess.run(command, env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "pip install --find-links dist 'omnistage[server]'" in line


def test_a_router_starts_with_the_packages_of_servers_alone(tmp_path: Path) -> None:
    environment = bare_environment(tmp_path, "server")
    done = subprocess.run([*bare_python(), "-m", "omnistage.router", "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "--pipeline" in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    assert omnistage.client.__version__ == version("omnistage")
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        omnistage.client.versoin  # type: ignore[attr-defined]  # noqa: B018


def test_a_source_tree_that_is_not_installed_tells_it_too(tmp_path: Path) -> None:
    code = """
import importlib.metadata
import omnistage.client
try:
    importlib.metadata.version("omnistage")
except importlib.metadata.PackageNotFoundError:
    print(omnistage.client.__version__)
"""
    done = subprocess.run([*bare_python(), "-c", code], env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert (done.stdout.strip(), done.stderr) == (told, "")


def test_looking_for_it_is_left_to_who_asks() -> None:
    code = "import omnistage.client, sys; print(sorted({'importlib.metadata', 'tomllib', 'omnistage.client.version'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


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
    film = folder / "film.mp4"
    film.write_bytes(MP4)
    os.truncate(film, 20 << 20)
    words = [*command, "-W", "error", str(PROGRAM), address, str(film), str(folder)]
    process = await asyncio.create_subprocess_exec(*words, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert not err, err.decode()
    got: dict[str, Any] = json.loads(out)
    return got


OURS = (apart.ROOT / "sdk", apart.ROOT / "host")
"""The folders with the code of a client."""


async def answers_of_oldest(python: str, address: str, folder: Path) -> dict[str, Any]:
    packages = await asyncio.to_thread(apart.folder_of, "oldest", python)
    return await answers([python, "-S"], apart.variables(*OURS, packages), address, folder)


async def test_the_oldest_packages_do_what_the_newest_do(address: str, tmp_path: Path) -> None:
    old = await answers_of_oldest(sys.executable, address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert old.pop("versions") == ["1.68.0", "5.29.1"]
    assert (new.pop("versions"), old) == ([version("grpcio"), version("protobuf")], new)
    assert old["text"] == old["streamed"] and len(old["large"].split()) == 12 and old["done"]
    assert old["chunks"] and old["steps"] == [1, 2, 3] and old["pipelines"] == ["toy-omni", "toy", "toy-film"]
    items = formulas.items(["u", "What is a kite?"])
    assert old["text"] == "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))
    assert [words for words in ("steps", "none", "images[0]", "no server answers") if words not in " ".join(old["errors"])] == []


@pytest.mark.parametrize("python", [pytest.param(one, marks=LONG) for one in OTHERS])
async def test_so_they_do_on_other_pythons(python: str, address: str, tmp_path: Path) -> None:
    old = await answers_of_oldest(program_of(python), address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert old.pop("versions") != new.pop("versions") and old == new


@pytest.mark.parametrize("protobuf", [pytest.param("6.33.5", marks=LONG)])
async def test_so_they_do_with_the_major_version_in_between(protobuf: str, address: str, tmp_path: Path) -> None:
    between = tmp_path / "between"
    await asyncio.to_thread(pip, sys.executable, "--quiet", "--no-deps", f"--target={between}", f"protobuf=={protobuf}")
    folders = (*OURS, between, apart.folder_of("oldest"))
    got = await answers([sys.executable, "-S"], apart.variables(*folders), address, tmp_path)
    new = await answers([sys.executable], dict(os.environ), address, tmp_path)
    assert got.pop("versions") == ["1.68.0", protobuf] and new.pop("versions") and got == new


def test_the_oldest_packages_need_nothing_beside_them_and_are_what_pyproject_begins_with() -> None:
    folder = apart.folder_of("oldest")
    found = {canonicalize_name(one.name): one for one in distributions(path=[str(folder)])}
    core = {canonicalize_name(Requirement(line).name): Requirement(line) for line in read_groups(apart.ROOT)[CORE]}
    assert found.keys() == core.keys()
    packages = {str(name): lock.LockedPackage(one.name, one.version, tuple(one.requires or ())) for name, one in found.items()}
    assert lock.find_unmet(map(str, core.values()), packages, PYTHON) == []
    for name, one in found.items():
        (floor,) = [spec.version for spec in core[name].specifier if spec.operator == ">="]
        assert one.version.split(".")[:2] == floor.split(".")[:2], f"the floor of {name} is older than what was tried: make lock"
