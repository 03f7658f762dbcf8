"""The contract of a model of any family and kind: one suite, run for each case that helpers/families.py registers.

A check takes a loaded model behind its stage and a sample of what it is asked; it needs no server. `CHECKS` are all of them."""

from __future__ import annotations

import asyncio
import operator
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.constraints import BAD_CONSTRAINTS, CONSTRAINTS, keeps
from helpers.servers import family_logic
from omnistage.diffusion.stage import MAX_PART_BYTES
from omnistage.models.conversation import Medium
from omnistage.models.interface import MAX_CLIP_BYTES
from omnistage.stage.logic import Input, InputPayload, Kept, Output, SessionTiming, StageLogic, Start
from omnistage.stage.model import MAX_ROW_BYTES
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

Array = NDArray[np.generic]
Whole = str | bytes | Array
"""All that goes into a port: the text; rows [n, width] in the element type of the port, uint32 for codes; float32 samples [n, channels]; a
file."""

CUTS = 5
"""Places at which a run is cut to go on elsewhere."""

AT_ONCE = 3
LONGEST_S = 60.0


@dataclass(frozen=True)
class SampleRequest:
    """A request that the model answers, and all that goes into its input ports."""

    params: stage_pb2.StageParams
    inputs: Mapping[str, Whole] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One kind of one family. refused: params that this model cannot serve, and the field that it has to name, besides what every model
    of the kind is asked. slow: its weights have to be read, or torch is needed. checkpoint: its folder; None: the
    family's own. fixture: that gives its folder. own: makes one that is in no registry. alike: whether what came before and
    after a loss is the whole, by port; where there is none, equal to the bit."""

    family: str
    kind: str
    sample: Callable[[], SampleRequest]
    refused: Sequence[tuple[stage_pb2.StageParams, str]] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    slow: bool = False
    checkpoint: Path | None = None
    fixture: str = ""
    own: Callable[[], StageLogic] | None = None
    alike: Mapping[str, Callable[[object, object], bool]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name or f"{self.family}-{self.kind}"

    def load(self) -> StageLogic:
        return self.own() if self.own is not None else family_logic(self.family, self.kind, self.options, self.checkpoint)


@dataclass
class Loaded:
    """A case whose model is loaded."""

    case: Case
    logic: StageLogic
    sample: SampleRequest

    @property
    def produces(self) -> Mapping[str, stage_pb2.Port]:
        return {port.name: port for port in self.logic.description.produces}


Check = Callable[[Loaded, random.Random], Awaitable[None]]

# Running -------------------------------------------------------------------------------------------------------------------------------


@dataclass
class SessionOutput:
    """All that a session gave, in order, and what it told of itself."""

    outputs: list[Output | Kept] = field(default_factory=list)
    told: SessionTiming = field(default_factory=SessionTiming)

    def ports(self) -> set[str]:
        return {output.port for output in self.outputs if isinstance(output, Output)}


async def run(
    loaded: Loaded, rng: random.Random, start: Start | None = None, *, seed: int = 5, stop_after: int = 1 << 30, inputs: int = 1 << 30
) -> SessionOutput:
    """One session, as the shell runs it; `stop_after` so many outputs its caller goes away. inputs: so many pieces come in, and no end."""
    start = start or Start()
    known = {name for name, port in loaded.produces.items() if port.payload != stage_pb2.PAYLOAD_TENSOR}
    before = Start({port: first for port, first in start.first.items() if port in known}, start.ended, start.history)
    async with asyncio.timeout(LONGEST_S):
        work = await loaded.logic.prepare(stage_pb2.Open(params=loaded.sample.params, seed=seed), before)
        kept = work.needs if start.first else {}
        made = SessionOutput()
        async with aclosing(work.run(arriving(cut(loaded, rng, kept)[:inputs]), made.told, start)) as outputs:
            async for output in outputs:
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


def cut(loaded: Loaded, rng: random.Random, needs: Mapping[str, int]) -> list[Input]:
    """The inputs from the needed items on, in pieces of random size, the ports mixed at random."""
    ports = {port.name: port for port in loaded.logic.description.accepts}
    left = {port: pieces_of(ports[port], whole, rng, needs.get(port, 0)) for port, whole in loaded.sample.inputs.items()}
    mixed = []
    while left:
        port = rng.choice(sorted(left))
        mixed.append(left[port].pop(0))
        if not left[port]:
            del left[port]
    return mixed


def pieces_of(port: stage_pb2.Port, whole: Whole, rng: random.Random, first: int) -> list[Input]:
    """A port from item `first` on. The end comes with the last item or by itself."""
    items = re.findall(r"\s*\S+|\s+$", whole) if isinstance(whole, str) else whole
    pieces = []
    while first < len(items):
        part = items[first : first + rng.randint(1, 9)]
        last = first + len(part) == len(items) and rng.random() < 0.5
        pieces.append(Input(port.name, first, len(part), last, payload_of(part, port)))
        first += len(part)
    return pieces if pieces and pieces[-1].last else [*pieces, Input(port.name, first, 0, True, None)]


def payload_of(part: Sequence[str] | bytes | Array, port: stage_pb2.Port) -> InputPayload:
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


# Output, however it was cut ------------------------------------------------------------------------------------------------------------


def content(outputs: Sequence[Output], port: str) -> object:
    """All that a port carried, comparable. Progress and previews, which are no items, are left out."""
    mine = [output for output in outputs if output.port == port]
    texts = [output.payload for output in mine if isinstance(output.payload, chunk_pb2.TextChunk)]
    if texts:
        return (
            "".join(text.text for text in texts),
            [token for text in texts for token in text.token_ids],
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


def contents(made: SessionOutput) -> dict[str, object]:
    outputs = [output for output in made.outputs if isinstance(output, Output)]
    return {port: content(outputs, port) for port in sorted(made.ports())}


def cut_after(loaded: Loaded, made: SessionOutput, count: int, rng: random.Random) -> tuple[Start, dict[str, object]]:
    """The point where a session goes on that was lost after so many outputs, and what had come by then. On a port to the next stage, which
    says where it needs the port, some of that may be wanted again."""
    before = [output for output in made.outputs[:count] if isinstance(output, Output)]
    held: dict[str, list[Output]] = {port: [output for output in before if output.port == port] for port in loaded.produces}
    for port, outputs in held.items():
        if loaded.produces[port].payload == stage_pb2.PAYLOAD_TENSOR and not (outputs and outputs[-1].last):
            del outputs[rng.randint(0, len(outputs)) :]
    first = {port: sum(output.count for output in outputs) for port, outputs in held.items()}
    ended = frozenset(port for port, outputs in held.items() if outputs and outputs[-1].last)
    history = {port: history_of(port, held[port]) for port in held if loaded.produces[port].compact and held[port]}
    return Start(first, ended, history), {port: content(outputs, port) for port, outputs in held.items()}


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


def joined(before: object, after: object) -> object:
    """The outputs before a loss and those after it, as one."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(one + other for one, other in zip(before, after, strict=True))
    return after if not before else before if not after else before + after  # type: ignore[operator]


