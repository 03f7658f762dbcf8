"""GET /v1/models and /v1/audio/voices: the pipelines and voices that can be asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from omnistage.client.listing import Pipeline
from omnistage.gateway.answering import unless_gone
from omnistage.gateway.door import Door
from omnistage.gateway.parsed import new_router


def routes(door: Door) -> APIRouter:
    router = new_router("/v1", "models")
    # No server knows how old a pipeline is: all of them count as old as this process.
    created = int(time.time())

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        """All pipelines, also those that are still starting."""
        pipelines = await unless_gone(request, door.offer.pipelines())
        return {"object": "list", "data": [_model(one, created) for one in pipelines]}

    @router.get("/models/{model}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        """One pipeline, in its present state."""
        await unless_gone(request, door.offer.pipelines())
        return _model(await door.offer.pipeline(model), created)

    @router.get("/audio/voices")
    async def voices(request: Request) -> dict[str, Any]:
        """All voices, each with the pipelines that have it."""
        pipelines = await unless_gone(request, door.offer.pipelines())
        names = sorted({voice for one in pipelines for voice in one.voices})
        data = [_voice(name, pipelines, created) for name in names]
        return {"object": "list", "data": data, "voices": names}

    return router


def _voice(name: str, pipelines: Sequence[Pipeline], created: int) -> dict[str, Any]:
    """A voice in the shape of OpenAI's custom voices, with the models that speak with it."""
    models = [one.name for one in pipelines if name in one.voices]
    return {"id": name, "object": "audio.voice", "name": name, "created_at": created, "models": models}


def _model(pipeline: Pipeline, created: int) -> dict[str, Any]:
    """A pipeline in OpenAI's shape, with its inputs and outputs."""
    return {
        "id": pipeline.name,
        "object": "model",
        "created": created,
        "owned_by": "omnistage",
        "description": pipeline.description,
        "state": pipeline.state,
        "stages": pipeline.stages,
        "inputs": pipeline.inputs,
        "outputs": pipeline.outputs,
        "outputs_on_request": pipeline.on_request,
        "voices": pipeline.voices,
    }
