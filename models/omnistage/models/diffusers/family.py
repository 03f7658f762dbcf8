"""The family of the drawing models, as data. No torch."""

from __future__ import annotations

from omnistage.models.family import Family, Mark, ModelEntry

DIFFUSERS = Family(
    models={
        "diffusion": ModelEntry(
            "omnistage.models.diffusers.loading:load_pictures",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=("threads", "max_batch_size", "enable_cache", "tensor_parallel_size"),
            options="omnistage.models.diffusers.options:DiffusersOptions",
            files=("model_index.json",),
        ),
    },
    needs=("torch", "diffusers", "transformers", "tokenizers", "safetensors", "PIL"),
    default="omnistage.models.diffusers.store:model_directory",
    marks=((Mark("model_index.json", "_class_name"),),),
)
