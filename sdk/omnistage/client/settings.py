"""The settings of a private stack."""

# No postponed annotations here, because the docstring of the client is made from the descriptions in these annotations.
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from omnistage.client.about import About, Range

MODEL = "the model's"


class StackSettings(TypedDict, total=False):
    """Settings of a private stack. An absent setting has the default of `omnistage serve`.

    A Mapping has values by stage, {"thinker": "cuda:0", "code2wav": "cpu"}, or by pipeline and stage, {"picture/diffusion": "cuda:0"},
    which take precedence. A bare value is for all stages that have a use for it. `help(Omni)` and docs/client.md explain each of them."""

    pipeline: Annotated[
        str | Sequence[str],
        About(
            "Name or YAML file of the pipeline. If there are several, the first starts at once, each other one when it is asked.",
            "that of the checkpoint, or smol and picture",
        ),
    ]
    device: Annotated[str | Mapping[str, str], About("Where a model computes: cpu, cuda:0 ...", "cpu")]
    dtype: Annotated[
        str,
        About(
            "Number format that a model computes in; auto: the model's choice for this machine.", "auto", ("auto", "float32", "bfloat16")
        ),
    ]
    threads: Annotated[int | Mapping[str, int], About("Compute threads of a process.", "1", Range(1, 64))]
    replicas: Annotated[Mapping[str, int], About('Processes by stage: {"talker": 2}.', "1 of each", Range(1, 64))]
    max_sessions: Annotated[int, About("Answers at once; further requests wait or are refused.", MODEL, Range(1, 4096))]
    max_batch_size: Annotated[
        int | Mapping[str, int], About("Sequences in one step; other answers wait for a place in it.", "max_sessions", Range(1, 4096))
    ]
    max_batch_tokens: Annotated[
        int | Mapping[str, int],
        About(
            "Rows in one step. With fewer rows, a prompt that is read holds other answers up less; with more, it is read in fewer steps.",
            MODEL,
            Range(1, 1 << 20),
        ),
    ]
    kv_cache_bytes: Annotated[int | Mapping[str, int], About("Memory for keys and values, at least one whole context.", MODEL, Range(1))]
    enable_cache: Annotated[bool | Mapping[str, bool], About("Keep computed results for later prompts with the same beginning.", "True")]
    gpu_memory_utilization: Annotated[
        float | Mapping[str, float],
        About("Part of a GPU's memory that may be filled; has no effect on a CPU.", MODEL, Range(0, 1, is_above=True)),
    ]
    memory_share: Annotated[
        float | Mapping[str, float],
        About(
            "Part of a device's memory that a process may count on, if several processes that take all free memory share the device.",
            "equal parts",
            Range(0, 1, is_above=True),
        ),
    ]
    lora: Annotated[
        str | Sequence[str],
        About("LoRA files (safetensors) of a pipeline that draws: FILE[@PART][=SCALE], after PIPELINE= if several draw.", "none"),
    ]
    inline_limit: Annotated[int, About("Tensors of fewer bytes travel in the message, others through shared memory.", "65536", Range(0))]
    start_timeout_s: Annotated[float, About("Time limit for download, load and start, seconds.", "900", Range(0, is_above=True))]


SETTINGS: Mapping[str, Any] = {
    **StackSettings.__annotations__,
    "tensor_parallel_size": Annotated[
        int | Mapping[str, int],
        About("Number of ranks over which a model is spread: processes of this machine, each with a GPU.", "1", Range(1, 64)),
    ],
}
"""All settings, each with its description; the last one is a parameter of `Omni` itself."""

OF_CLIENT = ("address", "api_key", "model_path", "connect_timeout_s", "resume_timeout_s", "max_retries")
"""Parameters that `Omni` takes in addition to the settings."""
