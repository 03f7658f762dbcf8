"""The choice of a build of torch, its source, and what is refused. With pip itself, indexes in folders, and tiny wheels."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.wheels import installed, publish, sha256, unpack
from tools import torch_build
from tools.commands import SetupError
from tools.torch_build import TORCH, TORCH_CUDA

PYTHON = ".".join(platform.python_version_tuple()[:2])
UNKNOWN = "0" * 64
"""The hash of no wheel."""

pytestmark = lengths.TOOLING


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of hashes, of this test: empty at first."""
    path = tmp_path / "torch.json"
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(torch_build, "TABLE", path)
    return path


def know(table: Path, *hashes: str, build: str = TORCH, version: str = PYTHON) -> None:
    """These are the wheels of a build for a Python."""
    known = json.loads(table.read_text(encoding="utf-8"))
    known.setdefault(build, {})[version] = list(hashes)
    table.write_text(json.dumps(known), encoding="utf-8")


def bring(python: str, device: str = "cpu") -> str:
    """Choose and install a build. Returns the hash of its wheel."""
    return torch_build.install(python, torch_build.choose(python, device))


@pytest.mark.parametrize("where", ["configured", "other"])
def test_the_cpu_build_of_the_configured_sources_comes_first_and_where_they_lack_it_that_of_the_other_index(
    where: str, python: str, configured: Path, other: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(configured, "torch", TORCH_CUDA)
    publish(other, "torch", TORCH, needs=("something-else",))
    wheel = publish({"configured": configured, "other": other}[where], "torch", TORCH)
    know(table, sha256(wheel))
    assert bring(python) == sha256(wheel)
    assert installed(python) == f"torch=={TORCH}\n"
    said = capsys.readouterr().out
    assert "unchecked" not in said and "out of reach" not in said


@pytest.mark.parametrize("where", ["configured", "other"])
def test_a_cpu_build_whose_hash_is_not_known_comes_unchecked_and_says_so_in_one_line(
    where: str, python: str, configured: Path, other: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    know(table, UNKNOWN, build=TORCH_CUDA)
    publish(configured, "torch", TORCH_CUDA)
    wheel = publish({"configured": configured, "other": other}[where], "torch", TORCH)
    chosen = torch_build.choose(python, "cpu")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "looking for" not in line]
    assert line == f"setup: torch {TORCH} for Python {PYTHON} comes unchecked: no hash of it is known here (requirements/torch.json)"
    assert torch_build.install(python, chosen) == sha256(wheel), "the hash that came is told"
    assert installed(python) == f"torch=={TORCH}\n"


def test_where_a_hash_is_required_an_unknown_one_stops_and_the_pythons_with_one_are_named(
    python: str, configured: Path, table: Path
) -> None:
    publish(configured, "torch", TORCH)
    know(table, version="3.10")
    know(table, UNKNOWN, version="3.14")
    with pytest.raises(
        SetupError, match=rf"no hash of torch 2\S+ for Python {PYTHON} .*--require-torch-hash.*: make PYTHON=python3\.14\.$"
    ) as no:
        torch_build.choose(python, "cpu", require_hash=True)
    assert "\n" not in str(no.value)


def test_where_a_hash_is_required_a_known_one_is_enough(python: str, configured: Path, table: Path) -> None:
    know(table, sha256(publish(configured, "torch", TORCH)))
    assert torch_build.choose(python, "cpu", require_hash=True).build == TORCH


def test_where_no_cpu_build_is_in_reach_the_default_build_comes_and_its_size_is_told(
    python: str, configured: Path, other: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = publish(configured, "torch", TORCH_CUDA)
    publish(configured, "torch", "99.0")
    know(table, sha256(wheel), build=TORCH_CUDA)
    chosen = torch_build.choose(python, "cpu", require_hash=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "looking for" not in line]
    assert line.startswith(f"setup: the CPU build of torch is out of reach for Python {PYTHON}: the default build") and "2.7 GB" in line
    assert torch_build.install(python, chosen) == sha256(wheel)
    assert installed(python) == f"torch=={TORCH_CUDA}\n"


def test_a_cpu_build_for_other_pythons_is_out_of_reach(python: str, configured: Path, other: Path) -> None:
    publish(configured, "torch", TORCH, tag="cp310-cp310-manylinux_2_28_x86_64")
    publish(other, "torch", TORCH, tag=f"cp{PYTHON.replace('.', '')}-cp{PYTHON.replace('.', '')}-win_amd64")
    publish(configured, "torch", TORCH_CUDA)
    assert torch_build.choose(python, "cpu").build == TORCH_CUDA


def test_where_there_is_no_build_at_all_the_error_says_what_to_set(python: str, configured: Path, other: Path) -> None:
    publish(other, "torch", "1.0")
    with pytest.raises(SetupError, match=r"2\S+\+cpu or 2\S+ was found neither in .* nor at file(?s:.*)Set TORCH_INDEX_URL(?s:.*)ERROR"):
        torch_build.choose(python, "cpu")


def test_nothing_is_fetched_to_choose(python: str, configured: Path, other: Path) -> None:
    """A listed build counts as there, whether its file can be read or not."""
    publish(configured, "torch", TORCH).unlink()
    assert torch_build.choose(python, "cpu").build == TORCH
    assert installed(python) == ""


def test_a_wheel_that_is_not_the_known_one_is_refused_and_not_sought_elsewhere(
    python: str, configured: Path, other: Path, table: Path
) -> None:
    know(table, sha256(publish(other, "torch", TORCH)))
    know(table, sha256(publish(configured, "torch", TORCH_CUDA)), build=TORCH_CUDA)
    publish(configured, "torch", TORCH).write_bytes(b"cut off")
    with pytest.raises(SetupError, match=r"^torch==.*: the file .* is not the one"):
        bring(python)
    assert installed(python) == ""


def test_for_cuda_the_build_without_a_label_is_installed(python: str, configured: Path, table: Path) -> None:
    """No other build is taken, though a build with a label counts as newer."""
    publish(configured, "torch", TORCH)
    wheel = publish(configured, "torch", TORCH_CUDA)
    know(table, sha256(wheel), build=TORCH_CUDA)
    assert bring(python, "cuda") == sha256(wheel)
    assert installed(python) == f"torch=={TORCH_CUDA}\n"


def test_for_cuda_the_index_of_cpu_builds_is_not_asked_but_the_one_that_is_set(
    python: str, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "other"
    publish(index, "torch", TORCH_CUDA)
    monkeypatch.setattr(torch_build, "TORCH_INDEX_URL", index.as_uri())
    with pytest.raises(SetupError, match=r"torch 2\S+ was found neither in pip's configured sources\.\nSet TORCH_INDEX_URL"):
        torch_build.choose(python, "cuda")
    monkeypatch.setenv("TORCH_INDEX_URL", index.as_uri())
    assert torch_build.choose(python, "cuda").build == TORCH_CUDA


def stamp(device: str, build: str, came: str = "") -> dict[str, Any]:
    return {"device": device, "torch": {"build": build, "sha256": came}}


@pytest.mark.parametrize(
    ("build", "cases"),
    [
        (TORCH, [({}, "cpu", True), (stamp("cpu", TORCH), "cpu", True), (stamp("cpu", TORCH), "cuda", False)]),
        (TORCH_CUDA, [({}, "cuda", True), ({}, "cpu", False), (stamp("cpu", TORCH), "cpu", False)]),
        (TORCH_CUDA, [(stamp("cpu", TORCH_CUDA), "cpu", True), (stamp("cpu", TORCH_CUDA), "cuda", True)]),
        (TORCH_CUDA, [(stamp("cuda", TORCH_CUDA), "cuda", True), (stamp("cuda", TORCH_CUDA), "cpu", False)]),
        ("1.0", [({}, "cpu", False), (stamp("cpu", "1.0"), "cpu", False)]),
        ("", [({}, "cpu", False), (stamp("cpu", ""), "cpu", False)]),
    ],
)
def test_what_is_installed_stays_if_it_is_the_best_build_or_was_chosen_for_the_device(
    python: str, tmp_path: Path, build: str, cases: list[tuple[Mapping[str, Any], str, bool]]
) -> None:
    """The stamp of the environment tells the device that was asked for."""
    if build:
        unpack(publish(tmp_path, "torch", build), tmp_path / "venv")
    assert torch_build.find_installed(python) == build
    assert [(made, device, torch_build.can_stay(python, made, device)) for made, device, _ in cases] == cases


def test_a_wheel_stays_unless_another_one_is_known_by_now(python: str, configured: Path, other: Path, table: Path) -> None:
    publish(configured, "torch", TORCH)
    came = bring(python)
    made = stamp("cpu", TORCH, came)
    assert torch_build.can_stay(python, made, "cpu")
    assert not torch_build.can_stay(python, made, "cpu", require_hash=True)
    know(table, UNKNOWN)
    assert not torch_build.can_stay(python, made, "cpu")
    know(table, UNKNOWN, came)
    assert torch_build.can_stay(python, made, "cpu", require_hash=True)
    shutil.rmtree(configured)
    assert torch_build.can_stay(python, made, "cpu"), "no index was asked"
