"""Media as the published processors of Transformers prepare them. The processors need torchvision, which this environment has not: what
they make of some conversations is kept in files.

`python -m helpers.published` in tests/ writes the files anew: it installs torchvision into a folder of its own."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from helpers import media_files, published_processor
from helpers.published_processor import FPS, RATE_HZ, medium
from helpers.saved_processor import Conversation, counted
from omnistage.models.conversation import Media, Part, Turn

Arrays = Mapping[str, NDArray[Any]]
"""All that a processor gives a model, by its names."""
Digest = dict[str, Any]
"""Arrays as JSON: whole numbers as they are, ids by how often they stand in a row, and some values of others."""

CLASSES = {"qwen2.5-omni": "Qwen2_5OmniProcessor", "qwen3-omni": "Qwen3OmniMoeProcessor", "qwen-image-edit": "Qwen2VLProcessor"}
"""The classes of published processors, by the architecture's name in make-tiny."""
KEPT = Path(__file__).parents[1] / "models" / "published"
CONVERSATIONS = 12
VALUES = 80
"""Number of values in a digest, of each array."""


def draw(architecture: str, source: random.Random, count: int) -> list[Conversation]:
    """Conversations with media of any size. A conversation with Qwen3-Omni has one sound, because its processor puts silence behind all
    sounds but the longest one."""

    def picture() -> dict[str, Any]:
        return {"image": [source.randint(20, 700), source.randint(20, 700)], "seed": source.getrandbits(30)}

    def sound() -> dict[str, Any]:
        return {"audio": source.randint(RATE_HZ // 10, 6 * RATE_HZ), "seed": source.getrandbits(30)}

    def film(*, is_heard: bool) -> dict[str, Any]:
        frames = 2 * source.randint(2, 5)
        heard = {"sound": round(frames / FPS * RATE_HZ * source.uniform(0.9, 1.2))} if is_heard else {}
        return {"video": [frames, source.randint(60, 400), source.randint(60, 400)], "seed": source.getrandbits(30), **heard}

    def parts() -> list[Any]:
        pictures = [picture() for _ in range(source.randint(0, 2))]
        if architecture == "qwen-image-edit":
            return [picture(), *pictures]
        others = source.choice([[sound()], [film(is_heard=False)], [film(is_heard=True)], []])
        if architecture == "qwen2.5-omni":
            others += source.choice([[], [sound()]])
        return [*pictures, *others]

    return [[{"role": "user", "parts": [*source.sample(shown := parts(), len(shown)), "What is this?"]}] for _ in range(count)]


def processed(architecture: str, folder: Path, conversations: Sequence[Conversation]) -> list[Arrays]:
    """By the published processor of a folder in the published layout."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(base / "installed"), "torchvision"]
        subprocess.run(pip, check=True, timeout=500)
        (base / "conversations.json").write_text(json.dumps(conversations), "utf-8")
        words = (CLASSES[architecture], str(folder), str(base / "conversations.json"), str(base / "made.npz"))
        places = (str(base / "installed"), str(Path(__file__).parents[1]))
        subprocess.run(
            [sys.executable, published_processor.__file__, *words],
            check=True,
            timeout=500,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        made: list[dict[str, NDArray[Any]]] = [{} for _ in conversations]
        with np.load(base / "made.npz") as arrays:
            for key in arrays:
                number, name = key.split("/")
                made[int(number)][name] = arrays[key]
    return list(made)


def turns_of(conversation: Conversation) -> list[Turn]:
    """The conversation with its media as files, which lose nothing."""
    return [Turn(turn["role"], tuple(map(_part, turn["parts"]))) for turn in conversation]


def _part(part: Any) -> Part:
    if isinstance(part, str):
        return part
    if "image" in part:
        return Media("image/png", media_files.picture(part["seed"], *part["image"]))
    if "audio" in part:
        return Media("audio/wav", media_files.written(medium(part, "audio"), RATE_HZ, subtype="FLOAT"))
    return Media("video/x-matroska", _film(part), use_audio="sound" in part)


def _film(part: dict[str, Any]) -> bytes:
    file, pixels = io.BytesIO(), medium(part, "video")
    with av.open(file, "w", format="matroska") as container:
        video: Any = container.add_stream("ffv1", rate=round(FPS))
        video.height, video.width, video.pix_fmt = *pixels.shape[1:3], "bgr0"
        audio: Any = container.add_stream("pcm_f32le", rate=RATE_HZ, layout="mono") if "sound" in part else None
        for frame in pixels:
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0")))
        container.mux(video.encode())
        if audio is not None:
            block = av.AudioFrame.from_ndarray(medium(part, "sound")[None], format="flt", layout="mono")
            block.sample_rate = RATE_HZ
            container.mux(audio.encode(block))
            container.mux(audio.encode())
    return file.getvalue()


def digest(arrays: Arrays, values: int = VALUES) -> Digest:
    """The arrays in a form that can be kept. values: how many of each array of floats."""
    return {name: _digest(name, array, values) for name, array in sorted(arrays.items())}


def _digest(name: str, array: NDArray[Any], values: int) -> Any:
    if name == "input_ids":
        return counted(array.ravel().tolist())
    if array.dtype.kind != "f":
        return array.tolist() if array.ndim == 1 or array.shape[-1] == 3 else array.sum(-1).tolist()
    places = np.random.default_rng(array.size).integers(0, array.size, values)
    return {"shape": list(array.shape), "values": [round(float(value), 6) for value in array.ravel()[places]]}


def kept(architecture: str) -> list[tuple[Conversation, Digest]]:
    """From the file: conversations, and what the published processor makes of them."""
    pairs = json.loads((KEPT / f"{architecture}.json").read_text("utf-8"))
    return [(conversation, made) for conversation, made in pairs]


def keep(architecture: str, folder: Path) -> None:
    """Write the file anew. folder: a checkpoint of make-tiny."""
    conversations = draw(architecture, random.Random(architecture), CONVERSATIONS)
    made = map(digest, processed(architecture, folder, conversations))
    lines = [json.dumps(pair, separators=(",", ":")) for pair in zip(conversations, made, strict=True)]
    (KEPT / f"{architecture}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    print(f"{architecture}: {len(list(chain.from_iterable(lines)))} bytes")


if __name__ == "__main__":
    from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

    KEPT.mkdir(exist_ok=True)
    for each in CLASSES:
        with tempfile.TemporaryDirectory() as place:
            make_tiny(each, Path(place) / "checkpoint", CheckpointOrder())
            folder = Path(place) / "checkpoint"
            keep(each, folder / "processor" if (folder / "processor").is_dir() else folder)
