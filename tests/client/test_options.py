"""The descriptions of options and settings agree with the documents, the contract and the servers, and `help` shows them."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from omnistage.client import AsyncOmni, BadRequestError, Omni, options, private_stack
from omnistage.client import request as requests
from omnistage.client.about import About, Keyword, Range, keywords
from omnistage.client.files import ENCODINGS
from omnistage.client.options import SETTINGS
from omnistage.diffusion import stage as diffusion
from omnistage.models.interface import Profile
from omnistage.router.settings import RouterSettings
from omnistage.stage.params import check_params
from omnistage.stage.settings import StageSettings
from omnistage.talker import stage as talker
from omnistage.thinker import stage as thinker
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.errors import StageError

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {keyword.name: keyword for keyword in keywords(options.OPTIONS)}
RANGES = {name: keyword.about.allowed for name, keyword in OPTIONS.items() if isinstance(keyword.about.allowed, Range)}

MESSAGES: Mapping[Any, tuple[str, ...]] = {
    omni_pb2.GenerateRequest.DESCRIPTOR: options.TOP,
    stage_pb2.Sampling.DESCRIPTOR: options.SAMPLING,
    stage_pb2.ThinkerParams.DESCRIPTOR: options.THINKER,
    stage_pb2.Constraint.DESCRIPTOR: options.CONSTRAINTS,
    stage_pb2.TalkerParams.DESCRIPTOR: options.TALKER,
    stage_pb2.Code2WavParams.DESCRIPTOR: options.CODE2WAV,
    stage_pb2.DiffusionParams.DESCRIPTOR: options.DIFFUSION,
    stage_pb2.Media.DESCRIPTOR: options.MEDIA,
}
"""Where the contract has each option."""

NO_OPTIONS = {
    "GenerateRequest": {"thinker", "talker", "code2wav", "diffusion", "resume", "revisions", "batches"},
    "Sampling": {"logit_bias"},
    "ThinkerParams": {"messages", "sampling", "verbatim", "constraint"},
    "Constraint": set[str](),
    "TalkerParams": {"sampling", "plain"},
    "Code2WavParams": {"voice"},
    "DiffusionParams": {"prompt", "images"},
    "Media": {"data", "media_type", "use_audio"},
}
"""Fields that are filled otherwise, or that this client does not have."""


def test_the_documents_have_each_option_and_setting_once_and_no_other() -> None:
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted((one.name, one.type_text) for one in (*keywords(options.OPTIONS), *keywords(SETTINGS)))


@pytest.mark.parametrize("descriptor", MESSAGES, ids=lambda one: one.name)
def test_each_field_of_the_contract_is_an_option_and_each_option_a_field(descriptor: Any) -> None:
    fields = {options.ABOUT[name].name or name for name in MESSAGES[descriptor]}
    assert fields | NO_OPTIONS[descriptor.name] == set(descriptor.fields_by_name)
    assert not fields & NO_OPTIONS[descriptor.name]


def test_words_of_the_contract_are_those_that_programs_know() -> None:
    assert OPTIONS["profile"].about.allowed == tuple(Profile)
    assert OPTIONS["encoding"].about.allowed == ENCODINGS


def test_the_number_formats_of_the_settings_are_those_of_a_stage() -> None:
    assert keyword(SETTINGS, "dtype").about.allowed == get_args(StageSettings.model_fields["dtype"].annotation)


def keyword(annotations: Mapping[str, Any], name: str) -> Keyword:
    return next(one for one in keywords(annotations) if one.name == name)


def parsed(name: str, value: float) -> object:
    """The value of an option as the server of a stage reads it; raises StageError if the server refuses it."""
    given: Any = {name: value, **({"max_tokens": 32768} if name != "max_tokens" else {})}
    if name in options.DIFFUSION:
        del given["max_tokens"]
        request, kind = requests.for_drawing("a kite", (), given).complete(), "diffusion"
    else:
        request = requests.for_prompt("a kite", (), (), (), given).complete()
        kind = "talker" if name in options.TALKER else "thinker"
    params = getattr(request, kind)
    check_params(stage_pb2.StageParams(**{kind: params}), kind)
    return {"diffusion": diffusion, "talker": talker, "thinker": thinker}[kind].parse(params, 1)


def ends() -> Iterator[tuple[str, float, bool]]:
    """Values at the ends of all ranges of numbers that a stage checks, and just beyond, and whether they are allowed."""
    for name, allowed in RANGES.items():
        if name in (*options.EVERY_CALL, "top_k"):
            continue
        assert allowed.high is not None
        step = 1.0 if OPTIONS[name].type_text == "int" else 2**-10
        low, high = (type(step)(end) for end in (allowed.low, allowed.high))
        whole = int if step == 1.0 else float
        yield name, whole(low), not allowed.is_above
        yield name, whole(low + step), True
        yield name, whole(high), not allowed.is_below
        yield name, whole(high - step), True
        yield name, whole(high + step), False
        if low - step >= 0 or whole is float:
            yield name, whole(low - step), False


@pytest.mark.parametrize(("name", "value", "is_allowed"), list(ends()))
def test_a_server_takes_what_is_allowed_and_refuses_what_is_not(name: str, value: float, is_allowed: bool) -> None:
    if is_allowed:
        parsed(name, value)
    else:
        with pytest.raises((StageError, BadRequestError), match=f"{name}|{options.ABOUT[name].name}") as told:
            parsed(name, value)
        for low, high in re.findall(r"from (-?[\d.]+) to (-?[\d.]+)", str(told.value)):
            assert (float(low), float(high)) == (RANGES[name].low, RANGES[name].high)


def test_the_client_checks_what_no_server_does() -> None:
    for name, value in (("seed", -1), ("seed", 2**64), ("top_k", -1), ("timeout_s", 0)):
        assert name in RANGES
        with pytest.raises(BadRequestError, match=name):
            requests.time_limit_s({name: value}) if name == "timeout_s" else parsed(name, value)  # type: ignore[misc]
    assert OPTIONS["timeout_s"].about.default == f"{options.DEFAULT_TIMEOUT_S:g}"


def test_settings_are_those_of_the_servers() -> None:
    for one in keywords(SETTINGS):
        servers = RouterSettings if one.name == "max_sessions" else StageSettings
        field = servers.model_fields.get(one.name)
        if field is None:
            assert one.name in ("pipeline", "replicas", "lora", "start_timeout_s")
            continue
        bounds = {name: getattr(limit, name) for limit in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)}
        if isinstance(one.about.allowed, Range):
            least, most = bounds.get("gt", bounds.get("ge", 0)), bounds.get("le")
            assert one.about.allowed.high == most, one.name
            leaves_it_to_the_model = field.default == 0
            assert one.about.allowed.low == (least + (one.type_text.startswith("int")) if leaves_it_to_the_model else least), one.name
        if (
            one.about.default not in ("the model's", "max_sessions", "equal parts", "four times those of the model's own size")
            and one.name != "enable_cache"
        ):
            assert one.about.default == str(field.default), one.name
    assert keyword(SETTINGS, "start_timeout_s").about.default == f"{private_stack.START_TIMEOUT_S:g}"


def test_the_client_takes_each_setting() -> None:
    for client in (Omni, AsyncOmni):
        own = set(inspect.signature(client).parameters) - {"settings", "to_start"}
        assert own - set(SETTINGS) == {"address", "api_key", "model_path", "connect_timeout_s", "resume_timeout_s", "max_retries"}
        assert set(SETTINGS) - own == set(private_stack.StackSettings.__annotations__)


def shown(documented: Callable[..., object]) -> str:
    return pydoc.plain(pydoc.render_doc(documented))


@pytest.mark.parametrize("client", [Omni, AsyncOmni])
def test_help_shows_all_that_a_call_takes(client: type[Omni] | type[AsyncOmni]) -> None:
    takes = dict.fromkeys(("generate", "chat"), tuple(options.OPTIONS)) | dict.fromkeys(("draw", "film", "sound"), options.DRAWING)
    takes["say"] = options.SPEECH
    for name, expected in takes.items():
        for method in (name, "stream" if name == "generate" else f"stream_{name}"):
            text = shown(getattr(client, method))
            listed = re.findall(r"^ {8}(\w+) \((.*); default: (.*)\)\n {12}(.*)$", text, re.MULTILINE)
            assert [row[0] for row in listed] == [each for each in options.OPTIONS if each in expected], method
            assert all(row[3] == OPTIONS[row[0]].about.meaning for row in listed)
    text = shown(client)
    assert all(one.about.meaning in text for one in keywords(SETTINGS))


def test_a_range_is_told_in_words() -> None:
    words = [str(each) for each in (Range(0, 2), Range(0, 1, is_above=True), Range(0, 1, is_below=True), Range(0), Range(0, is_above=True))]
    assert words == ["0 to 2", "above 0, at most 1", "from 0, below 1", "from 0", "above 0"]
    assert About("x", "y", ("a", "b")).allowed_text == "a, b"
