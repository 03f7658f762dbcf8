"""The bodies of requests: the fields and checks that all share, how a form is read, and routes that use a body of JSON as the guard has
parsed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from omnistage.client.about import Range, max_count
from omnistage.client.options import ABOUT, OPTIONS
from omnistage.client.request import MAX_TEXT_CHARACTERS
from omnistage.gateway.failure import ApiError, invalid, unsupported_error

MAX_MESSAGES = max_count("ThinkerParams.messages")

MAX_KEYS = 128
"""The most keys of an object whose fields are validated."""

MAX_OPTIONS = max_count("DiffusionParams.options") // 2
"""The most options of one pipeline alone; its defaults may be as many again."""

MAX_SEED: int = get_args(OPTIONS["seed"])[1].allowed.high

MIN_TOP_P = 1e-6
"""Sent in place of OpenAI's 0, which pipelines refuse: it means that only the likeliest token is taken."""


def limit_keys(value: object, max_keys: int) -> object:
    """Return `value`. Raises an error for an object with more than `max_keys` keys, before other code looks at them."""
    if isinstance(value, dict) and len(value) > max_keys:
        raise PydanticCustomError("too_many_keys", "Object should have at most {most} keys", {"most": max_keys})
    return value


SCHEMAS = {"schema", "parameters", "format"}
"""Fields that may be a JSON schema."""


NO_NUMBER = object()
"""Stands for a truth value in the place of a number, which pydantic would take for 0 or 1, so that it is refused."""


def _number_types(annotation: Any) -> frozenset[type]:
    """Those of bool, int and float of which the value of a field, or an item of its list, may be."""
    kind = annotation if isinstance(annotation, type) else type(annotation)  # The annotation may be a value, of a Literal.
    return frozenset({kind} & {bool, int, float}).union(*map(_number_types, get_args(annotation)))


@cache
def _numbers_of(body: type[BaseModel]) -> dict[str, frozenset[type]]:
    """By the name of each field of a body: see `_number_types`."""
    return {name: _number_types(field.annotation) for name, field in body.model_fields.items()}


def _as_number(value: Any, types: frozenset[type]) -> Any:
    """The value of a field as JSON means it: 12.0 is a whole number there, and true is no number. types: as `_number_types` has them."""
    if isinstance(value, list):
        return [_as_number(item, types) for item in value] if types else value
    if isinstance(value, bool):
        return NO_NUMBER if types and bool not in types else value
    return int(value) if isinstance(value, float) and value.is_integer() and types == {int} else value


class Body(BaseModel):
    """The body of a request. An unknown field is refused, as OpenAI does. A field that is null counts as not given, wherever it is. A
    whole number may be written with a fraction of zero, and a truth value is no number."""

    model_config = ConfigDict(extra="forbid", strict=False)
    _media: ClassVar[tuple[str, ...]] = ()
    """Fields that hold media, and so may be longer than a text."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, body: object) -> object:
        """Refuse too many keys, and too long texts, before the fields are validated: each unknown key would be an error of its own,
        which takes more than a KiB. Leave out what is null, and read numbers as JSON means them."""
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name not in cls._media and isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
                raise invalid(name, f"has {len(value)} characters of text; at most {MAX_TEXT_CHARACTERS} are allowed")
        limit_keys(body, MAX_KEYS)
        # A null in an unknown field stays, so that the field is refused.
        values = {name: _without_nulls(name, value) for name, value in body.items() if value is not None or name not in cls.model_fields}
        types = _numbers_of(cls)
        return {name: _as_number(value, types.get(name, frozenset())) for name, value in values.items()}

    @property
    def same_options(self) -> dict[str, Any]:
        """The fields that have the name of an option of the client library, with their values; None: the request does not have it."""
        options = {name: getattr(self, name) for name in type(self).model_fields if name in OPTIONS}
        return options if options.get("seed") is None else options | {"seed": seed_of(options["seed"])}


def _without_nulls(name: str, value: Any) -> Any:
    """The value of a field without members of objects that are null. A schema stays as it is: null may be one of its values."""
    if isinstance(value, list):
        return [_without_nulls("", one) for one in value]
    if not isinstance(value, dict) or name in SCHEMAS:
        return value
    return {inner: _without_nulls(inner, one) for inner, one in value.items() if one is not None}


class StrictBody(Body):
    """A body of JSON alone: a number is no text, and a text no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