# The checks ----------------------------------------------------------------------------------------------------------------------------


async def check_it_is_described(loaded: Loaded, rng: random.Random) -> None:
    """Every port says what it carries; what a request may hold is said."""
    said = loaded.logic.description
    assert said.model and said.revision and said.max_sessions
    assert said.inputs
    ports = [*said.accepts, *said.produces]
    assert said.produces and len({port.name for port in said.produces}) == len(said.produces)
    for port in ports:
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,31}", port.name)
        is_tensor = port.payload == stage_pb2.PAYLOAD_TENSOR
        assert (port.element_type != tensor_pb2.ELEMENT_TYPE_UNSPECIFIED) == is_tensor
        assert bool(port.width) == (is_tensor or port.payload in (stage_pb2.PAYLOAD_CODES, stage_pb2.PAYLOAD_AUDIO))
        if port.payload in (stage_pb2.PAYLOAD_CODES, stage_pb2.PAYLOAD_AUDIO):
            # Latents that are kept as codes are no frames of a time.
            assert port.rate_millihertz or (loaded.case.kind == "diffusion" and port.payload == stage_pb2.PAYLOAD_CODES)
        if port.compact:
            assert port.payload in (stage_pb2.PAYLOAD_TEXT, stage_pb2.PAYLOAD_CODES), "a checkpoint is kept by callers in messages"
    known = {port.name for port in said.accepts}
    needed = {port.name for port in said.accepts if port.payload != stage_pb2.PAYLOAD_MEDIA}
    assert needed <= set(loaded.sample.inputs) <= known, "the sample has something for every input port, but those of media"


