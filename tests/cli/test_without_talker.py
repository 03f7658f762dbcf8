"""Checkpoints of both omni families that do not speak: they are served by their Thinker alone, by whatever name, and say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.wording import SHELL
from omnistage.client.errors import RequestError, StackError
from omnistage.models.registry import FAMILIES

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


def checkpoint(folder: Path, family: str, changes: Mapping[str, Any]) -> str:
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
    folder = checkpoint(tmp_path, family, changes)
    named = (Choice([name], {"": folder}) for name in (family, f"{family}-codes"))
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), *named):
        layout = layout_of(choice)
        (pipeline,) = layout.pipelines
        assert (pipeline.name, [stage.kind for stage in pipeline.stages]) == (f"{family}-text", ["thinker"])
        assert [note.partition(" has no talker")[0] for note in layout.notes if "has no" in note] == [folder]


@lengths.one_or_all("case", SILENT)
def test_sound_is_refused_with_the_reason(tmp_path: Path, case: str, seed: int) -> None:
    family, changes = SILENT[lengths.draw(case, SILENT, seed)]
    folder = checkpoint(tmp_path, family, changes)
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), Choice([family], {"": folder})):
        for outputs in (["text", "audio"], ["audio"]):  # As `say` asks.
            with pytest.raises(RequestError, match="has no Talker") as caught:
                layout_of(Choice(choice.pipelines, choice.checkpoints, outputs=outputs))
            assert ("outputs=['text']" if "text" in outputs else "") in caught.value.hint
            assert ("text" in caught.value.hint) == ("text" in outputs)
        assert layout_of(choice).pipelines


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_one_that_speaks_is_served_whole(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path, family, {})
    for choice in (Choice(checkpoints={"": folder}), Choice([family], {"": folder}), Choice(checkpoints={"": folder}, outputs=["audio"])):
        layout = layout_of(choice)
        assert [stage.kind for stage in layout.pipelines[0].stages] == ["thinker", "talker", "code2wav"]
        assert not layout.notes or "has no" not in " ".join(layout.notes)


@pytest.mark.parametrize("said", [{"enable_audio_output": "no"}, {"talker_config": [1]}], ids=str)
def test_what_is_no_switch_or_section_is_refused(tmp_path: Path, said: Mapping[str, Any]) -> None:
    folder = checkpoint(tmp_path, "qwen3_omni", said)
    for choice in (Choice(checkpoints={"": folder}), Choice([folder]), Choice(["qwen3_omni-text"], {"": folder})):
        with pytest.raises(StackError, match=next(iter(said))):
            layout_of(choice)


def test_a_file_that_names_a_talker_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    file = tmp_path / "own.yaml"
    file.write_text((Path(__file__).parents[2] / "deploy/pipelines/qwen3_omni.yaml").read_text().replace("name: qwen3_omni", "name: own"))
    with pytest.raises(StackError, match="has no talker and no code2wav, which own needs") as caught:
        layout_of(Choice([str(file)], {"": checkpoint(folder, "qwen3_omni", THINKING)}))
    assert "--pipeline" not in (hint := SHELL.hint(caught.value.advice)) and "omnistage serve NAME --checkpoint DIR" in hint
