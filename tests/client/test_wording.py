"""From a failed call to the exception that names it, and to the text in the words of the place where it is read: program, shell, HTTP."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from omnistage.cli.wording import CHAT, SHELL, word_error
from omnistage.client import connection, errors
from omnistage.client.connection import Found, advise
from omnistage.client.errors import DETAILS_KEY, FieldViolation, OmniError, from_rpc_error
from omnistage.client.routers import Routers
from omnistage.client.wording import PYTHON, Wording
from omnistage.gateway.chat import FIELDS
from omnistage.gateway.failure import HINTS, of_omni, wording
from omnistage.v1 import error_pb2, omni_pb2, stage_pb2


def failed(code: grpc.StatusCode, text: str, *details: Message, status_code: int | None = None) -> grpc.aio.AioRpcError:
    status = status_pb2.Status(code=code.value[0] if status_code is None else status_code, message=text)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=text)


def info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="omnistage", metadata=metadata)


def bare(code: grpc.StatusCode, details: str = "text", status: bytes = b"") -> grpc.aio.AioRpcError:
    """An error without details of ours, or with these bytes in their place."""
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, status)] if status else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def test_details_of_an_error_are_its_attributes() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    full = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info("OVERLOADED"), retry))
    assert isinstance(full, errors.OverloadedError) and (full.retry_delay_s, full.reason) == (1.5, "OVERLOADED")
    violation = error_details_pb2.BadRequest.FieldViolation(field="thinker.max_tokens", description="must be 1 to 32768")
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    bad = from_rpc_error(failed(grpc.StatusCode.INVALID_ARGUMENT, "bad", info("BAD_REQUEST"), detail))
    assert isinstance(bad, errors.BadRequestError) and bad.fields == (FieldViolation("thinker.max_tokens", "must be 1 to 32768"),)
    lost = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", info("STAGE_LOST", stage="talker")))
    assert isinstance(lost, errors.StageLostError) and (lost.stage, lost.retry_delay_s) == ("talker", None)


@pytest.mark.parametrize("name", [name for name, number in error_pb2.ErrorReason.items() if number])
def test_every_reason_of_the_contract_has_an_exception(name: str) -> None:
    reason = name.removeprefix("ERROR_REASON_")
    assert type(from_rpc_error(failed(grpc.StatusCode.UNKNOWN, "x", info(reason)))) is errors.BY_REASON[reason]


TOO_LARGE = "Received message larger than max (9437201 vs. 8388608)"
FOREIGN = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="example.com")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bare(grpc.StatusCode.UNAVAILABLE), errors.UnavailableError),
        (bare(grpc.StatusCode.DEADLINE_EXCEEDED), errors.DeadlineError),
        (bare(grpc.StatusCode.CANCELLED), errors.UnavailableError),
        (bare(grpc.StatusCode.UNIMPLEMENTED), errors.NotAvailableError),
        (bare(grpc.StatusCode.INTERNAL), errors.UnavailableError),
        (bare(grpc.StatusCode.DATA_LOSS), errors.ServerError),
        (bare(grpc.StatusCode.NOT_FOUND), errors.UnknownModelError),
        (bare(grpc.StatusCode.INTERNAL, status=b"\xff\xff\xff"), errors.UnavailableError),
        (bare(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Stream removed (CLIENT: {TOO_LARGE})"), errors.ProtocolError),
        (bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"), errors.OverloadedError),
        (failed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full; {TOO_LARGE}", info("OVERLOADED")), errors.OverloadedError),
        (failed(grpc.StatusCode.UNAVAILABLE, "gone", info("BAD_REQUEST"), status_code=3), errors.UnavailableError),
        (failed(grpc.StatusCode.UNAVAILABLE, "gone", FOREIGN), errors.UnavailableError),
    ],
    ids=lambda one: one.details() if isinstance(one, grpc.aio.AioRpcError) else None,
)
def test_without_details_that_are_ours_the_status_code_decides(error: grpc.aio.AioRpcError, kind: type[OmniError]) -> None:
    """Details that contradict the status are not ours, and an overload keeps its name whatever its text says."""
    assert type(from_rpc_error(error)) is kind
    assert error.details() != "text" or str(from_rpc_error(error)) == "text"


@pytest.mark.parametrize("details", [TOO_LARGE, f"SERVER: {TOO_LARGE}", "CLIENT: Sent message larger than max (9 vs. 8)"])
def test_a_request_that_is_too_large_is_not_to_be_asked_again(details: str) -> None:
    error = from_rpc_error(bare(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
    assert isinstance(error, errors.BadRequestError) and [violation.field for violation in error.fields] == ["request"]
    assert details in str(error) and (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BAD_REQUEST")


def test_every_error_of_the_tree_is_in_the_docstring() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OmniError)]
    assert len(kinds) > 10 and issubclass(errors.DeadlineError, TimeoutError)
    assert [kind for kind in kinds if kind.__name__ not in (errors.__doc__ or "")] == []


ROOT = Path(__file__).resolve().parents[2]

PLACE = re.compile(r"\{[a-z_]+(=[^{}]*)?\}")
OPTION = re.compile(r"(?<!\w)--[a-z]")
OF_PYTHON = re.compile(r"\b[a-z_]+=['\"{\[N(]|\b[a-z]+_[a-z_]+\b|\b[a-z]+\(\)")
COMMAND = re.compile(r"`[^`]*`")


def kinds(kind: type[OmniError] = OmniError) -> Iterator[type[OmniError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


def said_in(folder: str) -> Iterator[str]:
    """Every hint that the code has for an error, with a value of `x` where one is put in."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (isinstance(node, ast.keyword) and node.arg == "hint") or (
                isinstance(node, ast.Assign) and any("hint" in ast.unparse(target) for target in node.targets)
            ):
                yield from texts(node.value)
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "hint":
                        yield from texts(value)


def texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from (*texts(one), *texts(other))
        case ast.BoolOp(values=values):
            for value in values:
                yield from texts(value)


OF_CLASSES = [kind.ADVICE for kind in kinds() if kind.ADVICE]
ANYWHERE = [*OF_CLASSES, *errors.HINTS.values(), *errors.HINTS_BY_CODE.values(), *connection.ON_PRIVATE_STACK.values()]
OF_THE_CLIENT = sorted({*ANYWHERE, *filter(None, said_in("sdk/omnistage/client"))})
ONLY_IN_PYTHON = ("pip install pillow", "Make the first Omni", "Make one AsyncOmni", "Make a new Omni", "Have a Player", "Give more time")
"""Beginnings of hints of what only a program does."""


def test_hints_of_all_kinds_are_looked_at() -> None:
    assert len(OF_THE_CLIENT) > 40


@pytest.mark.parametrize("words", [PYTHON, SHELL, CHAT, wording(FIELDS)], ids=["python", "shell", "chat", "http"])
def test_every_place_of_a_hint_has_a_word_wherever_it_is_told(words: Wording) -> None:
    given = OF_THE_CLIENT if words is not wording(FIELDS) else list(HINTS.values())
    if words in (PYTHON, SHELL, CHAT):
        given = [*given, *filter(None, said_in("sdk/omnistage/cli"))]
        left = [hint for hint in given if PLACE.search(words.hint(hint)) and "{rate}" not in hint]
    else:
        left = [hint for hint in HINTS.values() if PLACE.search(words.hint(hint))]
    assert left == []


@pytest.mark.parametrize("hint", OF_THE_CLIENT)
def test_a_program_is_told_no_options_of_the_command_and_a_shell_nothing_of_python(hint: str) -> None:
    assert not OPTION.search(COMMAND.sub("", PYTHON.hint(hint)))
    if not hint.startswith(ONLY_IN_PYTHON):
        for words in (SHELL, CHAT):
            assert not OF_PYTHON.search(COMMAND.sub("", words.hint(hint))), words.hint(hint)


@pytest.mark.parametrize("hint", sorted(filter(None, said_in("sdk/omnistage/cli"))))
def test_the_command_says_nothing_of_python_by_itself(hint: str) -> None:
    assert not OF_PYTHON.search(COMMAND.sub("", SHELL.hint(hint))) or '{"' in hint, hint


@pytest.mark.parametrize("kind", sorted(kinds(), key=str))
def test_what_is_said_over_http_is_nothing_of_python_or_a_shell(kind: type[OmniError]) -> None:
    hint = of_omni(kind("it failed"), FIELDS).body["error"]["hint"] or ""
    if kind in (errors.ForkedError, errors.WrongLoopError, errors.ClosedError, errors.StackError, errors.PlayerLostError):
        return  # An error of the gateway itself, for the person who runs it.
    assert not OPTION.search(hint) and not re.search(r"[a-z]+\(\)|outputs=|`", hint)


REFUSALS = [
    ("thinker.max_tokens", "must be from 1 to 32768", "max_tokens", "--max-tokens", "/max-tokens", "max_tokens"),
    ("thinker.sampling.top_p", "must be in (0, 1]", "top_p", "--top-p", "--top-p", "top_p"),
    ("talker.voice", "no voice 'nobody'", "voice", "--voice", "/voice", "audio.voice"),
    ("code2wav.sample_rate_hz", "must be 8000", "sample_rate_hz", "--sample-rate", "--sample-rate", None),
    ("diffusion.guidance_scale", "must be from 0", "guidance_scale", "--guidance", "--guidance", None),
    (
        *("thinker.constraint", "toy cannot constrain its text", "json_schema, regex or choice"),
        *("--json-schema, --regex or --choice", "--json-schema, --regex or --choice", None),
    ),
    ("seed", "is 'x'", "seed", "--seed", "/seed", "seed"),
]


