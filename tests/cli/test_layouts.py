"""Settings of serve, and layouts of stacks before anything is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from helpers import lengths
from helpers.command import omnistage
from helpers.drawings import checkpoint
from helpers.output import refusal
from omnistage.cli.main import app
from omnistage.cli.stack import resources
from omnistage.cli.stack.launch import OF_THE_CALL, UNSET
from omnistage.cli.stack.layout import Layout, PipelineLayout, StageLayout
from omnistage.cli.stack.pipelines import Choice, layout_of, share_devices
from omnistage.cli.stack.settings import with_loras
from omnistage.cli.wording import SHELL
from omnistage.client.errors import BadRequestError, RequestError, StackError
from omnistage.client.private_stack import StackPlan
from omnistage.client.routers import KEY_VARIABLE as KEY_VARIABLE
from omnistage.host.settings import ServerSettings, read_settings
from omnistage.host.token import FILE_VARIABLE, make_file, new_token, read_token
from omnistage.models import registry
from omnistage.models.family import Family, ModelEntry
from omnistage.models.options import LoadOptions
from omnistage.models.registry import FAMILIES
from omnistage.stage.settings import StageSettings
from omnistage.wire.token import GATEWAY_VARIABLE, VARIABLE

# Settings


STACK = """
pipeline: toy
replicas: {talker: 2, thinker: 1}
threads: 2
enable-cache: true
grace: 4
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of the user who runs the tests."""
    for name in os.environ:
        if name.startswith("OMNISTAGE_SERVE"):
            monkeypatch.delenv(name)


def serve(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return omnistage("serve", *words, variables=variables)


def error_of(*words: str, **variables: str) -> str:
    """The message for a command line that means nothing, without breaks of lines."""
    return " ".join(" ".join(refusal("serve", *words, code=2, variables=variables)).split())


def printed(*words: str, **variables: str) -> dict[str, object]:
    done = serve(*words, "--print-config", **variables)
    assert done.returncode == 0, done.stderr
    settings: dict[str, object] = yaml.safe_load(done.stdout)
    return settings


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return path


def test_a_variable_counts_more_than_the_file_and_the_command_line_more_than_both(stack: Path) -> None:
    file = ("--config", str(stack))
    assert printed()["grace"] == 5.0
    assert printed(*file)["grace"] == 4.0 and printed(*file, OMNISTAGE_SERVE_GRACE="3")["grace"] == 3.0
    assert printed(*file, "--grace", "2", OMNISTAGE_SERVE_GRACE="3")["grace"] == 2.0
    assert printed(OMNISTAGE_SERVE_GRACE="3")["grace"] == 3.0


def test_http_is_left_out_by_whatever_counts_more(tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text("http: 127.0.0.1:8001\nno_http: true\n")
    assert printed()["no_http"] is False
    assert printed("--config", str(file))["no_http"] is True
    assert printed(OMNISTAGE_SERVE_NO_HTTP="true")["no_http"] is True
    assert printed("--config", str(file), OMNISTAGE_SERVE_HTTP="127.0.0.1:8002")["no_http"] is False
    told = printed("--http", "127.0.0.1:8003", OMNISTAGE_SERVE_NO_HTTP="true")
    assert (told["http"], told["no_http"]) == ("127.0.0.1:8003", False)
    assert printed("--http", "127.0.0.1:8003", "--no-http")["no_http"] is True


def test_values_by_stage_are_one_setting(stack: Path) -> None:
    file = ("--config", str(stack))
    assert printed(*file)["replicas"] == {"talker": 2, "thinker": 1}
    assert printed(*file, OMNISTAGE_SERVE_REPLICAS="talker=3 code2wav=2")["replicas"] == {"talker": 3, "code2wav": 2}
    assert printed(*file, "--replicas", "talker=4")["replicas"] == {"talker": 4}


def test_the_pipeline_is_a_setting_like_any_other(stack: Path) -> None:
    assert printed("--config", str(stack))["pipeline"] == "toy"
    assert printed("--config", str(stack), OMNISTAGE_SERVE_PIPELINE="toy-omni")["pipeline"] == "toy-omni"
    assert printed("toy-film", "--config", str(stack), OMNISTAGE_SERVE_PIPELINE="toy-omni")["pipeline"] == "toy-film"


def test_a_path_of_a_variable_may_have_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    assert printed(OMNISTAGE_SERVE_CHECKPOINT=str(folder))["checkpoint"] == str(folder)
    assert printed(OMNISTAGE_SERVE_CHECKPOINT=f"toy={folder}")["checkpoint"] == {"toy": str(folder)}
    assert printed(OMNISTAGE_SERVE_PIPELINE=f"'{folder}' toy")["pipeline"] == [str(folder), "toy"]


@pytest.mark.parametrize("text", ["pipeline: [toy, null]", "device: {thinker: null}", "checkpoint: [null]"])
def test_nothing_is_no_value_among_others(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    assert "has an empty value among others; leave it out" in error_of("--config", str(tmp_path / "f.yaml"), "--print-config")


def test_what_is_printed_is_such_a_file(stack: Path, tmp_path: Path) -> None:
    done = serve("--config", str(stack), "--device", "cpu", "--print-config", OMNISTAGE_SERVE_MAX_SESSIONS="7")
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert printed("--config", str(again)) == yaml.safe_load(done.stdout)
    origins = dict(line.partition(":")[::2] for line in done.stdout.splitlines() if not line.startswith("#"))
    places = {"pipeline": "the file", "max_sessions": "OMNISTAGE_SERVE_MAX_SESSIONS", "device": "command line", "dtype": "default"}
    assert {name: origins[name].rpartition("# ")[2] for name in places} == places


def test_what_is_unset_is_printed_with_what_holds_then() -> None:
    done = serve("--print-config")
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert set(yaml.safe_load(done.stdout)) == {option.name for option in command.params} - OF_THE_CALL
    defaults = ["replicas: null  # default: one of each stage", "max_batch_size: null  # default: the servers' own"]
    assert {*defaults} <= {*done.stdout.splitlines()} and set(UNSET) <= set(yaml.safe_load(done.stdout))


def test_the_file_may_be_named_by_a_variable(stack: Path) -> None:
    assert printed(OMNISTAGE_SERVE_CONFIG=str(stack))["threads"] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("adress: x", "there is no setting 'adress'; did you mean address?"),
        ("detach: true", "there is no setting 'detach'"),
        ("a: [", "this is no YAML: line 1: "),
        ("- toy", "give settings, one a line"),
        ("grace: {talker: 1}", "grace takes one value, not {'talker': 1}"),
        ("replicas: {talker: [1]}", "replicas takes one value, not [1]"),
        ("grace: soon", "Invalid value for '--grace': is 'soon'; it must be a number (from the file)"),
        ("max_sessions: -1", "Invalid value for '--max-sessions'"),
        ("replicas: 2", "--replicas 2: expected [PIPELINE/]STAGE=N"),
    ],
)
def test_a_file_that_cannot_be_is_told_in_words(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(text)
    error = error_of("toy", "--config", str(path))
    assert told in error and "Traceback" not in error


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    assert "none.yaml: No such file or directory" in error_of("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00bad")
    assert error_of("--config", str(tmp_path / "bytes.yaml"))


def test_a_variable_that_means_nothing_or_has_an_error_is_told_by_its_name() -> None:
    message = "OMNISTAGE_SERVE_ADRESS: there is no such setting; did you mean OMNISTAGE_SERVE_ADDRESS?"
    assert message in error_of("toy", "--print-config", OMNISTAGE_SERVE_ADRESS="127.0.0.1:1")
    assert "(from OMNISTAGE_SERVE_GRACE)" in error_of("toy", "--print-config", OMNISTAGE_SERVE_GRACE="soon")
    assert "from" not in error_of("toy", "--grace", "soon")


def test_what_serve_would_refuse_is_not_printed(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("replicas: {talkr: 2}")
    assert "--replicas talkr=2" in error_of("toy", "--config", str(tmp_path / "stack.yaml"), "--print-config")


def test_a_value_for_all_may_stand_beside_one_for_a_stage(tmp_path: Path) -> None:
    first = printed("toy", "--threads", "1", "--threads", "thinker=2", "--enable-cache", "true")
    assert (first["threads"], first["enable_cache"]) == ({"all": 1, "thinker": 2}, True)
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump(first))
    assert printed("--config", str(tmp_path / "stack.yaml")) == first
    (tmp_path / "words.yaml").write_text("replicas: [talker=2, thinker=1]")
    assert printed("--config", str(tmp_path / "words.yaml"))["replicas"] == {"talker": 2, "thinker": 1}


# Tokens


def test_a_new_token_is_one_that_a_server_reads_and_the_key_of_a_client_is_not_for_servers() -> None:
    found = resources.with_token({KEY_VARIABLE: "secret", "HOME": "/root"})
    assert set(found) == {"HOME", VARIABLE} and found["HOME"] == "/root" and read_token("", found) is not None
    given = {VARIABLE: new_token().secret}
    assert resources.with_token({**given, KEY_VARIABLE: "secret"}) == resources.with_token(given) == given


def test_a_gateway_has_its_own_token_and_not_that_of_the_stages(tmp_path: Path) -> None:
    token, file = new_token(), tmp_path / "token"
    assert make_file(file, token)
    expected = {"HOME": "/root", GATEWAY_VARIABLE: token.for_gateway().secret}
    foreign = {"HOME": "/root", f"{GATEWAY_VARIABLE}_FILE": "of another stack"}
    assert resources.gateway_environment({**foreign, VARIABLE: token.secret}) == expected
    assert resources.gateway_environment({**foreign, FILE_VARIABLE: str(file)}) == expected
    assert token.secret not in str(expected)


def test_a_token_file_that_a_server_would_read_gets_no_token_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    assert make_file(file, new_token())
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    found = resources.with_token({FILE_VARIABLE: str(file)})
    read = read_token(ServerSettings().token_file, found)
    assert read is not None and read.secret == file.read_text().strip()


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
        assert StackPlan({"lora": lora}).order["loras"] == words
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
