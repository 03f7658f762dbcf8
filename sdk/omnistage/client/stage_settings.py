"""The settings of stages, as clients give them for a private stack. `python -m tools.options` makes this file."""

# No postponed annotations here, because the docstrings of methods are made from the descriptions in these annotations.
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from omnistage.client.about import About, Range


class StageOptions(TypedDict, total=False):
    """A keyword for each setting of a stage."""

    threads: Annotated[int | Mapping[str, int], About("Compute threads of a process.", "1", Range(1, 64))]
    """Compute threads of a process."""
    max_batch_size: Annotated[
        int | Mapping[str, int], About("Sequences in one step; other answers wait for a place in it.", "max_sessions", Range(1, 4096))
    ]
    """Sequences in one step; other answers wait for a place in it."""
    max_batch_tokens: Annotated[
        int | Mapping[str, int],
        About(
            "Rows in one step. With fewer rows, a prompt that is read holds other answers up less; with more, it is read in fewer steps.",
            "the model's",
            Range(1, 1048576),
        ),
    ]
    """Rows in one step. With fewer rows, a prompt that is read holds other answers up less; with more, it is read in fewer steps."""
    kv_cache_bytes: Annotated[
        int | Mapping[str, int], About("Memory for keys and values, at least one whole context.", "the model's", Range(1))
    ]
    """Memory for keys and values, at least one whole context."""
    enable_cache: Annotated[
        bool | Mapping[str, bool],
        About(
            "Keep computed results for later prompts with the same beginning.",
            "True",
        ),
    ]
    """Keep computed results for later prompts with the same beginning."""
    max_pixels: Annotated[
        int | Mapping[str, int],
        About(
            "Pixels of the largest picture that may be drawn, or of the largest frame of a film.",
            "four times those of the model's own size",
            Range(1, 268435456),
        ),
    ]
    """Pixels of the largest picture that may be drawn, or of the largest frame of a film."""
    gpu_memory_utilization: Annotated[
        float | Mapping[str, float],
        About("Part of a GPU's memory that may be filled; has no effect on a CPU.", "the model's", Range(0, 1, is_above=True)),
    ]
    """Part of a GPU's memory that may be filled; has no effect on a CPU."""
    memory_share: Annotated[
        float | Mapping[str, float],
        About(
            "Part of a device's memory that a process may count on, if several processes that take all free memory share the device.",
            "equal parts",
            Range(0, 1, is_above=True),
        ),
    ]
    """Part of a device's memory that a process may count on, if several processes that take all free memory share the device."""


TENSOR_PARALLEL_SIZE: Any = Annotated[
    int | Mapping[str, int],
    About("Number of ranks over which a model is spread: processes of this machine, each with a GPU.", "1", Range(1, 64)),
]
"""The setting that is a parameter of `Omni` itself."""
