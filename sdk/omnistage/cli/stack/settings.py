"""Settings of the stages of a stack: typed LoRA files become an option of the stages that draw, and all settings are checked before any
process is started, and before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omnistage.cli.stack.layout import Layout, PipelineLayout
from omnistage.client.errors import BadRequestError, StackError
from omnistage.host.addresses import check_address, check_can_listen
from omnistage.host.errors import StartError
from omnistage.host.settings import read_settings
from omnistage.host.token import FILE_VARIABLE, read_token
from omnistage.models.options import LoadOptions
from omnistage.models.registry import check as check_model
from omnistage.models.reports import LoadError
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

LORA_OPTION = "--lora"
LORA_FORM = "give [PIPELINE=]FILE.safetensors[@PART][=SCALE]"


def with_loras(layout: Layout, words: Sequence[str]) -> Layout:
    """The layout with LoRA files added to its pipelines that draw. words: each is [PIPELINE=]FILE[@PART][=SCALE]. Raises BadRequestError
    for a file that is missing, or that no pipeline takes."""
    pipelines = list(layout.pipelines)
    for word in words:
        name, rest = _pipeline_of(word, pipelines)
        able = [index for index, one in enumerate(pipelines) if _draws(one) and name in ("", one.name)]
        if not able:
            raise BadRequestError.of(LORA_OPTION, f"{word}: {name or layout.names} does not draw; leave it out")
        if len(able) > 1:
            names = [pipelines[index].name for index in able]
            raise BadRequestError.of(LORA_OPTION, f"{word} is for one pipeline of {', '.join(names)}: give {names[0]}={word}")
        pipelines[able[0]] = _with_option(pipelines[able[0]], _check_word(rest))
    return replace(layout, pipelines=pipelines)


def _pipeline_of(word: str, pipelines: Sequence[PipelineLayout]) -> tuple[str, str]:
    """Returns (pipeline, rest) of a word; the pipeline is empty if the word names none. A word that is an existing file names none."""
    name, equals, rest = word.partition("=")
    has_pipeline = equals and not Path(word).is_file() and name in {one.name for one in pipelines}
    return (name, rest) if has_pipeline else ("", word)


def _check_word(word: str) -> str:
    """FILE[@PART][=SCALE] with the absolute path of the file. Raises BadRequestError if the file is missing, or has a comma in its path."""
    # The name of a file may have these signs too: an existing file is not split.
    name, equals, scale = word.rpartition("=") if "=" in word and not Path(word).is_file() else (word, "", "")
    path, at, part = name.rpartition("@") if "@" in name and not Path(name).is_file() else (name, "", "")
    if not Path(path).is_file():
        raise BadRequestError.of(LORA_OPTION, f"{path or word}: there is no such file; {LORA_FORM}")
    if "," in path:
        raise BadRequestError.of(LORA_OPTION, f"{path}: files stand with commas between them; give it a name without one")
    return f"{Path(path).absolute()}{at}{part}{equals}{scale}"


def _draws(pipeline: PipelineLayout) -> bool:
    return any(stage.kind == "diffusion" for stage in pipeline.stages)


def _with_option(pipeline: PipelineLayout, lora: str) -> PipelineLayout:
    """The pipeline with one more LoRA file, after those that its own file names."""
    stages = list(pipeline.stages)
    for index, stage in enumerate(stages):
        if stage.kind == "diffusion":
            files = filter(None, (str(stage.options.get("lora", "")), lora))
            stages[index] = replace(stage, options={**stage.options, "lora": ",".join(files)})
    return replace(pipeline, stages=stages)


PROGRAM = "omnistage serve"
UNKNOWN = "127.0.0.1:1"
"""Stands for the address of a stage, which is not chosen yet."""


def check(layout: Layout, *, of_models: bool = True) -> None:
    """Run the checks that the servers themselves make of their settings. of_models: run the models' checks too. Raises StackError with a
    text of one line."""
    servers = layout.servers
    try:
        for pipeline in layout.pipelines:
            if "," in pipeline.source:
                raise StartError(f"{pipeline.source}: a router takes several pipelines with commas between; rename the file")
        if unknown := sorted(set(servers.idle_unload_s) - {"", *(pipeline.name for pipeline in layout.pipelines)}):
            raise StartError(f"--idle-unload: there is no pipeline {unknown[0]}; there are {layout.names}")
        read_token(os.environ.get(FILE_VARIABLE, ""), os.environ)
        listening = {"--address": servers.address, "--metrics-address": servers.metrics_address}
        if servers.metrics:
            listening["--metrics"] = servers.metrics
        if servers.http and servers.http_may_move:
            check_can_listen(f"{servers.http.rpartition(':')[0]}:0", "--http")  # If its port is taken, the gateway takes the next.
        elif servers.http:
            listening["--http"] = servers.http
        for option, address in listening.items():
            _check_typed(option, address)
        for stage in (group.stage for group in layout.groups):
            settings = read_settings(StageSettings, layout.stage_arguments(stage, [UNKNOWN]), PROGRAM)
            if of_models:
                check_model(stage.family, stage.kind, LoadOptions.of(settings))
        stages = [(f"{pipeline.name}/{stage.kind}", UNKNOWN) for pipeline in layout.pipelines for stage in pipeline.stages]
        words = layout.router_arguments(stages)
        read_settings(RouterSettings, [*words, "--address", servers.address, "--metrics-address", servers.metrics_address], PROGRAM)
        _check_apart(listening)
        for option, address in listening.items():
            check_can_listen(address, option)
    except (StartError, LoadError) as error:
        raise StackError(str(error)) from None


def _check_apart(listening: Mapping[str, str]) -> None:
    """Raises StartError if two options have the same address. listening: by option, the address at which a server will listen."""
    option_by_address: dict[str, str] = {}
    for option, address in listening.items():
        first_option = option_by_address.setdefault(address, option)
        if first_option != option and not address.endswith(":0"):  # Port 0 is a free port for each.
            raise StartError(f"{option}: {address} is the {first_option} too; give each its own port")


def _check_typed(option: str, address: str) -> None:
    """Raises StartError for a text that is no address."""
    try:
        check_address(address)
    except ValueError as error:
        raise StartError(f"{option}: {error}") from None
