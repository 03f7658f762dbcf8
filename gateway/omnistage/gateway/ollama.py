"""Ollama's interface, for programs that know no other: its conversations, its prompts, and its questions about models.

It asks the router as chat does. Models are those that answer in text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from omnistage.client.connection import Pipeline
from omnistage.client.events import Done, TextDelta, ThoughtDelta
from omnistage.gateway.accounts import Events
from omnistage.gateway.answering import Pieces, stream_response
from omnistage.gateway.body import MAX_MESSAGES, MIN_TOP_P, Ignored, Refused, StrictBody, bounds_of, new_router
from omnistage.gateway.chat import Stops, shown_reason
from omnistage.gateway.door import Door, HttpCall, ThisCall
from omnistage.gateway.failure import ApiError, fields_of, invalid, ollama_error
from omnistage.gateway.messages import Turn, turns_of
from omnistage.gateway.offer import ANSWER, OLLAMA_TAG
from omnistage.gateway.report import logprobs_of

VERSION = "0.12.11"
"""The version of Ollama whose chat and generate these are: its clients compare it with the one that brought what they use. It was the first
with `logprobs`."""

LINES = "application/x-ndjson"

STARTED = datetime.now(UTC)
EXPIRES = STARTED + timedelta(days=36_500)
"""Some clients read the time when a model is unloaded. Here only the operator can set one, and it is not known."""

MODEL_ONLY = "models are those that the server was started with"
ABSENT = {
    **dict.fromkeys(("pull", "create"), f"{MODEL_ONLY}: run `omnistage pull NAME` there, then `omnistage serve NAME`"),
    **dict.fromkeys(("push", "copy", "delete", "blobs"), f"{MODEL_ONLY}; its operator adds and removes them"),
    **dict.fromkeys(("embed", "embeddings"), "no pipeline here makes embeddings; ask a server that has a model for them"),
}
"""Why there is no such endpoint, by the first word of its path below /api."""


def absence_at(path: str) -> str:
    """The reason why this endpoint of Ollama is not here; empty if Ollama has no such endpoint."""
    return ABSENT.get(path.removeprefix(f"{router.prefix}/").partition("/")[0], "")


# Requests


class _Options(StrictBody):
    num_predict: Annotated[int | None, Field(description="Most tokens; below 1: the pipeline's default.")] = None
    seed: Annotated[int | None, Field(description="Below 0: drawn anew.")] = None
    temperature: Annotated[float, bounds_of("temperature")] | None = None
    top_k: Annotated[int, bounds_of("top_k")] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, bounds_of("min_p")] | None = None
    repeat_penalty: Annotated[float, bounds_of("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, bounds_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds_of("frequency_penalty")] | None = None
    stop: Stops | None = None


OF_LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only"),
)
OF_OLDER_SAMPLERS = ("tfs_z", "typical_p", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline")
"""Ollama's own engine takes these and heeds few of them."""

_UNHEEDED: dict[str, Any] = dict.fromkeys((*OF_LOADING, *OF_OLDER_SAMPLERS), (Ignored, None))
OllamaOptions = create_model("OllamaOptions", __base__=_Options, **_UNHEEDED)


def _schema_of(value: object) -> object:
    """The schema that a format stands for; None: any text is allowed."""
    if value == "":
        return None
    if value == "json":
        return {"type": "object"}
    if not isinstance(value, dict):
        raise PydanticCustomError("format", 'give "json" or a JSON schema')
    return value


Format = Annotated[dict[str, Any] | None, BeforeValidator(_schema_of, json_schema_input_type=str | dict[str, Any])]
Think = Annotated[bool, BeforeValidator(lambda value: isinstance(value, str) or value, json_schema_input_type=bool | str)]


class OllamaBody(StrictBody):
    """Fields of chat and generate."""

    model: str
    stream: Annotated[bool | None, Field(description="False: the answer comes whole; otherwise line by line.")] = None
    format: Format = None
    options: OllamaOptions | None = None
    think: Annotated[Think | None, Field(description="False: thoughts are left out. No model thinks more or less by it.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds_of("top_logprobs")] | None = None

    keep_alive: Ignored = None
    truncate: Ignored = None
    shift: Ignored = None

    template: Refused = None

    def answer_options(self, pipeline: str) -> dict[str, Any]:
        """The options for the client library."""
        options: _Options = self.options or OllamaOptions()
        return options.same_options | {
            "pipeline": pipeline,
            "outputs": ["text"],
            "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
            "seed": options.seed if (options.seed or 0) >= 0 else None,
            "top_p": None if options.top_p is None else max(options.top_p, MIN_TOP_P),
            "repetition_penalty": options.repeat_penalty,
            "json_schema": self.format,
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs,
        }


class OllamaChatRequest(OllamaBody):
    messages: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_MESSAGES)] = None
    tools: Refused = None


