"""Layouts of stacks, before anything is started: parts of a device, files of LoRA, and checkpoints that do not speak."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.drawings import checkpoint
from omnistage.cli.stack.layout import Layout, PipelineLayout, StageLayout
from omnistage.cli.stack.pipelines import Choice, layout_of, share_devices
from omnistage.cli.stack.settings import with_loras
from omnistage.cli.wording import SHELL
from omnistage.client.errors import BadRequestError, RequestError, StackError
from omnistage.client.private_stack import StackPlan
from omnistage.host.settings import read_settings
from omnistage.models import registry
from omnistage.models.family import Family, ModelEntry
from omnistage.models.options import LoadOptions
from omnistage.models.registry import FAMILIES
from omnistage.stage.settings import StageSettings

# Parts of the memory of a device


TAKER = ModelEntry("nowhere:Model", devices=("cpu", "cuda"), uses=("memory_share",))


@pytest.fixture(autouse=True)
def _takers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose Thinker and Talker take what they find free, and whose Code2Wav does not."""
    models = {"thinker": TAKER, "talker": TAKER, "code2wav": ModelEntry("nowhere:Model", devices=("cpu", "cuda"))}
    monkeypatch.setitem(registry.FAMILIES, "takers", Family(models))


def one(*stages: StageLayout) -> Layout:
    return Layout([PipelineLayout("takers", "takers", stages)])


def shares(*stages: StageLayout) -> dict[str, float]:
    """The share that a server of each stage reads from its command line."""
    layout = share_devices(one(*stages))
    told = layout.pipelines[0].stages
    options = {stage.kind: LoadOptions.of(read_settings(StageSettings, layout.stage_arguments(stage, ["a:1"]), "stage")) for stage in told}
    return {kind: each.memory_share for kind, each in options.items()}


def stage(kind: str, device: str = "cpu", replicas: int = 1, settings: Mapping[str, str] | None = None) -> StageLayout:
    return StageLayout(kind, "takers", device=device, replicas=replicas, settings=settings or {})


def given(part: float) -> dict[str, str]:
    return {"memory_share": str(part)}


TOO_MUCH = "--memory-share: 1 of the memory of cuda is given away, and 2 more are on it; all share 1: give less"


def test_one_that_is_alone_on_its_device_has_all_of_it() -> None:
    assert shares(stage("thinker"), stage("talker", "cuda"), stage("code2wav")) == {"thinker": 1, "talker": 1, "code2wav": 1}
    assert shares(stage("thinker", "cuda:1"), stage("talker", "cuda:0")) == {"thinker": 1, "talker": 1}


def test_replicas_and_stages_on_one_device_have_equal_parts() -> None:
    assert shares(stage("thinker", replicas=2)) == {"thinker": 0.5}
    on_cuda = (stage("thinker", "cuda"), stage("talker", "cuda:0"), stage("code2wav", "cuda:0"))
    assert shares(*on_cuda) == {"thinker": 0.5, "talker": 0.5, "code2wav": 1}
    assert shares(stage("thinker", "cuda:0", 2), stage("talker", "cuda:0")) == {"thinker": 0.333, "talker": 0.333}


def test_what_somebody_gives_stays_and_the_others_have_the_rest() -> None:
    assert shares(stage("thinker", settings=given(0.6)), stage("talker", replicas=2)) == {"thinker": 0.6, "talker": 0.2}
    assert shares(stage("thinker", settings=given(0.25))) == {"thinker": 0.25}
    assert shares(stage("thinker", replicas=2, settings=given(0.5))) == {"thinker": 0.5}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([stage("thinker", replicas=2, settings=given(0.6))], "--memory-share: 1.2 of the memory of cpu is given away; all share 1"),
        ([stage("thinker", "cuda:0", settings=given(1)), stage("talker", "cuda:0", 2)], TOO_MUCH),
    ],
)
def test_more_than_there_is_cannot_be_given(stages: list[StageLayout], told: str) -> None:
    with pytest.raises(StackError, match=re.escape(told)):
        share_devices(one(*stages))


def test_all_pipelines_of_a_stack_share_a_device_and_a_stage_of_two_counts_once() -> None:
    """Those that start later, too: what is theirs is left for them."""
    thinker, own = stage("thinker"), stage("thinker", settings={"threads": "2"})
    stages = {"spoken": [thinker, stage("talker", replicas=2)], "written": [thinker], "other": [own]}
    layout = share_devices(Layout([PipelineLayout(name, name, kinds) for name, kinds in stages.items()]))
    parts = [[each.settings["memory_share"] for each in pipeline.stages] for pipeline in layout.pipelines]
    assert parts == [["0.25", "0.25"], ["0.25"], ["0.25"]]
    assert [group.pipelines for group in layout.groups] == [("spoken", "written"), ("spoken",), ("other",)]