def seed_of(seed: int) -> int:
    """The seed to send to a pipeline, 0 or more: a seed below zero counts back from the largest seed, so -1 is the largest."""
    return seed & MAX_SEED


def shown_seed(seed: int, client_seed: int | None) -> int:
    """A pipeline's seed in an answer: below zero if the client gave one below zero, so that its own seed comes back as it was sent.
    client_seed: None: it gave none."""
    return seed - (MAX_SEED + 1) if client_seed is not None and client_seed < 0 and seed > MAX_SEED >> 1 else seed


def _voice_name(voice: object) -> object:
    """The name of a voice. voice: the name, or an object with the name as `id`."""
    return voice["id"] if isinstance(voice, dict) and set(voice) == {"id"} else voice


def _dropped(_: object) -> None:
    """Validates a field as None, so that the request does not keep the field's value in memory while the answer is made."""


def _not_called(choice: object) -> object:
    """None for "none" and "auto", which change no answer because there are no tools; any other value unchanged."""
    return None if choice in ("none", "auto") else choice


def _refused(value: object, info: ValidationInfo) -> None:
    """Raises ApiError for a value: a client would expect that it changes the answer. A value with nothing in it becomes None."""
    if value not in (None, [], {}, False):
        raise unsupported_error(str(info.field_name), "nothing here does that yet; leave it out")


def value_of_json(value: object) -> object:
    """The value in a form's field, which is a text of JSON; any other value unchanged."""
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        raise PydanticCustomError("json", "give it as JSON") from None


def bounds_of(name: str) -> Any:
    """The bounds of an option as a validator of pydantic."""
    allowed = ABOUT[name].allowed
    if not isinstance(allowed, Range):
        raise TypeError(f"{name} has no bounds")
    ends: dict[str, Any] = {"gt" if allowed.is_above else "ge": allowed.low, "lt" if allowed.is_below else "le": allowed.high}
    return Field(**ends, allow_inf_nan=None if get_args(OPTIONS[name])[0] is int else False)


def _kind_of(name: str) -> Any:
    """The type of an option for pydantic: its words, or its type within its bounds."""
    kind, about = get_args(OPTIONS[name])
    if isinstance(about.allowed, Range):
        return Annotated[kind, bounds_of(name)]
    return Literal[tuple(map(kind, about.allowed))] if about.allowed else kind


Voice = Annotated[str, BeforeValidator(_voice_name, json_schema_input_type=str | dict[str, str])]
Seed = Annotated[int, Field(ge=-(1 << 63), le=MAX_SEED)]
Ignored = Annotated[Any, Field(description="Taken, and means nothing here."), BeforeValidator(_dropped)]
Refused = Annotated[Any, Field(description="Refused, if something is in it."), BeforeValidator(_refused)]
PipelineOptions = Annotated[dict[str, bool | int | float | str], BeforeValidator(value_of_json), Field(max_length=MAX_OPTIONS)]
ToolChoice = Annotated[Refused, BeforeValidator(_not_called)]


class TextSchema(StrictBody):
    """The schema that a text keeps to."""

    description: str | None = None
    # `schema` is a method of the base class.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="Answers always keep to the schema.")] = None