class OllamaPrompt(OllamaBody):
    prompt: str | None = None
    system: str | None = None
    images: Annotated[list[str] | None, Field(description="Pictures in base64.")] = None

    suffix: Refused = None
    raw: Refused = None
    context: Refused = None
    width: Refused = None
    height: Refused = None
    steps: Refused = None


class ModelQuestion(StrictBody):
    model: str | None = None
    name: Annotated[str | None, Field(description="An older name of `model`.")] = None
    verbose: Ignored = None
    system: Ignored = None
    template: Ignored = None
    options: Ignored = None


OPTION_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_FIELDS = {
    **{name: f"options.{OPTION_NAMES.get(name, name)}" for name in (*OPTION_NAMES, *_Options.model_fields)},
    **dict.fromkeys(("json_schema", "thinker.constraint"), "format"),
}
CHAT_FIELDS = fields_of("ollama", "messages", _FIELDS)
PROMPT_FIELDS = fields_of("ollama", "prompt", _FIELDS)


async def _turns_of(call: HttpCall, messages: list[dict[str, Any]]) -> list[Turn]:
    """The turns for messages, whose pictures are texts in base64. Raises ApiError, BadRequestError."""
    # Nothing here calls tools, so no tool has a name; the thoughts before an earlier answer are no part of the conversation.
    plain = [
        {"content": "", **{key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}}
        for message in messages
    ]
    turns = await turns_of(plain, lambda name: None, call.fetch)
    for i, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        if message.get("images"):
            turn["images"] = _picture_urls(message["images"], f"messages[{i}].images")
    return turns


def _picture_urls(pictures: object, field: str) -> list[str]:
    """A data: URL for each picture: to the client library another text would be the path of a file. Raises ApiError."""
    if not isinstance(pictures, list) or not all(isinstance(picture, str) for picture in pictures):
        raise invalid(field, "must be a list of pictures in base64")
    return [picture if picture[:5].lower() == "data:" else f"data:;base64,{picture}" for picture in pictures]


# Answers


class _Part(NamedTuple):
    """A part of an answer. end: facts about the whole answer; only the last part has some."""

    text: str = ""
    thought: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()
    end: Mapping[str, Any] = {}


async def _parts_of(events: Events, body: OllamaBody) -> AsyncGenerator[_Part, None]:
    """Yield the parts of an answer as they come."""
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta():
                    rows = logprobs_of(event, body.top_logprobs or 0) if body.logprobs else ()
                    if event.text or rows:
                        yield _Part(event.text, logprobs=tuple(rows))
                case ThoughtDelta() if event.text and body.think is not False:
                    yield _Part(thought=event.text)
                case Done():
                    yield _Part(end=_end_of(event))


