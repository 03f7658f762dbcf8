"""Things that must never lie in the tree, and things that the documents must keep saying."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

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
