"""Asking a router for pictures, and what came."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from helpers.ask import WholeAnswer
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
