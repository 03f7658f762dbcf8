"""Things that must never lie in the tree, things that the documents must keep saying, and rules for the container files: layers in common,
and room for a drain. A stack in containers is in tests/system/test_compose.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.servers import KINDS
from tools import setup
from tools.breaking import LAST_VERSION, git, last_version
from tools.groups import read_apart, read_groups

ROOT = Path(__file__).resolve().parents[2]

# Folders of one machine: the code must run in any. Spelled in two parts so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.{}$-])/(?:work|root|tmp|home/\w+|opt/(?:pypi|wheels)\S*)/")
URL_HOST = re.compile(r"\b[a-z][a-z+]*://([^\s/\"'`)>\]:{}$]+)")
# Set-up may go to one address, the PyTorch index; the other addresses are cited, name a form, or are this machine.
HOSTS = {"download.pytorch.org", "www.apache.org", "www.w3.org", "127.0.0.1", "localhost"}
# example.com is reserved for examples; one letter before the dot is no host that exists.
EXAMPLE = re.compile(r"(?:[\w-]+\.)*example\.com(?::\d+)?|[a-z]\.[a-z]")
REGISTRY = re.compile(r"\b(?:pypi|pythonhosted|npmjs|debian|docker|ghcr|quay|huggingface)\.(?:org|com|io|co)\b")


def tracked() -> list[Path]:
    """The text files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def lines() -> list[tuple[str, str]]:
    """Every line of every text file, with its place."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def test_the_namespace_has_no_init_of_its_own() -> None:
    assert [str(path) for path in tracked() if path.parts[-2:] == ("omnistage", "__init__.py")] == []


def test_no_paths_of_one_machine() -> None:
    assert [place for place, line in lines() if MACHINE_PATH.search(line)] == []


def test_no_hosts_but_those_that_are_meant() -> None:
    found = [(place, host) for place, line in lines() for host in URL_HOST.findall(line) if "." in host and not meant(host)]
    assert found == []


def meant(host: str) -> bool:
    """Whether a URL may name this host."""
    return host.rsplit(":", 1)[0] in HOSTS or EXAMPLE.fullmatch(host) is not None


def test_no_package_registry_is_named() -> None:
    assert [place for place, line in lines() if REGISTRY.search(line)] == []


def test_nothing_is_large() -> None:
    """The weights of the default picture model are the one exception."""
    large = [path for path in tracked() if path.stat().st_size > 1_000_000]
    weights = [path for path in large if "omnistage_pictures" in path.parts and path.suffix == ".safetensors"]
    assert large == weights
    assert sum(path.stat().st_size for path in weights) < 30_000_000


def test_every_dependency_is_pinned_and_explained() -> None:
    requirements = [one for group in read_groups(ROOT).values() for one in group]
    names = {normal(re.split(r"[=<>]", one)[0]) for one in requirements}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {normal(name) for name in re.findall(r"^([^#\s]+)==", constraints, re.MULTILINE)}
    document = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = {normal(name) for name in re.findall(r"^\| `([^`]+)`", document, re.MULTILINE)}
    apart = {normal(re.split(r"[=<>]", one)[0]) for group in read_apart(ROOT).values() for one in group}
    assert names - pinned == set()
    assert (names | apart) ^ explained == set()


def normal(name: str) -> str:
    """A package name in the one spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_the_last_version_is_one_that_this_one_follows() -> None:
    """A clone with its history has that commit. Without it there is nothing to compare with, and the command says no more than that."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == b"true":
        pytest.skip("this clone has no history")
    assert last_version() == LAST_VERSION
    assert git("merge-base", "--is-ancestor", LAST_VERSION, "HEAD").returncode == 0


WITH_TORCH = ("services", "sdk")
WITHOUT_TORCH = ("router",)
WITH_HTTP = ("gateway",)
OMNI = "omni-"
"""The beginning of the services' names in the profile qwen2_5_omni."""
CHAIN = ("router", "thinker", "talker", "code2wav")
PICTURES = ("picture-router", "painter")
STAGED = (*CHAIN, *(OMNI + name for name in CHAIN), *PICTURES)
SERVERS = (*STAGED, *WITH_HTTP)