@pytest.mark.parametrize(("field", "what", "python", "shell", "chat", "http"), REFUSALS)
def test_a_refused_field_is_called_what_was_written(field: str, what: str, python: str, shell: str, chat: str, http: str | None) -> None:
    error = errors.BadRequestError(PYTHON.message(f"{field}: {what}", (field,)))
    error.fields = (FieldViolation(field, f"{field}: {what}"),)
    assert (str(error), word_error(error, SHELL)[0]) == (f"{python}: {what}", f"{shell}: {what}")
    assert word_error(error, CHAT)[0] == f"{chat}: {what}"
    if http is not None:
        body = of_omni(error, FIELDS).body["error"]
        assert (body["param"], body["message"]) == (http, f"{http}: {what}")


@pytest.mark.parametrize(
    ("message", "shell"),
    [
        ("thinker.min_tokens: must not be above max_tokens", "min_tokens: must not be above --max-tokens"),
        ("--video: a: there is no sound in it: ask without use_audio", "--video: a: there is no sound in it: ask without --video-sound"),
        ("thinker.stop: has 'max_tokens' twice", "--stop: has 'max_tokens' twice"),
        ("--image: my_max_tokens.png and max_tokens.png are files", "--image: my_max_tokens.png and max_tokens.png are files"),
        ("seed: stop and seed are words of English", "--seed: stop and seed are words of English"),
    ],
)
def test_options_that_a_refusal_names_are_those_that_can_be_typed(message: str, shell: str) -> None:
    field = message.partition(":")[0]
    assert SHELL.message(message, (field,)) == shell


async def test_who_was_too_quick_to_connect_is_told_to_wait_longer() -> None:
    for timeout_s, is_short in ((0.01, True), (1.0, False)):
        routers = Routers("127.0.0.1:1")
        with pytest.raises(errors.UnavailableError) as refused:
            await routers.connect(timeout_s, None)
        await routers.close()
        assert ("--timeout" in word_error(refused.value)[1]) is is_short
        assert "omnistage serve" in refused.value.hint


def test_a_hint_names_an_option_with_its_value() -> None:
    advice = "Name one: {pipeline=toy}."
    assert [words.hint(advice) for words in (PYTHON, SHELL)] == ["Name one: pipeline='toy'.", "Name one: --pipeline toy."]
    assert wording(FIELDS).hint(advice) == 'Name one: "model": "toy".'


def test_a_hint_is_shown_where_nobody_catches_the_error() -> None:
    code = "from omnistage.client import OverloadedError\nraise OverloadedError('full')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"hint: {errors.OverloadedError.hint}"
    assert str(errors.OverloadedError("full")) == "full"


def test_the_note_follows_the_hint_and_is_there_once() -> None:
    error = errors.StageLostError("gone")
    error.add_note("of somebody else")
    for hint in ("Do this.", "Do that: {timeout_s}."):
        error.hint = hint
    assert error.__notes__ == ["of somebody else", "hint: Do that: timeout_s."]
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (str(again), again.hint, again.__notes__) == ("gone", error.hint, error.__notes__)
        again.hint = "Else."
    try:
        raise error
    except errors.StageLostError as caught:
        with pytest.raises(errors.StageLostError) as raised:
            raise caught
    assert raised.value.__notes__ == ["of somebody else", "hint: Do that: timeout_s."]
    error.hint = ""
    assert error.__notes__ == ["of somebody else"]


def test_an_error_that_says_it_all_has_no_note() -> None:
    error = errors.BadRequestError.of("seed", "is 'x'")
    assert (error.hint, getattr(error, "__notes__", [])) == ("", [])


@pytest.mark.parametrize("router", [None, Found("127.0.0.1:1", is_named=True, is_own=True)], ids=["python", "command"])
def test_who_has_a_stack_of_their_own_is_not_sent_to_look_at_another(router: Found | None) -> None:
    for kind in connection.ON_PRIVATE_STACK:
        error = kind("gone")
        advise(router, error, omni_pb2.GenerateRequest())
        assert error.hint and not re.search(r"address|status|replicas\(\)|log of", error.hint)
    named = errors.StageLostError("gone")
    advise(Found("127.0.0.1:1", is_named=True), named, omni_pb2.GenerateRequest())
    assert named.hint == errors.StageLostError.hint


@pytest.mark.parametrize(
    ("asked", "python", "shell"),
    [
        (omni_pb2.GenerateRequest(), "max_tokens", "--max-tokens"),
        (omni_pb2.GenerateRequest(diffusion=stage_pb2.DiffusionParams(prompt="a hill")), "steps", "--steps"),
        (omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(verbatim="Hi.")), "a shorter text", "a shorter text"),
    ],
)
def test_who_ran_out_of_time_is_told_what_there_could_be_less_of(asked: omni_pb2.GenerateRequest, python: str, shell: str) -> None:
    error = errors.DeadlineError("late")
    advise(None, error, asked)
    assert error.hint == f"Give more time: timeout_s, or ask for less: {python}."
    assert word_error(error)[1] == f"Give more time: --timeout, or ask for less: {shell}."
