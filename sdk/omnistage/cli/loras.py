"""Turns typed LoRA files into an option of the stages that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omnistage.cli.layout import Layout, PipelineLayout
from omnistage.client.errors import BadRequestError

OPTION = "--lora"
FORM = "give [PIPELINE=]FILE.safetensors[@PART][=SCALE]"


def with_loras(layout: Layout, words: Sequence[str]) -> Layout:
    """The layout with LoRA files added to its pipelines that draw. words: each is [PIPELINE=]FILE[@PART][=SCALE]. Raises BadRequestError
    for a file that is missing, or that no pipeline takes."""
    pipelines = list(layout.pipelines)
    for word in words:
        name, rest = _pipeline_of(word, pipelines)
        able = [at for at, one in enumerate(pipelines) if _draws(one) and name in ("", one.name)]
        if not able:
            raise BadRequestError.of(OPTION, f"{word}: {name or layout.names} does not draw; leave it out")
        if len(able) > 1:
            names = [pipelines[at].name for at in able]
            raise BadRequestError.of(OPTION, f"{word} is for one pipeline of {', '.join(names)}: give {names[0]}={word}")
        pipelines[able[0]] = _with_option(pipelines[able[0]], _check_word(rest))
    return replace(layout, pipelines=pipelines)


def _pipeline_of(word: str, pipelines: Sequence[PipelineLayout]) -> tuple[str, str]:
    """Returns (pipeline, rest) of a word; the pipeline is empty if the word names none. A word that is an existing file names none."""
    name, equals, rest = word.partition("=")
    return (name, rest) if equals and not Path(word).is_file() and name in {one.name for one in pipelines} else ("", word)


def _check_word(word: str) -> str:
    """FILE[@PART][=SCALE] with the absolute path of the file. Raises BadRequestError if the file is missing, or has a comma in its path."""
    name, equals, scale = word.rpartition("=") if "=" in word and not Path(word).is_file() else (word, "", "")
    path, at, part = name.rpartition("@") if "@" in name and not Path(name).is_file() else (name, "", "")
    if not Path(path).is_file():
        raise BadRequestError.of(OPTION, f"{path or word}: there is no such file; {FORM}")
    if "," in path:
        raise BadRequestError.of(OPTION, f"{path}: files stand with commas between them; give it a name without one")
    return f"{Path(path).absolute()}{at}{part}{equals}{scale}"


def _draws(pipeline: PipelineLayout) -> bool:
    return any(stage.kind == "diffusion" for stage in pipeline.stages)


def _with_option(pipeline: PipelineLayout, lora: str) -> PipelineLayout:
    """The pipeline with one more LoRA file, after those that its own file names."""
    stages = [
        replace(stage, options={**stage.options, "lora": ",".join(filter(None, (str(stage.options.get("lora", "")), lora)))})
        if stage.kind == "diffusion"
        else stage
        for stage in pipeline.stages
    ]
    return replace(pipeline, stages=stages)
