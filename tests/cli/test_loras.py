"""`serve --lora`: whose a file is, and what is refused before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.command import omnistage
from helpers.drawings import checkpoint
from omnistage.cli.stack.layout import Layout
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.settings import with_loras
from omnistage.client.errors import BadRequestError, StackError
from omnistage.client.private_stack import StackPlan
from omnistage.host.settings import read_settings
from omnistage.models.options import LoadOptions
from omnistage.stage.settings import StageSettings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "style.safetensors"
    path.touch()
    return path


def option(layout: Layout, at: int = 0) -> object:
    """The option that the stage of one pipeline is started with, as the stage reads it."""
    words = layout.stage_arguments(layout.pipelines[at].stages[0], ["127.0.0.1:1"])
    return LoadOptions.of(read_settings(StageSettings, words, "stage")).family.get("lora")


def test_files_and_scales_are_options_of_the_stage_that_draws(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    strange = file.with_name("a=1.safetensors")
    strange.touch()
    choice = Choice(checkpoints={"": str(checkpoint("z-image"))}, loras=[f"{file.name}=0.5", strange.name, f"{strange.name}=-2"])
    assert option(layout_of(choice)) == f"{file}=0.5,{strange},{strange}=-2"
    assert option(layout_of(Choice(checkpoints=choice.checkpoints))) is None


def test_of_several_pipelines_the_one_that_draws_has_it_or_the_one_that_is_named(file: Path, tmp_path: Path) -> None:
    files = []
    for name, family, kind in (("one", "toy", "thinker"), ("two", "toy-film", "diffusion"), ("three", "toy-film", "diffusion")):
        files.append(str(tmp_path / f"{name}.yaml"))
        gives = "image" if kind == "diffusion" else "text"
        said = f"name: {name}\ndescription: x\ninputs: [text]\noutputs: [{gives}]\nstages: [{{kind: {kind}, family: {family}}}]\n"
        Path(files[-1]).write_text(said)
    for word in (str(file), f"two={file}"):
        assert option(with_loras(layout_of(Choice(files[:2])), [word]), 1) == str(file)
        with pytest.raises(StackError, match=r"unknown options \['lora'\] of the toy models"):
            layout_of(Choice(files[:2], loras=[word]))
    with pytest.raises(BadRequestError, match=re.escape(f"is for one pipeline of two, three: give two={file}")):
        layout_of(Choice(files, loras=[str(file)]))
    for choice in (Choice(files, loras=[f"one={file}"]), Choice(files[:1], loras=[str(file)])):
        with pytest.raises(BadRequestError, match="one does not draw"):
            layout_of(choice)


@pytest.mark.parametrize("word", ["none.safetensors", "none.safetensors=0.5", "z=none.safetensors", "=0.5", ""])
def test_a_file_that_is_not_there_is_told_before_anything_is_started(word: str) -> None:
    with pytest.raises(BadRequestError, match="there is no such file; give"):
        layout_of(Choice(checkpoints={"": str(checkpoint("z-image"))}, loras=[word]))


def test_a_name_with_a_comma_is_refused(file: Path) -> None:
    path = file.rename(file.with_name("a,b.safetensors"))
    with pytest.raises(BadRequestError, match="without one"):
        layout_of(Choice(checkpoints={"": str(checkpoint("z-image"))}, loras=[str(path)]))


def test_a_file_of_settings_has_several(file: Path, tmp_path: Path) -> None:
    settings = tmp_path / "stack.yaml"
    settings.write_text(f"lora: [{file}, {file}=0.5]\n")
    assert f"lora: [{file}, {file}=0.5]  # the file" in omnistage("serve", "--config", settings, "--print-config").stdout


def test_a_private_stack_is_told_its_files_as_the_command_is() -> None:
    files = ["a.safetensors=0.5", "b.safetensors"]
    for lora, words in ((files[0], files[:1]), (files, files)):
        command = StackPlan({"lora": lora}).command(3, 4)
        assert [command[at + 1] for at, word in enumerate(command) if word == "--lora"] == words
    with pytest.raises(BadRequestError, match="lora: is 3; it must be text, or a list of texts"):
        StackPlan({"lora": 3})  # type: ignore[typeddict-item]
