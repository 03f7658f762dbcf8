"""The router as the gateway asks it: its pipelines as they were a moment ago, with other names that clients may use for them, and a view of
its client for each sender of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omnistage.client import AsyncOmni
from omnistage.client.connection import Pipeline, serve_advice
from omnistage.client.errors import OmniError
from omnistage.client.routers import ApiKey
from omnistage.client.wording import did_you_mean
from omnistage.gateway.failure import LIST, ApiError
from omnistage.host.token import GATEWAY_HOST, GATEWAY_KEY, Token

FRESH_S = 1.0
"""Seconds for which the last list is used, or the last error, before the router is asked anew."""

LIST_LIMIT_S = 5.0

OLLAMA_TAG = ":latest"
"""Ollama's clients put it behind a name without a tag, also where they ask as OpenAI's."""

MAX_PIPELINES = 32
"""The most pipelines that a message lists."""


@dataclass(frozen=True, slots=True)
class Ability:
    """An ability that an endpoint needs of a pipeline. name: its name in messages. lack: what a router lacks that has no such pipeline, as
    the client library calls it. endpoint: the path that needs it. has: returns whether a pipeline has it."""

    name: str
    lack: str
    endpoint: str
    has: Callable[[Pipeline], bool]


ANSWER = Ability("answer in text", "answer", "POST /v1/chat/completions", lambda one: "thinker" in one.stages)
SPEAK = Ability("speak a text", "speech", "POST /v1/audio/speech", lambda one: "thinker" in one.stages and "audio" in _outputs_of(one))
DRAW = Ability("draw", "image", "POST /v1/images/generations", lambda one: one.draws and "image" in _outputs_of(one))
FILM = Ability("make films", "video", "POST /v1/videos", lambda one: one.draws and "video" in _outputs_of(one))
SOUND = Ability("make sound of a prompt", "sound", "POST /v1/audio/generate", lambda one: one.draws and "audio" in _outputs_of(one))
ABILITIES = (ANSWER, SPEAK, DRAW, FILM, SOUND)


def _outputs_of(one: Pipeline) -> tuple[str, ...]:
    """A pipeline's outputs, also those that come on request."""
    return (*one.outputs, *one.on_request)


