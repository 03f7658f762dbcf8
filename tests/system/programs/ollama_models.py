"""Ollama's own client, blocking and not: `python ollama_models.py URL`."""

import asyncio
import sys

import ollama
from pydantic import BaseModel

ASKED = [{"role": "user", "content": "What is a kite?"}]
BRIEF = {"num_predict": 12, "temperature": 0.8, "seed": 7, "num_ctx": 2048}


class GiraffeFact(BaseModel):
    is_tall: bool


async def streamed(url: str) -> str:
    parts = await ollama.AsyncClient(url).chat("smol", ASKED, stream=True, options=BRIEF, keep_alive="5m")
    return "".join([part.message.content or "" async for part in parts])


def height_of(animal: str) -> int:
    return len(animal)


client = ollama.Client(sys.argv[1])
assert [one.model for one in client.list().models] == ["smol:latest"] == [one.model for one in client.ps().models]
shown = client.show("smol")
assert shown.capabilities == ["completion"] and shown.modelinfo and shown.modelinfo["general.architecture"] == "smol", shown
whole = client.chat("smol:latest", ASKED, options=BRIEF, think=False)
assert whole.message.content and whole.message.role == "assistant" and whole.message.content == asyncio.run(streamed(sys.argv[1]))
assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12) and whole.prompt_eval_count and whole.created_at
assert whole.total_duration and whole.eval_duration and whole.prompt_eval_duration and whole.load_duration == 0
pieces = [*client.generate("smol", "What is a kite?", system="Be brief.", stream=True, options=BRIEF)]
assert len(pieces) > 2 and "".join(piece.response or "" for piece in pieces) and pieces[-1].done
flag = client.chat("smol", [{"role": "user", "content": "Is a giraffe tall? Answer in JSON."}], format=GiraffeFact.model_json_schema())
assert isinstance(GiraffeFact.model_validate_json(flag.message.content or "").is_tall, bool)
told = client.chat("smol", ASKED, options={"num_predict": 3}, logprobs=True, top_logprobs=2)
assert told.logprobs and len(told.logprobs) == 3 and len(told.logprobs[0].top_logprobs or ()) == 2, told
assert client.generate("smol", keep_alive=0).done_reason == "load"
PICTURE = b"\x89PNG\r\n\x1a\n"
for ask, status, words in (
    (lambda: client.chat("none", ASKED), 404, "'none' does not exist here; there are: smol"),
    (lambda: client.chat("picture", ASKED), 400, "POST /v1/images/generations"),
    (lambda: client.chat("smol", ASKED, tools=[height_of]), 400, "tools: "),
    (lambda: client.chat("smol", [{**ASKED[0], "images": [PICTURE]}]), 400, "image"),
    (lambda: client.chat("smol", ASKED, options={"temperature": 9}), 400, "options.temperature: must be at most 2"),
    (lambda: [*client.chat("none", ASKED, stream=True)], 404, "'none' does not exist here"),
    (lambda: client.pull("smol"), 404, "omnistage pull"),
    (lambda: client.delete("smol"), 404, "its operator"),
    (lambda: client.embed("smol", "Hello"), 404, "embeddings"),
):
    try:
        ask()
    except ollama.ResponseError as error:
        assert (error.status_code, words in error.error) == (status, True), error
    else:
        raise AssertionError(words)
