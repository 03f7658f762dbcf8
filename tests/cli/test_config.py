"""`omnistage serve --config`: file < variable < command line, and what --print-config says of it; and the token in the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import typer.main
import yaml

from helpers.command import omnistage
from helpers.output import refusal
from omnistage.cli.main import app
from omnistage.cli.stack import resources
from omnistage.cli.stack.launch import OF_THE_CALL, UNSET
from omnistage.client.routers import KEY_VARIABLE as KEY_VARIABLE
from omnistage.host.settings import ServerSettings
from omnistage.host.token import FILE_VARIABLE, make_file, new_token, read_token
from omnistage.wire.token import GATEWAY_VARIABLE, VARIABLE

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
    """What a command line that means nothing is told, without breaks of lines."""
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
    assert printed(*file)["grace"] == 4.0
    assert printed(*file, OMNISTAGE_SERVE_GRACE="3")["grace"] == 3.0
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
    assert {*defaults} <= {*done.stdout.splitlines()}
    assert set(UNSET) <= set(yaml.safe_load(done.stdout))


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


def test_a_variable_that_means_nothing_is_told() -> None:
    message = "OMNISTAGE_SERVE_ADRESS: there is no such setting; did you mean OMNISTAGE_SERVE_ADDRESS?"
    assert message in error_of("toy", "--print-config", OMNISTAGE_SERVE_ADRESS="127.0.0.1:1")


def test_an_error_of_a_variable_names_it() -> None:
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
