"""The client by itself: it needs what `pip install omnistage` brings, and neither packages of servers nor POSIX shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import lengths
from helpers.bare import bare_environment, bare_python
from omnistage.models.toy import formulas
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
    assert done.stdout == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    assert file.read_bytes()[:4] == b"RIFF"


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


@lengths.drawn_cells(
    2, "server", ["omnistage.router", "omnistage.thinker", "omnistage.talker", "omnistage.code2wav", "omnistage.diffusion"]
)
def test_a_server_says_what_to_install(server: str, tmp_path: Path) -> None:
    done = subprocess.run([*bare_python(), "-m", server], env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "pip install --find-links dist 'omnistage[server]'" in line


def test_a_router_starts_with_the_packages_of_servers_alone(tmp_path: Path) -> None:
    environment = bare_environment(tmp_path, "server")
    done = subprocess.run([*bare_python(), "-m", "omnistage.router", "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--pipeline" in done.stdout
