"""A program that makes of conversations what the published processor of a family of omni models makes of them.

    python published_processor.py CLASS FOLDER CONVERSATIONS OUT

CLASS: the processor's class in Transformers. FOLDER: a folder in the published layout. CONVERSATIONS: a file of JSON, with the list of
Conversations of `saved_processor`, whose media have a `seed` each. OUT: gets the arrays as NPZ, each named NUMBER/NAME. Imports nothing of
omnistage. It needs torchvision, which `helpers.published` installs apart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers import media_files
from helpers.saved_processor import Conversation, inputs, without_compiled_torchvision

FPS = 2.0
RATE_HZ = 16_000


def main(class_name: str, folder: Path, conversations: Path, out: Path) -> None:
    import transformers

    processor = getattr(transformers, class_name).from_pretrained(folder)
    arrays = dict[str, NDArray[Any]]()
    for number, conversation in enumerate(json.loads(conversations.read_text("utf-8"))):
        arrays |= {f"{number}/{name}": array for name, array in processed(processor, conversation).items()}
    np.savez(out, **arrays)  # type: ignore[arg-type]


def processed(processor: Any, conversation: Conversation) -> dict[str, NDArray[Any]]:
    """All that the processor gives the model, without the silence behind each sound."""
    made = inputs(processor, conversation, medium, videos_kwargs={"fps": FPS}, return_tensors="np")
    if "input_features" in made:
        frames = made["feature_attention_mask"].sum(-1)
        made["input_features"] = made["input_features"][:, :, : frames.max()]
        made["feature_attention_mask"] = made["feature_attention_mask"][:, : frames.max()]
    return {name: np.asarray(array) for name, array in made.items()}


def medium(part: dict[str, Any], kind: str) -> NDArray[Any]:
    """The pixels or samples of a part, by its seed. kind: image: [height, width, 3]; video: [frames, height, width, 3]; sound or audio:
    [samples]."""
    seed = part["seed"]
    if kind == "image":
        return media_files.pixels(seed, *part[kind])
    if kind == "video":
        count, height, width = part[kind]
        return np.stack([media_files.pixels(seed + number, height, width) for number in range(count)])
    return media_files.samples(seed, part[kind] / RATE_HZ, RATE_HZ)[:, 0]


if __name__ == "__main__":
    without_compiled_torchvision()
    main(sys.argv[1], *map(Path, sys.argv[2:]))
