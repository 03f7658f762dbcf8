"""Weights that are kept as they are in the files are memory of the files: two processes have them once, and the kernel says so."""

from __future__ import annotations

import json
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.pipes import receive, running
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.memory import mapped_bytes, memory_texts
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS
from omnistage.models.reports import bytes_told

PAGE = 4096


def shared_in(folder: Path) -> dict[str, int]:
    """The shares of a folder's files in the memory of this process that the kernel tells, in bytes: proc(5), smaps."""
    files, found, is_ours = {str(path.resolve()) for path in folder.iterdir()}, dict.fromkeys(("Size", "Rss", "Pss", "Anonymous"), 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0]:
            is_ours = line.split(maxsplit=5)[-1] in files
        elif is_ours and name in found:
            found[name] += int(value.split()[0]) << 10
    return found


def load(connection: Connection, folder: Path) -> None:
    """A replica's weights, in the type of the files; then what the kernel says of them, each time when it is asked."""
    parts = WEIGHTS.read_parts(folder, read_thinker_config(folder), torch.float32, torch.device("cpu"))
    embedding = parts.decoder._embedding
    told = {"bytes": embedding.nbytes, "sum": embedding.double().sum().item(), "told": memory_texts(folder)["shared_memory"]}
    while True:
        connection.send_bytes(json.dumps({**told, **shared_in(folder)}).encode())
        connection.recv_bytes()


@lengths.long_form(
    "models/test_weights.py::test_a_mapped_weight_is_the_one_that_is_read", unkept="two processes share the pages of the embedding"
)
def test_two_replicas_have_the_embedding_once(omni_checkpoint: Path) -> None:
    with ExitStack() as replicas:
        connections = [replicas.enter_context(running(load, omni_checkpoint))[0] for _ in range(2)]
        first = [json.loads(receive(connection)) for connection in connections]
        assert first[0]["sum"] == first[1]["sum"] != 0
        for connection in connections:
            connection.send_bytes(b"again")
            found = json.loads(receive(connection))
            size = found["bytes"]
            assert size > 64 * PAGE, "a few pages would tell nothing"
            assert size <= found["Size"] < size + 2 * PAGE, "the embedding is mapped, and nothing else of the files"
            assert found["Rss"] == found["Size"]
            assert found["Pss"] <= found["Rss"] / 2 + PAGE
            assert found["Anonymous"] == 0, "none of it is this process's own"
            assert found["told"].startswith(f"{bytes_told(found['Size'])} of weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mapped_weight_is_the_one_that_is_read(tmp_path: Path, dtype: torch.dtype, seed: int) -> None:
    """Wherever in the file it lies, and after the others have gone; a file that takes the place of this one changes nothing of it."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        f"{name}": (torch.randn(size, generator=generator) * 100).to(dtype) for name, size in (("a", (3, 5)), ("b", (4097, 3)), ("c", (1,)))
    }
    save_file({**made, "none": torch.empty(0, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    with Weights(tmp_path) as weights:
        kept = {name: weights.mapped(name) for name in ("a", "b", "c", "none")}
        assert weights.mapped("absent") is None
        weights.check_read()
    assert mapped_bytes(tmp_path) >= made["b"].nbytes
    other = tmp_path / "other"
    save_file({name: weight + 1 for name, weight in made.items()}, other)
    other.replace(tmp_path / "model.safetensors")
    for name, weight in made.items():
        found = kept[name]
        assert found is not None and torch.equal(found, weight) and found.dtype == dtype
    assert kept["none"] is not None and kept["none"].shape == (0, 4)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], made["a"] + 1)


def test_what_is_converted_is_memory_of_the_process(omni_checkpoint: Path) -> None:
    parts = WEIGHTS.read_parts(omni_checkpoint, read_thinker_config(omni_checkpoint), torch.bfloat16, torch.device("cpu"))
    assert parts.decoder.spec.dtype == torch.bfloat16
    assert shared_in(omni_checkpoint)["Size"] == mapped_bytes(omni_checkpoint) == 0
    assert memory_texts(omni_checkpoint)["shared_memory"].startswith("none")


def test_a_weight_that_is_needed_and_not_there_is_named(tmp_path: Path) -> None:
    save_file({"one": torch.arange(3.0)}, tmp_path / "model.safetensors")
    with Weights(tmp_path) as weights:
        assert weights.need("one").tolist() == [0, 1, 2]
        with pytest.raises(BadCheckpoint, match=f"{tmp_path} lacks the weight two"):
            weights.need("two")