def instructions(folder: str) -> list[str]:
    """The lines of a Dockerfile without its comments."""
    lines = (ROOT / folder / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def installing(folder: str) -> list[str]:
    """The instructions from the first one to the one that installs the dependencies."""
    lines = instructions(folder)
    last = next(number for number, line in enumerate(lines) if "--extras" in line)
    return lines[: last + 1]


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    return found


@pytest.mark.parametrize("folders", [WITH_TORCH, WITHOUT_TORCH], ids=["with torch", "without torch"])
def test_images_that_install_the_same_begin_with_the_same_lines(folders: tuple[str, ...]) -> None:
    """Docker then builds and stores them once."""
    first, *others = (installing(folder) for folder in folders)
    assert [other for other in others if other != first] == []


@pytest.mark.parametrize("folder", [*WITH_TORCH, *WITHOUT_TORCH, *WITH_HTTP])
def test_every_image_gets_all_files_of_the_set_up(folder: str) -> None:
    files = {f"tools/{path.name}" for path in setup.SOURCES}
    copied = {word for line in installing(folder) if line.startswith("COPY tools/") for word in line.split()[1:-1]}
    assert copied == files
    assert {f"!{file}" for file in files} <= {*(ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}


def test_every_image_is_in_one_of_the_groups() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for pattern in ("*/Dockerfile", "*/*/Dockerfile") for path in ROOT.glob(pattern)}
    assert found == {*WITH_TORCH, *WITHOUT_TORCH, *WITH_HTTP}


def test_every_stage_is_built_as_its_kind() -> None:
    kinds = {name: service["build"]["args"].get("KIND") for name, service in services().items() if "build" in service}
    wanted = {name: name.removeprefix(OMNI).replace("painter", "diffusion") for name in STAGED if not name.endswith("router")}
    assert {name: kind for name, kind in kinds.items() if kind is not None} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_the_entry_point_of_the_stage_image_becomes_the_server_of_its_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [line for line in instructions("services") if line.startswith("ENTRYPOINT ")]
    words = json.loads(line.removeprefix("ENTRYPOINT "))
    # The image has one Python; here it is the one of the tests.
    environment = {**os.environ, "STAGE_KIND": kind, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*words, "--threads", "1 or 2"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "--threads: is '1 or 2'; it must be a whole number" in done.stderr, "an argument is handed over as it is"
    assert f"omnistage.{kind}" in words[2].replace("${STAGE_KIND}", kind) and words[2].startswith("exec "), "signals would end at the shell"


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_time_to_drain_and_comes_back_when_it_dies(name: str) -> None:
    service = services()[name]
    assert seconds(service["stop_grace_period"]) > float(service["environment"]["OMNISTAGE_GRACE"]) + 5
    assert service["restart"] == "unless-stopped"
    assert any(line.startswith("HEALTHCHECK --interval") for line in instructions(str(Path(service["build"]["dockerfile"]).parent)))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_a_limit_of_memory_that_can_be_set(name: str) -> None:
    """A router or a gateway, which strangers reach, has a limit in any case."""
    limit = re.fullmatch(r"\$\{(OMNISTAGE_[A-Z]+_MEMORY):-(\d+)g?\}", services()[name]["mem_limit"])
    assert limit and limit[1] in (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    assert int(limit[2]) or not name.endswith(("router", "gateway"))


@pytest.mark.parametrize("name", sorted(services()))
def test_a_container_may_do_no_more_than_it_needs(name: str) -> None:
    service = services()[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    assert service["security_opt"] == ["no-new-privileges:true"]


def seconds(duration: str) -> float:
    found = re.fullmatch(r"(\d+)s", duration)
    assert found, duration
    return float(found[1])