async def check_every_port_ends_once_and_carries_what_it_says(loaded: Loaded, rng: random.Random) -> None:
    """Items of the right element type and width, in pieces of at most 1 MiB; after the last piece nothing."""
    made = await run(loaded, rng)
    assert made.ports() == set(loaded.produces)
    ended: list[str] = []
    for output in made.outputs:
        if isinstance(output, Kept):
            assert output.port in {port.name for port in loaded.logic.description.accepts}
            continue
        assert output.port not in ended, f"port {output.port!r} goes on after its end"
        assert output.payload is not None or not output.count
        ended += [output.port] if output.last else []
        port = loaded.produces[output.port]
        if isinstance(output.payload, np.ndarray):
            assert output.element_type == port.element_type
            assert output.payload.shape == (output.count, port.width)
            assert output.payload.nbytes <= MAX_ROW_BYTES or output.count == 1
        if isinstance(output.payload, chunk_pb2.VideoChunk):
            assert output.count and len(output.payload.data) <= MAX_CLIP_BYTES
        if isinstance(output.payload, chunk_pb2.ImageChunk):
            assert len(output.payload.data.data) <= MAX_PART_BYTES
        if isinstance(output.payload, chunk_pb2.AlignmentChunk):
            assert len(output.payload.words) == output.count
        if isinstance(output.payload, chunk_pb2.CodeChunk):
            assert output.payload.codebook_count == port.width and len(output.payload.codes) == output.count * port.width
    assert sorted(ended) == sorted(loaded.produces)


async def check_equal_requests_are_answered_alike_however_the_input_comes(loaded: Loaded, rng: random.Random) -> None:
    whole = contents(await run(loaded, rng))
    assert any(whole.values())
    for _ in range(3):
        assert contents(await run(loaded, rng)) == whole


async def check_alone_and_among_others_it_is_the_same(loaded: Loaded, rng: random.Random) -> None:
    alone = [contents(await run(loaded, rng, seed=seed)) for seed in range(AT_ONCE)]
    together = await asyncio.gather(*(run(loaded, rng, seed=seed) for seed in range(AT_ONCE)))
    assert [contents(made) for made in together] == alone


async def check_it_goes_on_wherever_it_was_lost(loaded: Loaded, rng: random.Random) -> None:
    """After any output, with what the caller and the next stage hold: both parts are the whole."""
    made = await run(loaded, rng)
    whole = contents(made)
    places: Sequence[int] = range(len(made.outputs) + 1)
    if loaded.case.slow:
        places = sorted({0, len(made.outputs), *rng.choices(places, k=CUTS)})
    for count in places:
        start, before = cut_after(loaded, made, count, rng)
        rest = await run(loaded, rng, start)
        assert not rest.ports() & start.ended, f"after {count} outputs"
        after = contents(rest)
        for port in loaded.produces:
            alike = loaded.case.alike.get(port, operator.eq)
            assert alike(joined(before[port], after.get(port, b"")), whole[port]), f"port {port!r} after {count} outputs, at {start.first}"


async def check_a_place_beyond_the_end_is_refused(loaded: Loaded, rng: random.Random) -> None:
    """Nobody can have come so far: to go on in silence would be a gap. Checkpoints bring their items with them, progress has none."""
    made = await run(loaded, rng)
    for port, said in loaded.produces.items():
        if said.compact or said.payload == stage_pb2.PAYLOAD_PROGRESS:
            continue
        count = sum(output.count for output in made.outputs if isinstance(output, Output) and output.port == port)
        with pytest.raises(StageError) as refused:
            await run(loaded, rng, Start({port: count + 1}))
        assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.positions")
        assert_free(loaded)
    assert contents(await run(loaded, rng)) == contents(made)


