"""One session of a StageLogic without a server: inputs from a list, outputs in lists."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omnistage.stage.logic import Input, Kept, Output, SessionTiming, StageLogic, Start
from omnistage.v1 import chunk_pb2, stage_pb2

Array = NDArray[np.generic]


@dataclass
class LogicOutput:
    """All that a session gave. kept: input port, first item, and how many items of the only output port came before it was said."""

    needs: Mapping[str, int]
    outputs: list[Output] = field(default_factory=list)
    kept: list[tuple[str, int, int]] = field(default_factory=list)

    def of(self, port: str) -> list[Output]:
        return [output for output in self.outputs if output.port == port]

    def count(self, port: str) -> int:
        return sum(output.count for output in self.of(port))

    def ended(self) -> list[str]:
        """Ports in the order in which they ended."""
        return [output.port for output in self.outputs if output.last]

    def text(self) -> str:
        return "".join(output.payload.text for output in self.of("text") if isinstance(output.payload, chunk_pb2.TextChunk))

    def tokens(self) -> list[int]:
        return [
            token for output in self.of("text") if isinstance(output.payload, chunk_pb2.TextChunk) for token in output.payload.token_ids
        ]

    def finish_reasons(self) -> list[chunk_pb2.FinishReason]:
        payloads = [output.payload for output in self.of("text")]
        return [payload.finish_reason for payload in payloads if isinstance(payload, chunk_pb2.TextChunk) and payload.finish_reason]

    def rows(self, port: str) -> Array | None:
        """[n, width] of a port of tensors or codes; None for a port without items."""
        parts = []
        for output in self.of(port):
            match output.payload:
                case np.ndarray():
                    parts.append(output.payload)
                case chunk_pb2.CodeChunk() as chunk:
                    parts.append(np.array(chunk.codes, np.uint32).reshape(output.count, chunk.codebook_count))
        return np.concatenate(parts) if parts else None

    def audio(self) -> bytes:
        return b"".join(output.payload.data for output in self.of("audio") if isinstance(output.payload, chunk_pb2.AudioChunk))

    def pictures(self) -> list[bytes]:
        """Whole pictures; a picture begins with the part at offset 0."""
        pictures: list[bytes] = []
        for output in self.of("image"):
            if isinstance(output.payload, chunk_pb2.ImageChunk) and not output.payload.HasField("preview_step"):
                part = output.payload.data
                if part.offset == 0:
                    pictures.append(b"")
                assert len(pictures[-1]) == part.offset
                pictures[-1] += part.data
        return pictures


async def run_logic(
    logic: StageLogic,
    params: stage_pb2.StageParams,
    inputs: Sequence[Input] = (),
    start: Start | None = None,
    *,
    seed: int = 5,
    scope: str = "",
) -> LogicOutput:
    """Prepare a session and run it to its end, as the shell does: what only the next hop names is unknown when it is prepared."""
    start = start or Start()
    hidden = {"hidden", "features"}
    known = Start({port: first for port, first in start.first.items() if port not in hidden}, start.ended - hidden, start.history)
    work = await logic.prepare(stage_pb2.Open(params=params, seed=seed, scope=scope), known)
    made = LogicOutput(work.needs)
    async with aclosing(work.run(_each(inputs), SessionTiming(), start)) as outputs:
        async for output in outputs:
            if isinstance(output, Kept):
                made.kept.append((output.port, output.first, sum(one.count for one in made.outputs)))
            else:
                made.outputs.append(output)
    return made


async def _each(inputs: Sequence[Input]) -> AsyncIterator[Input]:
    """An array is overwritten when the next input is asked for, as shared memory is."""
    for piece in inputs:
        if isinstance(piece.payload, np.ndarray):
            view = piece.payload.copy()
            yield Input(piece.port, piece.first, piece.count, piece.last, view)
            view.fill(np.nan)
        else:
            yield piece


def pieces_of(port: str, rows: Array, rng: random.Random, first: int = 0) -> list[Input]:
    """Rows [n, width] from row `first` on as inputs of random size: codes for uint32, tensors for float32. The last may be empty."""
    pieces = []
    while first < len(rows):
        part = rows[first : first + rng.randint(1, 9)]
        payload = chunk_pb2.CodeChunk(codes=part.ravel().tolist(), codebook_count=part.shape[1]) if rows.dtype == np.uint32 else part
        last = first + len(part) == len(rows) and rng.random() < 0.5
        pieces.append(Input(port, first, len(part), last, payload))
        first += len(part)
    return pieces if pieces and pieces[-1].last else [*pieces, Input(port, first, 0, True, None)]


def history_of_text(tokens: Sequence[int], finish: chunk_pb2.FinishReason = chunk_pb2.FINISH_REASON_UNSPECIFIED) -> chunk_pb2.Chunk:
    """A text port up to now. The text itself tells a Thinker nothing that the tokens do not."""
    text = chunk_pb2.TextChunk(token_ids=tokens, finish_reason=finish)
    return chunk_pb2.Chunk(port="text", count=len(tokens), last=bool(finish), text=text)


def history_of_codes(codes: NDArray[np.uint32]) -> chunk_pb2.Chunk:
    """A port of codes [frames, codebooks] up to now."""
    chunk = chunk_pb2.CodeChunk(codes=codes.ravel().tolist(), codebook_count=codes.shape[1])
    return chunk_pb2.Chunk(port="codes", count=len(codes), codes=chunk)


def start_at(first: Mapping[str, int], *history: chunk_pb2.Chunk, ended: Collection[str] = ()) -> Start:
    """Where to go on; the ports of the histories at their ends."""
    given = {chunk.port: chunk for chunk in history if chunk.count or chunk.last}
    return Start({chunk.port: chunk.count for chunk in history} | dict(first), frozenset(ended), given)
