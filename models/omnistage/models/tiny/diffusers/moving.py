"""Makes checkpoints of the pipelines of films and sounds with random weights, in the published files."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from omnistage.models.diffusers.folder import quiet
from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.diffusers.checkpoint import check_tokenizer, fill
from omnistage.models.tiny.diffusers.moving_sizes import MOVING_DESIGNS, MovingDesign, PipelinePart
from omnistage.models.tiny.diffusers.t5 import write_t5
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.makers import CheckpointOrder

MULTIPLE = 64
"""The number of rows of an embedding is a multiple of this, so some rows belong to no token."""


def make(name: str, directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder with the checkpoint of one of MOVING_DESIGNS. Raises MakeError."""
    check_tokenizer(name, order)
    design, dtype = MOVING_DESIGNS[name], getattr(torch, order.dtype or "float32")
    progress("writing the tokenizer", 0.0)
    rows = -(-write_t5(directory / "tokenizer", design.tokens) // MULTIPLE) * MULTIPLE
    progress("writing the tokenizer", 1.0)
    with quiet():
        for index, (part, model) in enumerate(models := _models(design, order.size, rows)):
            fill(model, part, order.seed, dtype)
            if part == "text_encoder":
                model.tie_weights()  # Its embedding has two names, which are filled one after the other.
            model.save_pretrained(directory / part)
            progress("writing the weights", (index + 1) / len(models))
    scheduler_config = {"_class_name": design.scheduler, "_diffusers_version": diffusers.__version__, **design.schedule}
    (directory / "scheduler").mkdir()
    write_json(directory / "scheduler" / "scheduler_config.json", dict(sorted(scheduler_config.items())))
    write_json(directory / "model_index.json", _index(design))


wan_t2v = partial(make, "wan2.2-t2v")
wan_ti2v = partial(make, "wan2.2-ti2v")
wan_i2v = partial(make, "wan2.2-i2v")
stable_audio = partial(make, "stable-audio")


def _models(design: MovingDesign, size: str, rows: int) -> list[tuple[str, Any]]:
    """The parts that have weights, with their names, as models without memory. rows: how many the embedding of tokens has."""
    encoder: Any = getattr(transformers, design.encoder)
    with torch.device("meta"):
        return [
            ("text_encoder", encoder(encoder.config_class(**design.encoders[size], vocab_size=rows))),
            *((name, _kind(part)(**part.sizes[size], **part.values)) for name, part in design.parts.items()),
        ]


def _kind(part: PipelinePart) -> Any:
    library = part.library if part.library == "diffusers" else f"diffusers.pipelines.{part.library}"
    return getattr(importlib.import_module(library), part.kind)


def _index(design: MovingDesign) -> dict[str, Any]:
    """The contents of model_index.json: for each part the library that has its class, and the class."""
    components: dict[str, Any] = {part: [model.library, model.kind] for part, model in design.parts.items()}
    components |= {
        "scheduler": ["diffusers", design.scheduler],
        "text_encoder": ["transformers", design.encoder],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        **{part: [None, None] for part in design.nothing},
        **design.values,
    }
    return {"_class_name": design.pipeline, "_diffusers_version": diffusers.__version__} | dict(sorted(components.items()))