async def check_a_port_that_nobody_wants_changes_nothing_else(loaded: Loaded, rng: random.Random) -> None:
    """Nor do all but one."""
    whole = contents(await run(loaded, rng))
    for port in loaded.produces:
        for unwanted in ({port}, loaded.produces.keys() - {port}):
            made = await run(loaded, rng, Start(ended=frozenset(unwanted)))
            wanted = {port: carried for port, carried in whole.items() if port not in unwanted}
            assert contents(made) == wanted
    assert (await run(loaded, rng, Start(ended=frozenset(loaded.produces)))).outputs == []


async def check_a_session_that_is_given_up_leaves_nothing(loaded: Loaded, rng: random.Random) -> None:
    """After any number of outputs, and at any other moment; the next one is served as if there had been none."""
    made = await run(loaded, rng)
    for _ in range(CUTS):
        await run(loaded, rng, stop_after=rng.randint(1, max(len(made.outputs) - 1, 1)))
        assert_free(loaded)
    for _ in range(CUTS):
        tasks = [asyncio.create_task(run(loaded, rng, seed=seed)) for seed in range(AT_ONCE)]
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, SessionOutput | asyncio.CancelledError), ended
        assert_free(loaded)
    assert contents(await run(loaded, rng)) == contents(made)


async def check_an_interrupt_ends_it(loaded: Loaded, rng: random.Random) -> None:
    """An input that ends before its last item ends the run: with what is there, or a typed error, and the next session is served."""
    pieces = len(cut(loaded, rng, {}))
    for count in sorted({0, *(rng.randrange(max(pieces - 1, 1)) for _ in range(CUTS))}) if pieces else ():
        with suppress(StageError):
            await run(loaded, rng, inputs=count)
        assert_free(loaded)
    assert any(contents(await run(loaded, rng)).values())


async def check_the_text_keeps_to_what_is_asked(loaded: Loaded, rng: random.Random) -> None:
    """In every form that the model says it can, and goes on so wherever it was cut."""
    for form in loaded.logic.description.constraints:
        params = stage_pb2.StageParams()
        params.CopyFrom(loaded.sample.params)
        params.thinker.MergeFrom(stage_pb2.ThinkerParams(constraint=CONSTRAINTS[form], max_tokens=64))
        params.thinker.ClearField("stop")
        params.thinker.ClearField("verbatim")
        asked = Loaded(loaded.case, loaded.logic, replace(loaded.sample, params=params))
        made = await run(asked, rng)
        whole = contents(made)
        said = whole["text"]
        assert isinstance(said, tuple) and keeps(form, said[0]) and said[2] == [chunk_pb2.FINISH_REASON_STOP], said
        for count in (rng.randrange(len(made.outputs)), len(made.outputs)):
            start, before = cut_after(asked, made, count, rng)
            after = contents(await run(asked, rng, start))
            for port in loaded.produces:
                assert joined(before[port], after.get(port, b"")) == whole[port], f"port {port!r} after {count} outputs"


def assert_free(loaded: Loaded) -> None:
    load = loaded.logic.load()
    assert (load.queued, load.kv_pages_used) == (0, 0)


async def check_what_it_cannot_do_is_refused_and_the_next_one_is_served(loaded: Loaded, rng: random.Random) -> None:
    """With the field and a text that says what to do, before anything is put out: what only media tell may be found when they are read,
    everything else before the session is open."""
    for params, named in [*loaded.case.refused, *beyond(loaded)]:
        with pytest.raises(StageError) as refused:
            work = await loaded.logic.prepare(stage_pb2.Open(params=params, seed=1), Start())
            assert named == "thinker.messages.parts.media", named
            async with aclosing(work.run(arriving(()), SessionTiming(), Start())) as outputs:
                assert [output async for output in outputs] == []
        assert refused.value.reason == "BAD_REQUEST", refused.value
        assert refused.value.metadata["field"] == named
        assert len(refused.value.message) > len(named) + 8
        assert_free(loaded)
    assert contents(await run(loaded, rng))


