"""The family of the drawing models, as data, and the default picture model: a package of its own, which has nothing but the model's files.
No torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from omnistage.models.family import Family, Mark, ModelEntry
from omnistage.models.reports import FetchError, ShowProgress

DIFFUSERS = Family(
    models={
        "diffusion": ModelEntry(
            "omnistage.models.diffusers.loading:load_pictures",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=("threads", "max_batch_size", "max_pixels", "enable_cache", "tensor_parallel_size"),
            options="omnistage.models.diffusers.options:DiffusersOptions",
            files=("model_index.json",),
        ),
    },
    needs=("torch", "diffusers", "transformers", "tokenizers", "safetensors", "PIL"),
    default="omnistage.models.diffusers.family:model_directory",
    marks=((Mark("model_index.json", "_class_name"),),),
)

PACKAGE = "omnistage_pictures"
FOLDER = "coloured-shapes"
"""The name of the folder, and of the model."""


def model_directory(cache: Path | None = None, progress: ShowProgress | None = None) -> Path:
    """The folder of the pipeline. Nothing is fetched or converted. Raises FetchError if the package is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FetchError(
            "the package omnistage-pictures is missing, which has the default picture model: `make setup` installs it, "
            "and so does pip install ./pictures in a checkout"
        )
    return Path(spec.submodule_search_locations[0]) / FOLDER