# Files of LoRA


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


# Checkpoints of the omni families that do not speak


THINKING: Mapping[str, Any] = {"enable_audio_output": False, "talker_config": None, "code2wav_config": None}
"""Changes of config.json: None takes a section out."""

SILENT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "as Thinking is": ("qwen3_omni", THINKING),
    "switched off": ("qwen3_omni", {"enable_audio_output": False}),
    "without a section": ("qwen3_omni", {"talker_config": None}),
    "with an empty one": ("qwen3_omni", {"talker_config": {}}),
    "without what makes sound of its codes": ("qwen3_omni", {"code2wav_config": None}),
    "Qwen2.5, without that": ("qwen2_5_omni", {"token2wav_config": None}),
    "Qwen2.5, switched off": ("qwen2_5_omni", {"enable_audio_output": False}),
    "Qwen2.5, its Talker switched off": ("qwen2_5_omni", {"enable_talker": False}),
}


def bare_checkpoint(folder: Path, family: str, changes: Mapping[str, Any]) -> str:
    """The parts of a checkpoint that a launcher reads; its stages would read more."""
    (mark,) = FAMILIES[family].marks[0]
    entries = FAMILIES[family].models.values()
    whole = {mark.key: mark.values[0], **{name: {"some": 1} for entry in entries for name in entry.sections}, **changes}
    for name in {name for entry in entries for name in entry.files}:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return str(folder)


@lengths.one_or_all("case", SILENT)
def test_it_is_served_by_its_thinker(tmp_path: Path, case: str, seed: int) -> None:
    family, changes = SILENT[lengths.draw(case, SILENT, seed)]
    folder = bare_checkpoint(tmp_path, family, changes)
    named = (Choice([name], {"": folder}) for name in (family, f"{family}-codes"))
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), *named):
        layout = layout_of(choice)
        (pipeline,) = layout.pipelines
        assert (pipeline.name, [stage.kind for stage in pipeline.stages]) == (f"{family}-text", ["thinker"])
        assert [note.partition(" has no talker")[0] for note in layout.notes if "has no" in note] == [folder]


@lengths.one_or_all("case", SILENT)
def test_sound_is_refused_with_the_reason(tmp_path: Path, case: str, seed: int) -> None:
    family, changes = SILENT[lengths.draw(case, SILENT, seed)]
    folder = bare_checkpoint(tmp_path, family, changes)
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), Choice([family], {"": folder})):
        for outputs in (["text", "audio"], ["audio"]):  # As `say` asks.
            with pytest.raises(RequestError, match="has no Talker") as caught:
                layout_of(Choice(choice.pipelines, choice.checkpoints, outputs=outputs))
            assert ("outputs=['text']" if "text" in outputs else "") in caught.value.hint
            assert ("text" in caught.value.hint) == ("text" in outputs)
        assert layout_of(choice).pipelines


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_one_that_speaks_is_served_whole(tmp_path: Path, family: str) -> None:
    folder = bare_checkpoint(tmp_path, family, {})
    for choice in (Choice(checkpoints={"": folder}), Choice([family], {"": folder}), Choice(checkpoints={"": folder}, outputs=["audio"])):
        layout = layout_of(choice)
        assert [stage.kind for stage in layout.pipelines[0].stages] == ["thinker", "talker", "code2wav"]
        assert not layout.notes or "has no" not in " ".join(layout.notes)


@pytest.mark.parametrize("said", [{"enable_audio_output": "no"}, {"talker_config": [1]}], ids=str)
def test_what_is_no_switch_or_section_is_refused(tmp_path: Path, said: Mapping[str, Any]) -> None:
    folder = bare_checkpoint(tmp_path, "qwen3_omni", said)
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), Choice(["qwen3_omni-text"], {"": folder})):
        with pytest.raises(StackError, match=next(iter(said))):
            layout_of(choice)


def test_a_file_that_names_a_talker_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    file = tmp_path / "own.yaml"
    file.write_text((Path(__file__).parents[2] / "deploy/pipelines/qwen3_omni.yaml").read_text().replace("name: qwen3_omni", "name: own"))
    with pytest.raises(StackError, match="has no talker and no code2wav, which own needs") as caught:
        layout_of(Choice([str(file)], {"": bare_checkpoint(folder, "qwen3_omni", THINKING)}))
    assert "--pipeline" not in (hint := SHELL.hint(caught.value.advice)) and "omnistage serve NAME --checkpoint DIR" in hint