def beyond(loaded: Loaded) -> list[tuple[stage_pb2.StageParams, str]]:
    """The params that a model of the kind cannot do by its own account, each with what it cannot."""
    said, kind = loaded.logic.description, loaded.case.kind
    asks: list[tuple[stage_pb2.StageParams, str]] = []

    def ask(named: str, **fields: object) -> None:
        params = stage_pb2.StageParams()
        params.CopyFrom(loaded.sample.params)
        message = getattr(params, kind)
        message.MergeFrom(type(message)(**fields))
        if "constraint" in fields and message.messages:
            message.ClearField("verbatim")  # Nothing else is checked of text that is given.
        asks.append((params, f"{kind}.{named}"))

    missing: list[Medium] = [medium for medium in ("image", "audio", "video") if medium not in said.inputs]
    for medium in missing:
        media = stage_pb2.Media(data=b"x", media_type=f"{medium}/x-none")
        if kind == "thinker":
            ask("messages.parts.media", messages=[stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media)])])
        elif kind == "diffusion":
            ask("images", images=[media])
    if kind == "thinker":
        ask("sampling.logit_bias", sampling=stage_pb2.Sampling(logit_bias={(1 << 32) - 1: 1}))
        ask("messages.parts.port", messages=[stage_pb2.Message(role="user", parts=[stage_pb2.Part(port="nowhere")])])
        for form, given in CONSTRAINTS.items():
            if form not in said.constraints:
                ask("constraint", constraint=given)
        for form, bad in BAD_CONSTRAINTS:
            if form in said.constraints:
                ask(f"constraint.{form}", constraint=bad)
        ask("top_logprobs", top_logprobs=21)
    elif kind == "talker":
        ask("voice", voice="nobody")
    elif kind == "code2wav":
        ask("sample_rate_hz", sample_rate_hz=12_345)
    else:
        ask("media_type", media_type="image/x-none")
        carried = {port.payload for port in said.produces}
        if stage_pb2.PAYLOAD_VIDEO not in carried:
            ask("frames", frames=9)
        if not {stage_pb2.PAYLOAD_AUDIO, stage_pb2.PAYLOAD_VIDEO} & carried:
            ask("duration_s", duration_s=2)
    return asks


async def check_another_replica_is_the_same(loaded: Loaded, rng: random.Random) -> None:
    """Another replica has an equal revision, so that a session may go on there."""
    other = loaded.case.load()
    try:
        assert other.description.revision == loaded.logic.description.revision
        again = Loaded(loaded.case, other, loaded.sample)
        assert contents(await run(again, rng)) == contents(await run(loaded, rng))
    finally:
        await other.close()


async def check_what_it_tells_of_an_answer_is_true(loaded: Loaded, rng: random.Random) -> None:
    """Where a seed is said not to matter, another seed gives the same. The unspoken words are those of the whole answer, also for an answer
    of which nothing is left to do."""
    one, other = await run(loaded, rng, seed=5), await run(loaded, rng, seed=6)
    assert one.told.drew == other.told.drew
    if one.told.drew is False:
        assert contents(one) == contents(other)
    ended = await run(loaded, rng, Start(ended=frozenset(loaded.produces)))
    assert (ended.told.unspoken, ended.told.unspoken_runs) == (one.told.unspoken, one.told.unspoken_runs)
    assert ended.told.drew == one.told.drew


CHECKS: Sequence[Check] = (
    check_it_is_described,
    check_every_port_ends_once_and_carries_what_it_says,
    check_equal_requests_are_answered_alike_however_the_input_comes,
    check_alone_and_among_others_it_is_the_same,
    check_it_goes_on_wherever_it_was_lost,
    check_a_place_beyond_the_end_is_refused,
    check_a_port_that_nobody_wants_changes_nothing_else,
    check_a_session_that_is_given_up_leaves_nothing,
    check_an_interrupt_ends_it,
    check_what_it_cannot_do_is_refused_and_the_next_one_is_served,
    check_the_text_keeps_to_what_is_asked,
    check_another_replica_is_the_same,
    check_what_it_tells_of_an_answer_is_true,
)
