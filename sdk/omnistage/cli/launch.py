"""`omnistage serve` and `omnistage stop`: their options. The work is in `serve` and `detached`, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli import config
from omnistage.cli.layout import DEFAULT_ADDRESS, DEFAULT_HTTP
from omnistage.cli.options import Verbose
from omnistage.cli.report import errors_reported

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="OMNISTAGE_SERVE_CONFIG",
        metavar="F.yaml",
        is_eager=True,
        callback=config.read,
        help="Settings from a YAML file, by the names of these options; variables, OMNISTAGE_SERVE_ADDRESS for --address, count more.",
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print all settings, set or not, as such a file, and where each is from."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the stack running when it serves; `omnistage stop` ends it.")]


def serve(
    context: typer.Context,
    pipeline: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PIPELINE",
            envvar="OMNISTAGE_SERVE_PIPELINE",
            show_envvar=False,
            help="Names or YAML files of pipelines, or checkpoints of which there is one each; default: what answers, and what draws.",
        ),
    ] = None,
    config_file: Config = None,
    print_config: PrintConfig = False,
    detach: Detach = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PIPELINE=]DIR", help="Folder of the model, or its name at a hub: OWNER/NAME[@REVISION]; default: the pipeline's own."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="[PIPELINE=]FILE[@PART][=SCALE]", help="A LoRA of a pipeline that draws, of safetensors. Repeatable."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STAGE=]DEV", help="cpu, cuda:0 ...; a bare DEV is for all stages. A STAGE may be PIPELINE/STAGE, here and below."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, float32 or bfloat16.")] = "auto",
    replicas: Annotated[list[str] | None, typer.Option(metavar="STAGE=N", help="Processes of a stage.")] = None,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to take HTTP, as OpenAI's clients speak it, with a page; a taken port: the next free one."
        ),
    ] = DEFAULT_HTTP,
    no_http: Annotated[bool, typer.Option("--no-http", help="Take no HTTP.")] = False,
    metrics_address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Prometheus metrics of the router alone.")] = "127.0.0.1:0",
    metrics: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Prometheus metrics of all processes on one page, such as 127.0.0.1:9464; default: none."),
    ] = "",
    otlp: Annotated[
        str, typer.Option(metavar="URL", help="OpenTelemetry collector for the spans of all processes, such as http://127.0.0.1:4317.")
    ] = "",
    threads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STAGE=]N", help="Compute threads of a process. A bare value is for the stages that have a use for it, here and below."
        ),
    ] = None,
    max_batch_size: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]N", help="Sequences in one step.")] = None,
    max_batch_tokens: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]N", help="Rows in one step, prompts included.")] = None,
    kv_cache_bytes: Annotated[list[str] | None, typer.Option(metavar="[STAGE=]BYTES", help="Memory for keys and values.")] = None,
    enable_cache: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]BOOL", help="Keep what prompts that begin alike have in common.")
    ] = None,
    tensor_parallel_size: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]N", help="Processes of a machine, a GPU each, that a model is spread over.")
    ] = None,
    gpu_memory_utilization: Annotated[
        list[str] | None, typer.Option(metavar="[STAGE=]PART", help="Part of a GPU's memory that may be filled.")
    ] = None,
    memory_share: Annotated[
        list[str] | None,
        typer.Option(metavar="[STAGE=]PART", help="Part of a device's memory for each process; default: equal for all that are on it."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(metavar="N", min=0, max=4096, help="Answers at once; 0: the servers' own limits.")] = 0,
    inline_limit: Annotated[int | None, typer.Option(metavar="BYTES", min=0, help="Tensors of fewer bytes travel in the message.")] = None,
    stall_limit: Annotated[float | None, typer.Option(metavar="SECONDS", help="Cancel clients that read nothing for so long.")] = None,
    client_share: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, metavar="PART", help="Most of the places for one host, and one client of a host; default: 0.75."),
    ] = None,
    grace: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Time for running answers to finish at the end.")] = 5.0,
    idle_limit: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="End by itself when nobody has asked anything for so long; 0: never.")
    ] = 0.0,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the servers' logs here.")] = None,
    verbose: Verbose = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    lifeline_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start a stack that stays: a router, and all stages of its pipelines.

    On this machine, until Ctrl-C; with --detach until `omnistage stop`.
    """
    config.check_variables(context)
    from omnistage.cli import serve as serving
    from omnistage.cli.layout import ServerOptions, by_stage, counts, flag
    from omnistage.cli.pipelines import Choice

    if no_http and config.counts_more(context, "http", "no_http"):
        no_http = context.params["no_http"] = False
    is_private = lifeline_fd >= 0  # The owner of a private stack asks over gRPC, and ends it: no gateway, no idle limit.
    try:
        checkpoints = config.by_pipeline(checkpoint or ())
        devices = by_stage(device or (), "--device")
        processes = counts(replicas or (), "--replicas")
        settings = {
            name: by_stage(words, flag(name))
            for name, words in (
                ("threads", threads),
                ("max_batch_size", max_batch_size),
                ("max_batch_tokens", max_batch_tokens),
                ("kv_cache_bytes", kv_cache_bytes),
                ("enable_cache", enable_cache),
                ("tensor_parallel_size", tensor_parallel_size),
                ("gpu_memory_utilization", gpu_memory_utilization),
                ("memory_share", memory_share),
            )
            if words
        }
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    servers = ServerOptions(
        address=address,
        http="" if no_http or is_private else http,
        metrics_address=metrics_address,
        metrics=metrics,
        otlp=otlp,
        max_sessions=max_sessions,
        inline_limit=inline_limit,
        stall_limit_s=stall_limit,
        client_share=client_share,
        grace_s=grace,
        idle_limit_s=0.0 if is_private else idle_limit,
    )
    if print_config:
        print(config.settings_text(context))
        raise typer.Exit
    choice = Choice(pipeline or (), checkpoints, devices, processes, dtype, settings, servers, loras=lora or ())
    with errors_reported(verbose):
        if detach:
            from omnistage.cli.detached import serve_detached

            serve_detached(choice, sys.argv[1:], log_dir)
        else:
            serving.serve(choice, log_dir, verbose, ready_fd, lifeline_fd)


def stop(
    address: Annotated[
        str | None, typer.Argument(metavar="HOST:PORT", help="Of the router, or its port; default: the only stack that there is.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All stacks of this user.")] = False,
    is_now: Annotated[bool, typer.Option("--now", help="Do not wait for answers that run.")] = False,
    verbose: Verbose = False,
) -> None:
    """End a stack that `omnistage serve` started.

    On this machine, by the same user; with --detach or in another terminal.
    """
    if every and address is not None:
        raise typer.BadParameter("--all is every stack; leave the address out")
    with errors_reported(verbose):
        from omnistage.cli.detached import stop as stop_stacks

        stop_stacks(address, every=every, is_now=is_now)
