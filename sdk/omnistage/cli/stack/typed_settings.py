"""The settings of stages, as options of `omnistage serve`. `python -m tools.options` makes this file."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

STAGE_SETTINGS: Mapping[str, Any] = {
    "threads": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]N", help="Compute threads of a process."),
    ],
    "max_batch_size": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]N", help="Sequences in one step."),
    ],
    "max_batch_tokens": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]N", help="Rows in one step."),
    ],
    "kv_cache_bytes": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]BYTES", help="Memory for keys and values, at least one whole context."),
    ],
    "enable_cache": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]BOOL", help="Keep computed results for later prompts with the same beginning."),
    ],
    "max_pixels": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]N", help="Pixels of the largest picture that may be drawn, or of the largest frame of a film."),
    ],
    "tensor_parallel_size": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]N", help="Number of ranks over which a model is spread: processes of this machine, each with a GPU."),
    ],
    "gpu_memory_utilization": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]PART", help="Part of a GPU's memory that may be filled."),
    ],
    "memory_share": Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]PART", help="Part of a device's memory that a process may count on."),
    ],
}
"""Typer's annotation of each setting, by its name."""

SERVER_SETTINGS: Mapping[str, Any] = {
    "inline_limit": Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Tensors below this many bytes travel in the message; default: 65536.",
            min=0,
        ),
    ],
    "stall_limit": Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds that a client may leave its answer unread; default: 10.0.",
            min=0,
        ),
    ],
    "client_share": Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="Greatest part of the places that one host may hold; also one client of a host, told by its x-api-key; default: 0.75.",
            min=0,
            max=1,
        ),
    ],
}
"""The settings of the router and of all stages, by name."""
