"""Replicas whose results differ have other revisions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.engines import tiny_decoder
from helpers.instructions import OLDER_PROCESSORS, PLAIN_KERNELS
from omnistage.engine import results as engine_results
from omnistage.engine.attention import RowAttention
from omnistage.engine.results import fixed_results
from omnistage.models.checkpoint.revision import compute_on_thread, revision

OTHER_MACHINES = (*OLDER_PROCESSORS[:1], PLAIN_KERNELS, *OLDER_PROCESSORS[1:])
PROGRAM = Path(__file__).with_name("answers.py")
KINDS = ("thinker", "talker", "code2wav")
Told = dict[str, tuple[str, str]]
"""By kind: the revision of a stage of the default model, and a digest of what it answers to several requests."""


def told(environment: Mapping[str, str], *kinds: str) -> Told:
    command, variables = [sys.executable, str(PROGRAM), *kinds], {**os.environ, **environment}
    said = json.loads(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return {kind: (said[kind]["revision"], said[kind]["answers"]) for kind in kinds}


@pytest.fixture(scope="module")
def machines() -> Callable[[str, int], list[Told]]:
    """The facts of a stage of this kind on this machine and on so many others; each is asked once."""
    known: dict[str, list[Told]] = {kind: [] for kind in KINDS}

    def first(kind: str, count: int) -> list[Told]:
        for environment in ({}, *OTHER_MACHINES)[len(known[kind]) : count + 1]:
            known[kind].append(told(environment, kind))
        return known[kind][: count + 1]

    return first


@pytest.mark.timeout(400)
@lengths.rounds(1, len(OTHER_MACHINES))
@lengths.one_or_all("kind", KINDS)
def test_where_answers_differ_revisions_differ(machines: Callable[[str, int], list[Told]], kind: str, rounds: int, seed: int) -> None:
    """rounds: of the other machines, from the first on. The long form has the Thinker, which answers for as long as both others."""
    kind = lengths.draw(kind, KINDS[1:], seed)
    pairs = {machine[kind] for machine in machines(kind, rounds)}
    assert len({revision for revision, _ in pairs}) == len(pairs), f"one revision, and unlike answers: {sorted(pairs)}"
    if len({answers for _, answers in pairs}) == 1:
        pytest.skip(f"the {kind} answers the same with all of these instructions")


@lengths.long_form(
    "models/test_revision.py::test_a_revision_changes_with_the_files_and_not_with_their_place",
    unkept="two processes of a machine come to one revision and the same answers",
)
def test_one_machine_has_one_revision(machines: Callable[[str, int], list[Told]]) -> None:
    (here,) = machines("talker", 0)
    assert told({}, "talker")["talker"] == here["talker"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


ONE = np.array([1], np.float32)


def named(directory: Path, *results: Any, **changes: Any) -> str:
    facts: dict[str, Any] = {"code": "1", "dtype": "float32", "device": "cpu", "threads": 1, "results": results or (ONE,), **changes}
    return revision(directory, facts.pop("code"), **facts)


@pytest.mark.parametrize(
    "change", [{"code": "2"}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"threads": 2}, {"results": (np.nextafter(ONE, np.float32(2)),)}]
)
def test_a_revision_changes_with_each_of_its_parts(files: Path, change: dict[str, Any]) -> None:
    assert named(files, **change) != named(files)


def test_a_revision_changes_with_the_files_and_not_with_their_place(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = named(files)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(files, elsewhere)
    assert named(elsewhere) == before
    (elsewhere / "model.safetensors").write_bytes(b"wEights")
    assert named(elsewhere) != before
    (files / "README.md").write_text("Not a part of the model.")
    assert named(files, device="cuda:1") == named(files, device="cuda:0") and named(files) == before


@pytest.mark.parametrize("name", ["chat_template.jinja", "spk_dict.pt", "vocab.json", "merges.txt", "tokenizer.model"])
def test_every_file_that_an_answer_may_depend_on_counts(files: Path, name: str) -> None:
    before = named(files)
    (files / name).write_bytes(b"one")
    with_it = named(files)
    (files / name).write_bytes(b"other")
    assert len({before, with_it, named(files)}) == 3


def test_bits_and_shape_of_a_result_count(files: Path) -> None:
    """A single number is a result, too."""
    ones = torch.ones(2, 2, dtype=torch.bfloat16)
    several = [(ones,), (ones.view(4),), (ones.float(),), (ones, ones), (ones[:1], ones[1:]), (-0.0 * ones,), (0.0 * ones,)]
    several += [(torch.tensor(number),) for number in (1, 2, [1])]
    assert len({named(files, *results) for results in several}) == len(several)
    assert named(files, ones.t()) == named(files, ones)


def test_the_number_of_the_engine_counts(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first of the results that the engine gives."""

    def of_the_engine() -> str:
        decoder = tiny_decoder()
        return named(files, *fixed_results(decoder, decoder.logits, RowAttention()))

    before = of_the_engine()
    assert of_the_engine() == before
    monkeypatch.setattr(engine_results, "REVISION", engine_results.REVISION + 1)
    assert of_the_engine() != before


def test_a_result_is_computed_with_the_threads_of_the_worker() -> None:
    assert compute_on_thread(torch.get_num_threads, 3) == 3
    assert compute_on_thread(torch.get_num_threads, 1) == 1
