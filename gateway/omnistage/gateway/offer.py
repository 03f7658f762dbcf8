"""What the router offers, as it was a moment ago, and what names of others stand for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from omnistage.client import AsyncOmni
from omnistage.client.listing import Pipeline
from omnistage.gateway.failure import ApiError

FRESH_S = 1.0
"""For so long nobody asks the router again."""

LIST_LIMIT_S = 5.0


class Offer:
    """The pipelines of the router. model_names, voice_names: as of the settings."""

    def __init__(self, omni: AsyncOmni, model_names: Mapping[str, str], voice_names: Mapping[str, str]) -> None:
        self._omni = omni
        self._model_names, self._voice_names = model_names, voice_names
        self._known: list[Pipeline] = []
        self._known_at = -FRESH_S
        self._asking = asyncio.Lock()

    async def pipelines(self) -> list[Pipeline]:
        """All of them, also those that start. Raises OmniError where the router does not answer."""
        async with self._asking:
            if time.monotonic() - self._known_at >= FRESH_S:
                self._known = await self._omni.pipelines(timeout_s=LIST_LIMIT_S)
                self._known_at = time.monotonic()
            return self._known

    async def pipeline(self, name: str) -> Pipeline:
        """The one of this name. Raises ApiError 404, which lists those that there are.

        The router is not asked again for one that is known: that would be a call before each answer, and it refuses what it has no more.
        """
        found = self._find(name)
        if found is None:
            there = ", ".join(one.name for one in await self.pipelines())
            found = self._find(name)
        if found is None:
            raise ApiError(
                404,
                f"The model '{name[:128]}' does not exist here; there are: {there}",
                param="model",
                code="model_not_found",
                reason="UNKNOWN_MODEL",
            )
        return found

    def _find(self, name: str) -> Pipeline | None:
        return next((one for one in self._known if one.name == name), None)

    async def chat_model(self, model: str) -> str:
        """The pipeline of a model that is to answer. Raises ApiError 404, or 400 for one that only draws."""
        found = await self.pipeline(self._model_names.get(model) or model)
        if found.only_draws:
            told = f"model: {found.name} only draws; ask POST /v1/images/generations"
            raise ApiError(400, told, param="model", code="unsupported", reason="BAD_REQUEST")
        return found.name

    async def model(self, model: str | None) -> str | None:
        """The pipeline of a model that is to speak or draw; None: the router's choice. Raises ApiError 404."""
        if model is None:
            return None
        known = await self.pipelines()
        if model in self._model_names and model not in {one.name for one in known}:
            model = self._model_names[model]
            return model or None
        return (await self.pipeline(model)).name

    async def voice(self, voice: str | None) -> str | None:
        """The voice that a name stands for; None: the pipeline's default. One that nobody knows stays: its pipeline refuses it."""
        if voice is None or voice not in self._voice_names:
            return voice
        has_it = any(voice in one.voices for one in await self.pipelines())
        return voice if has_it else self._voice_names[voice] or None