class Offer:
    """The pipelines of the router, by their own and their further names. model_names, voice_names: as in the settings."""

    def __init__(self, omni: AsyncOmni, model_names: Mapping[str, str], voice_names: Mapping[str, str]) -> None:
        self._omni = omni
        self._model_names, self._voice_names = model_names, voice_names
        self._pipelines: list[Pipeline] = []
        self._failure: OmniError | None = None
        self._asked_at = -FRESH_S
        self._asking: asyncio.Task[None] | None = None

    async def pipelines(self) -> list[Pipeline]:
        """All pipelines, also those that are still starting. Raises OmniError if the router does not answer."""
        if self._asking is None and time.monotonic() - self._asked_at >= FRESH_S:
            self._asking = asyncio.create_task(self._ask(), name="omnistage-offer")
        if self._asking is not None:  # All waiting callers share one call; a caller that leaves does not end it for the others.
            await asyncio.shield(self._asking)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._pipelines

    async def _ask(self) -> None:
        """Ask the router, and keep its pipelines or its error."""
        try:
            self._pipelines, self._failure = await self._omni.pipelines(timeout_s=LIST_LIMIT_S), None
        except OmniError as error:
            self._failure = error
        finally:
            self._asked_at = time.monotonic()
            self._asking = None

    async def pipeline(self, name: str) -> Pipeline:
        """The pipeline of this name. Raises ApiError 404, which lists the pipelines that exist, or 400 if several have this name besides
        their own.

        If the name is in the last list, the router is not asked for a new one: that would be a call before each answer, and the router
        itself refuses a pipeline that is gone.
        """
        pipeline = self._find(name)
        if pipeline is None:
            await self.pipelines()
            pipeline = self._find(name)
        if pipeline is None:
            raise self._unknown(name)
        return pipeline

    def _unknown(self, name: str) -> ApiError:
        labels = ", ".join(one.label for one in self._pipelines[:MAX_PIPELINES])
        names = [each for one in self._pipelines for each in (one.name, *one.names)]
        text = f"The model '{name[:128]}' does not exist here; there are: {labels}{did_you_mean(name[:128], names)}"
        return ApiError(404, text, param="model", code="model_not_found", reason="UNKNOWN_MODEL", hint=LIST)

    def _find(self, name: str) -> Pipeline | None:
        called = Pipeline.find_called(name, self._pipelines) or Pipeline.find_called(name.removesuffix(OLLAMA_TAG), self._pipelines)
        if len(called) > 1:
            own_names = " and ".join(one.name for one in called)
            text = f"The model '{name[:128]}' is another name of {own_names}; give one of these"
            raise ApiError(400, text, param="model", code="ambiguous_model", hint=LIST)
        return called[0] if called else None

    async def _resolved(self, model: str) -> Pipeline | None:
        """The pipeline that a name stands for; a pipeline's own name takes precedence. None: the router chooses. Raises ApiError 404."""
        if self._find(model) is None and model in self._model_names:
            await self.pipelines()  # A pipeline of this name may be new.
            if self._find(model) is None:
                if not self._model_names[model]:
                    return None
                model = self._model_names[model]
        return await self.pipeline(model)

    async def chat_pipeline(self, model: str) -> str:
        """The name of the pipeline that answers for a model. Raises ApiError: 404, or 400 if the pipeline does not answer."""
        pipeline = await self._resolved(model)
        if pipeline is None:  # OpenAI uses this name for speech or for pictures.
            raise self._unknown(model)
        return self._able(pipeline, ANSWER).name

    async def pipeline_that_can(self, ability: Ability, model: str | None) -> str | None:
        """The name of the pipeline that does this for a model; None: the router chooses. Raises ApiError: 404, or 400 if the pipeline lacks
        the ability, or no pipeline has it."""
        pipeline = None if model is None else await self._resolved(model)
        if pipeline is not None:
            return self._able(pipeline, ability).name
        pipelines = await self.pipelines()
        if pipelines and not any(map(ability.has, pipelines)):
            fault = f"model: no pipeline here can {ability.name}; {serve_advice(ability.lack)}"
            raise ApiError(400, fault, param="model", code="unsupported", hint=LIST)
        return None

    def _able(self, pipeline: Pipeline, ability: Ability) -> Pipeline:
        """Return `pipeline` itself. Raises ApiError 400, which names pipelines that can, if it lacks the ability."""
        if ability.has(pipeline):
            return pipeline
        able = [one.name for one in self._pipelines if ability.has(one)]
        hint_words = f"these can: {', '.join(able[:MAX_PIPELINES])}" if able else f"no pipeline here can; {serve_advice(ability.lack)}"
        own_ability = next((each for each in ABILITIES if each.has(pipeline)), None)
        hint = f"Ask {own_ability.endpoint} for it." if own_ability else LIST
        raise ApiError(400, f"model: {pipeline.name} cannot {ability.name}; {hint_words}", param="model", code="unsupported", hint=hint)

    async def voice(self, voice: str | None) -> str | None:
        """The voice that a name stands for; None: the pipeline's default. An unknown name stays, and the pipeline refuses it."""
        if voice is None or voice not in self._voice_names:
            return voice
        has_it = any(voice in one.voices for one in await self.pipelines())
        return voice if has_it else self._voice_names[voice] or None


def view_of(omni: AsyncOmni, token: Token | None, key: str, host: str) -> AsyncOmni:
    """A view of the router's client that asks for one sender. token: proves to the router that this is the gateway of its stack; then the
    router shares its places among the hosts that the gateway names. None: all senders together share the places of the gateway's own host.
    key: the sender's, or a text in place of it. host: a name of the host that it asks from. Raises BadRequestError for a text that cannot
    be a key."""
    proof = ((GATEWAY_KEY, token.secret), (GATEWAY_HOST, host)) if token else ()
    return omni.as_client(ApiKey(key, extra_metadata=proof))
