"""Asking a router for pictures, what came, and what Diffusers makes of the same folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from helpers.ask import WholeAnswer
from omnistage.models.diffusers.folder import load_processor, mute_libraries
from omnistage.v1 import omni_pb2, stage_pb2


def drawing(prompt: str = "a hill", seed: int = 1, pipeline: str = "painter", **fields: object) -> omni_pb2.GenerateRequest:
    params = stage_pb2.DiffusionParams(prompt=prompt, **fields)  # type: ignore[arg-type]
    return omni_pb2.GenerateRequest(model=pipeline, seed=seed, diffusion=params)


def files_of(answer: WholeAnswer) -> list[bytes]:
    """The pictures that are whole, without previews. One that was cut begins anew with a piece at 0."""
    files, begun = list[bytes](), b""
    for chunk in answer.of("image"):
        if chunk.HasField("image") and not chunk.image.HasField("preview_step"):
            piece = chunk.image.data
            begun = piece.data if not piece.offset else begun + piece.data
            assert len(begun) == piece.offset + len(piece.data) and chunk.count == (len(begun) == piece.total_bytes)
            if chunk.count:
                files.append(begun)
    return files


def steps_of(answer: WholeAnswer) -> list[tuple[int, int]]:
    return [(chunk.progress.done, chunk.progress.total) for chunk in answer.of("progress") if chunk.HasField("progress")]


def pixels(file: bytes) -> NDArray[np.int16]:
    """[height, width, 3]."""
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image).astype(np.int16)


def check_near(found: NDArray[np.int16], wanted: NDArray[np.int16]) -> None:
    """The same but for rounding, and no flat picture, which would be near to many."""
    assert found.shape == wanted.shape and wanted.std() > 5
    assert np.abs(found - wanted).max() <= 1


def drawn_by_diffusers(folder: Path, seed: int, prompt: str, lora: Path | None = None, /, **options: Any) -> NDArray[np.int16]:
    processor = {"processor": load_processor(folder / "processor")} if (folder / "processor").is_dir() else {}
    with mute_libraries():
        pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True, **processor)
        pipe.set_progress_bar_config(disable=True)
        if lora is not None:
            pipe.load_lora_weights(lora.parent, weight_name=lora.name)
        image = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **options).images[0]
    return np.asarray(image).astype(np.int16)