class ConversationBody(StrictBody):
    """Fields of chat and of responses."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, bounds_of("temperature")] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, bounds_of("top_logprobs")] | None = None
    seed: Seed | None = None

    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    moderation: Refused = None
    tools: Refused = None
    tool_choice: ToolChoice = None

    def text_options(self, number: int = 0) -> dict[str, Any]:
        """The options for the answer with this number, from 0: a text, with one more in the seed for each further answer."""
        seed = None if self.seed is None else seed_of(self.seed + number)
        top_p = None if self.top_p is None else max(self.top_p, MIN_TOP_P)
        return self.same_options | {"outputs": ["text"], "seed": seed, "top_p": top_p}


class DrawnBody(Body):
    """Options of what is drawn that have a form of their own over HTTP."""

    seed: Seed | None = None
    options: PipelineOptions | None = None


def body_with(base: type[Body], *names: str) -> type[Body]:
    """A body with these options of a call as fields of the same names, each with the bounds or the words that the contract has for it."""
    fields: dict[str, Any] = {name: (_kind_of(name) | None, None) for name in names}
    return create_model(f"{base.__name__}WithOptions", __base__=base, **fields)


def drawing_body(endpoint: str, product: str) -> type[Body]:
    """The base of a body for drawings of one kind: each option of them that is a number, a text or a truth value is a field, unless the
    endpoint has another form of it. The client library and the stages check the values, and name both bounds. product: image, video or
    audio."""
    kinds = {name: get_args(OPTIONS[name])[0] for name, about in ABOUT.items() if product in about.makes and endpoint not in about.http}
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in kinds.items() if kind in (int, float, str, bool)}
    return create_model(f"{product.capitalize()}Fields", __base__=DrawnBody, **fields)


B = TypeVar("B", bound=BaseModel)

FORM, JSON = "multipart/form-data", "application/json"

MAX_FIELDS = 64
FIELD_BYTES = 1 << 20
"""The most bytes of a field that is not a file."""

PIECE_BYTES = 1 << 20


class _InMemory(MultiPartParser):
    """Parses a form in memory: the guard has bounded the body, and nothing is written to disk."""

    spool_max_size = 1 << 40


def is_form(request: Request) -> bool:
    """Whether the body is a form; False: it is JSON. Raises ApiError if it is neither."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (FORM, JSON):
        hint = f"Send a form, Content-Type: {FORM}, with files, or {JSON} with data: URLs."
        raise ApiError(400, f"the body is neither {FORM} nor {JSON}", code="invalid_body", hint=hint)
    return kind == FORM


async def form_of(request: Request, files: Mapping[str, int]) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """Returns (the texts of a form, by name; the names and the bytes of its files, in order). files: the names that files may have, and how
    many there may be of each. Raises ApiError."""
    pieces = _pieces(b"".join([piece async for piece in request.stream()]))  # `request.body` would hold it to the end of the request.
    limits = {"max_files": max(files.values()), "max_fields": MAX_FIELDS, "max_part_size": FIELD_BYTES}
    try:
        form = await _InMemory(request.headers, pieces, **limits).parse()
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message}", code="invalid_body") from None
    texts, contents = dict[str, str](), list[tuple[str, bytes]]()
    try:
        for name, value in form.multi_items():
            number = sum(name == other for other, _ in contents)
            if isinstance(value, UploadFile) and number < files.get(name, 0):
                contents.append((name, await value.read()))
            elif isinstance(value, UploadFile) or name in files:  # No file, a second file, or a file in place of a text.
                raise invalid(name[:128], "must be one file" if name in files else "is a file")
            else:
                texts[name] = value
        return texts, contents
    finally:
        await form.close()


def validate_body(kind: type[B], body: object) -> B:
    """The body as an object of the class `kind`. Raises RequestValidationError, which the app answers."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces without a second copy, so that other requests go on while a large form is parsed."""
    for place in range(0, len(body), PIECE_BYTES):
        yield body[place : place + PIECE_BYTES]
        await asyncio.sleep(0)


class _Parsed(APIRoute):
    """A route that takes the JSON of the body from the guard."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as a route does, but a HEAD matches like a GET if this is a route of GET."""
        return super().matches({**scope, "method": "GET"} if self._is_head(scope) else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_head(scope):  # The server sends the head of the answer alone.
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    def _is_head(self, scope: Scope) -> bool:
        """Whether this is a HEAD for a route of GET."""
        return bool(scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ()))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            request._json = request.scope["state"]["json"]  # Starlette keeps a parsed body here.
            return await handle(request)

        return parsed


def new_router(prefix: str, *tags: str) -> APIRouter:
    """A router of such routes. tags: of its endpoints in our document."""
    return APIRouter(prefix=prefix, tags=[*tags], route_class=_Parsed)
