"""One session of a StageLogic without a server: its inputs, cut anywhere, and all that it gives."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from omnistage.stage.logic import Input, InputPayload, Kept, Output, SessionTiming, StageLogic, Start
from omnistage.v1 import chunk_pb2, stage_pb2

Array = NDArray[np.generic]
Whole = str | bytes | Array
"""All that goes into a port: the text; rows [n, width] in the element type of the port, uint32 for codes; float32 samples [n, channels]; a
file."""


@dataclass
class LogicOutput:
    """All that a session gave. kept: input port, first item, and how many outputs came before it was said. told: of the session itself."""

    needs: Mapping[str, int]
    outputs: list[Output] = field(default_factory=list)
    kept: list[tuple[str, int, int]] = field(default_factory=list)
    told: SessionTiming = field(default_factory=SessionTiming)

    def of(self, port: str) -> list[Output]:
        return [output for output in self.outputs if output.port == port]

    def count(self, port: str) -> int:
        return sum(output.count for output in self.of(port))

    def ports(self) -> set[str]:
        return {output.port for output in self.outputs}

    def ended(self) -> list[str]:
        """Ports in the order in which they ended."""
        return [output.port for output in self.outputs if output.last]

    def texts(self) -> list[chunk_pb2.TextChunk]:
        return [output.payload for output in self.of("text") if isinstance(output.payload, chunk_pb2.TextChunk)]

    def text(self) -> str:
        return "".join(text.text for text in self.texts())

    def tokens(self) -> list[int]:
        return [token for text in self.texts() for token in text.token_ids]

    def finish_reasons(self) -> list[chunk_pb2.FinishReason]:
        return [text.finish_reason for text in self.texts() if text.finish_reason]

    def contents(self) -> dict[str, object]:
        return {port: content(self.outputs, port) for port in sorted(self.ports())}

    def rows(self, port: str) -> Array | None:
        """[n, width] of a tensor port; None for a port without items."""
        parts = [output.payload for output in self.of(port) if isinstance(output.payload, np.ndarray)]
        return np.concatenate(parts) if parts else None


async def run_logic(
    logic: StageLogic,
    params: stage_pb2.StageParams,
    inputs: Sequence[Input] | Callable[[Mapping[str, int]], Sequence[Input]] = (),
    start: Start | None = None,
    *,
    seed: int = 5,
    scope: str = "",
    stop_after: int = 1 << 30,
) -> LogicOutput:
    """Prepare a session and run it to its end, as the shell does: what only the next hop names is unknown when it is prepared. inputs: may
    be a function of what the session needs. stop_after: so many outputs, and its caller goes away."""
    start = start or Start()
    known = {port.name for port in logic.description.produces if port.payload != stage_pb2.PAYLOAD_TENSOR}
    before = Start({port: first for port, first in start.first.items() if port in known}, start.ended_ports & known, start.history)
    work = await logic.prepare(stage_pb2.Open(params=params, seed=seed, scope=scope), before)
    made = LogicOutput(work.needs)
    pieces = inputs(work.needs) if callable(inputs) else inputs
    async with aclosing(work.run(arriving(pieces), made.told, start)) as outputs:
        async for output in outputs:
            if isinstance(output, Kept):
                made.kept.append((output.port, output.first, len(made.outputs)))
            else:
                made.outputs.append(output)
            if len(made.outputs) >= stop_after:
                break
    return made


async def arriving(inputs: Sequence[Input]) -> AsyncIterator[Input]:
    """An array is overwritten when the next input is asked for, as shared memory is; others run in between."""
    for piece in inputs:
        await asyncio.sleep(0)
        if isinstance(piece.payload, np.ndarray):
            view = piece.payload.copy()
            yield Input(piece.port, piece.first, piece.count, piece.last, view)
            view.view(np.uint8)[...] = 0xFF
        else:
            yield piece


def pieces_of(port: stage_pb2.Port | str, whole: Whole, rng: random.Random, first: int = 0) -> list[Input]:
    """A port from item `first` on, in pieces of random size. The end comes with the last item or by itself. port: a name is of rows."""
    port = stage_pb2.Port(name=port) if isinstance(port, str) else port
    items = re.findall(r"\s*\S+|\s+$", whole) if isinstance(whole, str) else whole
    pieces = []
    while first < len(items):
        part = items[first : first + rng.randint(1, 9)]
        last = first + len(part) == len(items) and rng.random() < 0.5
        pieces.append(Input(port.name, first, len(part), last, _payload_of(part, port)))
        first += len(part)
    return pieces if pieces and pieces[-1].last else [*pieces, Input(port.name, first, 0, True, None)]


def _payload_of(part: Sequence[str] | bytes | Array, port: stage_pb2.Port) -> InputPayload:
    if isinstance(part, bytes):
        return chunk_pb2.MediaChunk(data=part)
    if not isinstance(part, np.ndarray):
        return chunk_pb2.TextChunk(text="".join(part), token_ids=range(len(part)))
    if part.dtype == np.float32 and port.payload == stage_pb2.PAYLOAD_AUDIO:
        data, rate = part.tobytes(), port.rate_millihertz // 1000
        encoding = chunk_pb2.AUDIO_ENCODING_FLOAT32
        return chunk_pb2.AudioChunk(data=data, encoding=encoding, sample_rate_hz=rate, channel_count=part.shape[1])
    if part.dtype == np.uint32:
        return chunk_pb2.CodeChunk(codes=part.ravel().tolist(), codebook_count=part.shape[1])
    return part


def content(outputs: Sequence[Output], port: str) -> object:
    """All that a port carried, comparable. Progress and previews, which are no items, are left out."""
    mine = [output for output in outputs if output.port == port]
    texts = [output.payload for output in mine if isinstance(output.payload, chunk_pb2.TextChunk)]
    if texts:
        return (
            "".join(text.text for text in texts),
            [token for text in texts for token in text.token_ids],
            [logprob for text in texts for logprob in text.logprobs],
            [text.finish_reason for text in texts if text.finish_reason],
        )
    return b"".join(map(_bytes, mine))


def _bytes(output: Output) -> bytes:
    match output.payload:
        case np.ndarray() as rows:
            return rows.tobytes()
        case chunk_pb2.CodeChunk() as codes:
            return np.array(codes.codes, np.uint32).tobytes()
        case chunk_pb2.AudioChunk() as audio:
            return audio.data
        case chunk_pb2.VideoChunk() as video:
            return video.data
        case chunk_pb2.AlignmentChunk() as alignment:
            return alignment.SerializeToString()  # Those of several, one after the other, are that of all their words.
        case chunk_pb2.ImageChunk() as image if not image.HasField("preview_step"):
            return image.data.data
    return b""


def begun(output: Output, count: int) -> Output:
    """The first items of an output, if they can be told apart."""
    match output.payload:
        case np.ndarray() as rows:
            return replace(output, count=count, payload=rows[:count])
        case chunk_pb2.CodeChunk(codes=codes, codebook_count=width):
            return replace(output, count=count, payload=chunk_pb2.CodeChunk(codes=codes[: count * width], codebook_count=width))
        case chunk_pb2.AudioChunk(data=data):
            return replace(output, count=count, payload=chunk_pb2.AudioChunk(data=data[: count * (len(data) // output.count)]))
    return output


def joined(before: object, after: object) -> object:
    """The outputs before a loss and those after it, as one."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(one + other for one, other in zip(before, after, strict=True))
    return after if not before else before if not after else before + after  # type: ignore[operator]