def _end_of(done: Done) -> dict[str, Any]:
    """The account of an answer. Durations are in nanoseconds."""
    usage = done.usage
    first_text_s = usage.total_s if usage.first_text_s is None else usage.first_text_s
    return {
        "done_reason": shown_reason(done.finish_reason),
        "total_duration": _nanoseconds(usage.total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens or 0,
        "prompt_eval_duration": _nanoseconds(first_text_s - usage.queued_s),
        "eval_count": usage.completion_tokens or 0,
        "eval_duration": _nanoseconds(usage.total_s - first_text_s),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def _message(part: _Part) -> dict[str, Any]:
    """The field of an answer of chat."""
    return {"message": {"role": "assistant", "content": part.text, **({"thinking": part.thought} if part.thought else {})}}


def _response(part: _Part) -> dict[str, Any]:
    """The field of an answer of generate."""
    return {"response": part.text, **({"thinking": part.thought} if part.thought else {})}


Shape = Callable[[_Part], dict[str, Any]]


def _fields(model: str, part: _Part, shape: Shape) -> dict[str, Any]:
    """A part of an answer as Ollama gives it. model: as the client wrote it."""
    rows = {"logprobs": part.logprobs} if part.logprobs else {}
    return {"model": model, "created_at": datetime.now(UTC).isoformat(), **shape(part), **rows, "done": bool(part.end), **part.end}


async def _lines_of(parts: AsyncGenerator[_Part, None], model: str, shape: Shape) -> Pieces:
    async with aclosing(parts):
        async for part in parts:
            yield _line(_fields(model, part, shape))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


async def _answer(call: HttpCall, body: OllamaBody, messages: list[dict[str, Any]], shape: Shape) -> Response:
    """The answer to messages, whole or line by line; without a message only whether the model is here, as when Ollama loads it."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "goes with logprobs: true")
    pipeline = await call.door.offer.chat_pipeline(body.model)
    if not messages:
        return JSONResponse(_fields(body.model, _Part(end={"done_reason": "load"}), shape))
    turns = await _turns_of(call, messages)
    messages.clear()  # The turns have what was in them, and go with this call.
    parts = _parts_of(call.ask(call.omni.stream_chat, turns, **body.answer_options(pipeline)), body)
    if body.stream is not False:
        lines = _lines_of(parts, body.model, shape)
        return await stream_response(call.account, lines, media_type=LINES, error_piece=lambda error: _line(ollama_error(error)))
    texts, thoughts, rows, ends = zip(*[part async for part in parts], strict=True)
    full_answer = _Part("".join(texts), "".join(thoughts), sum(rows, ()), ends[-1])
    return JSONResponse(_fields(body.model, full_answer, shape))


router = new_router("/api", "ollama")


@router.post("/chat", response_model=None)
async def ollama_chat(call: ThisCall, body: OllamaChatRequest) -> Response:
    """Answer a conversation in text, line by line or whole."""
    call.account.fields = CHAT_FIELDS
    return await _answer(call, body, body.messages or [], _message)


@router.post("/generate", response_model=None)
async def ollama_generate(call: ThisCall, body: OllamaPrompt) -> Response:
    """Answer a prompt in text, line by line or whole."""
    messages: list[dict[str, Any]] = []
    if body.prompt or body.images:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt or "", "images": body.images}]
    # Errors of the client library that name the last turn are about these fields.
    turn = f"conversation[{len(messages) - 1}]"
    call.account.fields = {**PROMPT_FIELDS, f"{turn}.content": "prompt", f"{turn}.images": "images"}
    body.prompt = body.images = None  # The messages have them, and go when the turns have them.
    return await _answer(call, body, messages, _response)


# Models


@router.get("/tags")
async def ollama_models(call: ThisCall) -> dict[str, Any]:
    """The pipelines that answer in text."""
    return {"models": [{**_facts(one), "modified_at": STARTED.isoformat()} for one in await _answering(call.door)]}


@router.get("/ps")
async def ollama_running(call: ThisCall) -> dict[str, Any]:
    """The pipelines that answer in text, if they can do so now."""
    ready = [one for one in await _answering(call.door) if one.state == "ready"]
    return {"models": [{**_facts(one), "expires_at": EXPIRES.isoformat(), "size_vram": 0} for one in ready]}


@router.post("/show")
async def ollama_model(call: ThisCall, body: ModelQuestion) -> dict[str, Any]:
    """A pipeline that answers in text, and what it can do."""
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model: is missing", param="model", code="missing_required_parameter")
    offer = call.door.offer
    pipeline = await offer.pipeline(await offer.chat_pipeline(name))
    return {
        "details": _facts(pipeline)["details"],
        "model_info": {"general.architecture": pipeline.name, "general.description": pipeline.description},
        "capabilities": ["completion", *(["vision"] if "image" in pipeline.inputs else [])],
        "modified_at": STARTED.isoformat(),
    }


@router.get("/version")
async def ollama_version() -> dict[str, str]:
    """The version of Ollama whose interface this is."""
    return {"version": VERSION}


async def _answering(door: Door) -> list[Pipeline]:
    return [one for one in await door.offer.pipelines() if ANSWER.has(one)]


def _facts(pipeline: Pipeline) -> dict[str, Any]:
    """A pipeline as a model of Ollama. Clients cut the digest, so there is one: of the name. Sizes are not known here."""
    name = f"{pipeline.name}{OLLAMA_TAG}"
    details = {"parent_model": "", "format": "", "family": pipeline.name, "families": [pipeline.name], "parameter_size": ""}
    return {
        "name": name,
        "model": name,
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {**details, "quantization_level": ""},
    }