def history_of(port: str, outputs: Sequence[Output]) -> chunk_pb2.Chunk:
    """A checkpoint port up to now as one chunk."""
    whole = chunk_pb2.Chunk(port=port, count=sum(output.count for output in outputs), last=outputs[-1].last)
    for output in outputs:
        match output.payload:
            case chunk_pb2.TextChunk() as text:
                whole.text.MergeFrom(text)
                whole.text.text = ""
            case chunk_pb2.CodeChunk() as codes:
                whole.codes.codes.extend(codes.codes)
                whole.codes.codebook_count = codes.codebook_count
    return whole


def history_of_text(tokens: Sequence[int], finish: chunk_pb2.FinishReason = chunk_pb2.FINISH_REASON_UNSPECIFIED) -> chunk_pb2.Chunk:
    """A text port up to now. The text itself tells a Thinker nothing that the tokens do not."""
    text = chunk_pb2.TextChunk(token_ids=tokens, finish_reason=finish)
    return chunk_pb2.Chunk(port="text", count=len(tokens), last=bool(finish), text=text)


def start_at(first: Mapping[str, int], *history: chunk_pb2.Chunk, ended: Collection[str] = ()) -> Start:
    """Where to go on; the ports of the histories at their ends."""
    given = {chunk.port: chunk for chunk in history if chunk.count or chunk.last}
    return Start({chunk.port: chunk.count for chunk in history} | dict(first), frozenset(ended), given)
