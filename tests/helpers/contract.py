"""The contract of a model of any family and kind: one suite, run for each case that helpers/families.py registers.

A check takes a loaded model behind its stage and a sample of what it is asked; it needs no server. `CHECKS` are all of them."""

from __future__ import annotations

import asyncio
import json
import operator
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from helpers.logic import LogicOutput, Whole, arriving, begun, content, history_of, joined, pieces_of, run_logic
from helpers.servers import family_logic
from omnistage.diffusion.stage import MAX_PART_BYTES
from omnistage.models.conversation import Medium
from omnistage.models.interface import MAX_CLIP_BYTES
from omnistage.stage.content import MAX_ROW_BYTES
from omnistage.stage.logic import Input, Output, SessionTiming, StageLogic, Start
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

CUTS = 5
"""Places at which a run is cut to go on elsewhere."""

AT_ONCE = 3
LONGEST_S = 60.0
FURTHEST = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRequest:
    """A request that the model answers, and all that goes into its input ports."""

    params: stage_pb2.StageParams
    inputs: Mapping[str, Whole] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One kind of one family. refused: params that this model cannot serve, and the field that it has to name, besides what every model of
    the kind is asked. slow: its weights have to be read, or torch is needed. checkpoint: its folder; None: the family's own. fixture: that
    gives its folder. own: makes one that is in no registry. alike: whether what came before and after a loss is the whole, by port; where
    there is none, equal to the bit. held_back: the last frames of an input that may be needed again."""

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
    held_back: int = 40

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


async def run(
    loaded: Loaded,
    rng: random.Random,
    start: Start | None = None,
    *,
    seed: int = 5,
    stop_after: int = 1 << 30,
    most_inputs: int = 1 << 30,
    begin: Mapping[str, int] | None = None,
) -> LogicOutput:
    """One session, as the shell runs it. most_inputs: so many pieces come in, and no end. begin: the first item of an input, which is no
    later than what the session needs by default."""

    def inputs(needs: Mapping[str, int]) -> Sequence[Input]:
        needed = {port: rng.choice((first, first, 0, rng.randint(0, first))) for port, first in needs.items()}
        return cut(loaded, rng, needed if begin is None else begin)[:most_inputs]

    async with asyncio.timeout(LONGEST_S):
        return await run_logic(loaded.logic, loaded.sample.params, inputs, start, seed=seed, stop_after=stop_after)


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


def cut_after(loaded: Loaded, made: LogicOutput, count: int, rng: random.Random) -> tuple[Start, dict[str, object]]:
    """The point where a session goes on that was lost after so many outputs, and what had come by then. The last output of a port may be
    there in part. On a port to the next stage, which says where it needs the port, some of that may be wanted again; nobody may want a port
    any more that is no checkpoint."""
    ports, held = loaded.produces, {port: list[Output]() for port in loaded.produces}
    for output in made.outputs[:count]:
        held[output.port].append(output)
    ended = {port for port, outputs in held.items() if outputs and outputs[-1].last}
    for port in ports.keys() - ended:
        outputs = held[port]
        if ports[port].payload == stage_pb2.PAYLOAD_TENSOR:
            del outputs[rng.randint(0, len(outputs)) :]
        if outputs and outputs[-1].count:
            outputs[-1] = begun(outputs[-1], rng.randint(1, outputs[-1].count))
    first = {port: sum(output.count for output in outputs) for port, outputs in held.items()}
    history = {port: history_of(port, outputs) for port, outputs in held.items() if ports[port].compact and outputs}
    ended |= {port for port in sorted(ports) if not ports[port].compact and rng.random() < 0.1}
    return Start(first, frozenset(ended), history), {port: content(outputs, port) for port, outputs in held.items()}


@contextmanager
def refused(loaded: Loaded, field_name: str) -> Iterator[None]:
    """A request that names a fault in this field is refused, and nothing is held."""
    with pytest.raises(StageError) as error:
        yield
    assert (error.value.reason, error.value.metadata["field"]) == ("BAD_REQUEST", field_name), error.value
    assert len(error.value.message) > len(field_name) + 8
    assert_free(loaded)


def assert_free(loaded: Loaded) -> None:
    load = loaded.logic.load()
    assert (load.queued, load.kv_pages_used) == (0, 0)


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
    assert {port for port, _, _ in made.kept} <= {port.name for port in loaded.logic.description.accepts}
    assert not any(made.needs.values())
    ended: list[str] = []
    for output in made.outputs:
        assert output.port not in ended, f"port {output.port!r} goes on after its end"
        assert output.payload is not None or not output.count
        ended += [output.port] if output.last else []
        port = loaded.produces[output.port]
        match output.payload:
            case np.ndarray() as rows:
                assert output.element_type == port.element_type
                assert rows.shape == (output.count, port.width)
                assert rows.nbytes <= MAX_ROW_BYTES or output.count == 1
            case chunk_pb2.VideoChunk() as video:
                assert output.count and len(video.data) <= MAX_CLIP_BYTES
            case chunk_pb2.ImageChunk() as image:
                assert len(image.data.data) <= MAX_PART_BYTES
            case chunk_pb2.AlignmentChunk() as alignment:
                assert len(alignment.words) == output.count
            case chunk_pb2.CodeChunk() as codes:
                assert codes.codebook_count == port.width and len(codes.codes) == output.count * port.width
    assert sorted(ended) == sorted(loaded.produces)


async def check_equal_requests_are_answered_alike_however_the_input_comes(loaded: Loaded, rng: random.Random) -> None:
    whole = (await run(loaded, rng)).contents()
    assert any(whole.values())
    for _ in range(3):
        assert (await run(loaded, rng)).contents() == whole


async def check_alone_and_among_others_it_is_the_same(loaded: Loaded, rng: random.Random) -> None:
    alone = [(await run(loaded, rng, seed=seed)).contents() for seed in range(AT_ONCE)]
    together = await asyncio.gather(*(run(loaded, rng, seed=seed) for seed in range(AT_ONCE)))
    assert [made.contents() for made in together] == alone


async def check_it_goes_on_wherever_it_was_lost(loaded: Loaded, rng: random.Random) -> None:
    """After any output, with what the caller and the next stage hold: both parts are the whole. A token is with the caller before anybody
    can have made something from its row."""
    made = await run(loaded, rng)
    whole = made.contents()
    places: Sequence[int] = range(len(made.outputs) + 1)
    if loaded.case.slow:
        places = sorted({0, len(made.outputs), *rng.choices(places, k=CUTS)})
    for count in places:
        start, before = cut_after(loaded, made, count, rng)
        rest = await run(loaded, rng, start)
        wanted = loaded.produces.keys() - start.ended_ports
        assert sorted(rest.ended()) == sorted(wanted) and rest.ports() == wanted, f"after {count} outputs"
        after, reached = rest.contents(), dict(start.first)
        for output in rest.outputs:
            reached[output.port] += output.count
            assert "hidden" not in wanted or reached["hidden"] <= reached["text"], f"after {count} outputs"
        for port in wanted:
            alike = loaded.case.alike.get(port, operator.eq)
            assert reached[port] == made.count(port)
            assert alike(joined(before[port], after.get(port, b"")), whole[port]), f"port {port!r} after {count} outputs, at {start.first}"


async def check_it_goes_on_without_what_it_said_is_needless(loaded: Loaded, rng: random.Random) -> None:
    """Wherever it says that nobody needs some of its input any more, another one goes on from the rest of it, and from nothing less."""
    made = await run(loaded, rng)
    whole, firsts = made.contents(), [first for _, first, _ in made.kept]
    assert firsts == sorted(set(firsts))
    for port, first, count in rng.sample(made.kept, min(CUTS, len(made.kept))) if loaded.case.slow else made.kept:
        before = LogicOutput({}, made.outputs[:count])
        start = Start({port: before.count(port) for port in loaded.produces}, frozenset(before.ended()))
        for begin in {0, first, rng.randint(0, first)}:
            rest = await run(loaded, rng, start, begin={port: begin})
            assert {port: joined(before.contents().get(port, b""), rest.contents().get(port, b"")) for port in whole} == whole
            assert all(again > first - loaded.case.held_back for _, again, _ in rest.kept)
    if loaded.case.kind == "code2wav":
        ((port, given),) = loaded.sample.inputs.items()
        assert max(firsts, default=0) >= len(given) - loaded.case.held_back
        for begin, named in ((len(given) * 3 // 5, port), (len(given), "resume.positions" if loaded.case.fixture else port)):
            with refused(loaded, named):
                await run(loaded, rng, Start({"audio": 300}), begin={port: begin})


async def check_a_place_beyond_the_end_is_refused(loaded: Loaded, rng: random.Random) -> None:
    """Nobody can have come so far: to go on in silence would be a gap. Checkpoints bring their items with them, progress has none."""
    made = await run(loaded, rng)
    for port, said in loaded.produces.items():
        if not said.compact and said.payload != stage_pb2.PAYLOAD_PROGRESS:
            for first in (made.count(port) + 1, 1 << 40, FURTHEST):
                with refused(loaded, "resume.positions"):
                    await run(loaded, rng, Start({port: first}), begin={})
    assert (await run(loaded, rng)).contents() == made.contents()


async def check_a_port_that_nobody_wants_changes_nothing_else(loaded: Loaded, rng: random.Random) -> None:
    """Nor do all but one."""
    whole = (await run(loaded, rng)).contents()
    for port in loaded.produces:
        for unwanted in ({port}, loaded.produces.keys() - {port}):
            made = await run(loaded, rng, Start(ended_ports=frozenset(unwanted)))
            wanted = {port: carried for port, carried in whole.items() if port not in unwanted}
            assert made.contents() == wanted
    assert (await run(loaded, rng, Start(ended_ports=frozenset(loaded.produces)))).outputs == []


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
            assert isinstance(ended, LogicOutput | asyncio.CancelledError), ended
        assert_free(loaded)
    assert (await run(loaded, rng)).contents() == made.contents()


async def check_an_interrupt_ends_it(loaded: Loaded, rng: random.Random) -> None:
    """An input that ends before its last item ends the run: with what is there, or a typed error, and the next session is served."""
    pieces = len(cut(loaded, rng, {}))
    for count in sorted({0, *(rng.randrange(max(pieces - 1, 1)) for _ in range(CUTS))}) if pieces else ():
        with suppress(StageError):
            await run(loaded, rng, most_inputs=count)
        assert_free(loaded)
    assert any((await run(loaded, rng)).contents().values())


LISTED = ["a", 7, "é", None]
CONSTRAINTS = {
    "json_schema": stage_pb2.Constraint(json_schema=json.dumps({"type": "array", "items": {"enum": LISTED}, "minItems": 2, "maxItems": 3})),
    "regex": stage_pb2.Constraint(regex="(no|yes), [0-9]{3}é?"),
    "choice": stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["left", "le\nft", 'a "b"', "日本"])),
}
"""One of each form; a text that keeps to any of them has 64 tokens at most."""

BAD_CONSTRAINTS = (
    ("json_schema", stage_pb2.Constraint(json_schema="{")),
    ("json_schema", stage_pb2.Constraint(json_schema='{"enum": []}')),
    ("json_schema", stage_pb2.Constraint(json_schema='{"not": {}}')),
    ("json_schema", stage_pb2.Constraint(json_schema="[" * 1000)),
    ("json_schema", stage_pb2.Constraint(json_schema="")),
    ("json_schema", stage_pb2.Constraint(json_schema='{"const": "' + "a" * 65_536 + '"}')),
    ("regex", stage_pb2.Constraint(regex="(a")),
    ("regex", stage_pb2.Constraint(regex="(?=a)b")),
    ("regex", stage_pb2.Constraint(regex="[^\\s\\S]")),
    ("choice", stage_pb2.Constraint(choice=stage_pb2.Choices())),
    ("choice", stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["a", ""]))),
)


def keeps(form: str, text: str) -> bool:
    """Whether a text keeps to the constraint of this form."""
    match form:
        case "json_schema":
            values = json.loads(text)
            return 2 <= len(values) <= 3 and all(value in LISTED for value in values)
        case "regex":
            return re.fullmatch(CONSTRAINTS[form].regex, text) is not None
    return text in CONSTRAINTS[form].choice.texts


async def check_the_text_keeps_to_what_is_asked(loaded: Loaded, rng: random.Random) -> None:
    """In every form that the model says it can, and goes on so wherever it was cut."""
    for form in loaded.logic.description.constraints:
        params = stage_pb2.StageParams()
        params.CopyFrom(loaded.sample.params)
        params.thinker.MergeFrom(stage_pb2.ThinkerParams(constraint=CONSTRAINTS[form], max_tokens=64))
        params.thinker.ClearField("stop")
        params.thinker.ClearField("verbatim")
        asked = Loaded(replace(loaded.case, slow=True), loaded.logic, replace(loaded.sample, params=params))
        said = (await run(asked, rng)).contents()["text"]
        assert isinstance(said, tuple) and keeps(form, said[0]) and said[-1] == [chunk_pb2.FINISH_REASON_STOP], said
        await check_it_goes_on_wherever_it_was_lost(asked, rng)


async def check_what_it_cannot_do_is_refused_and_the_next_one_is_served(loaded: Loaded, rng: random.Random) -> None:
    """With the field and a text that says what to do, before anything is put out: what only media tell may be found when they are read,
    everything else before the session is open."""
    for params, named in [*loaded.case.refused, *beyond(loaded)]:
        with refused(loaded, named):
            work = await loaded.logic.prepare(stage_pb2.Open(params=params, seed=1), Start())
            assert named == "thinker.messages.parts.media", named
            async with aclosing(work.run(arriving(()), SessionTiming(), Start())) as outputs:
                assert [output async for output in outputs] == []
    assert (await run(loaded, rng)).contents()


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
        assert (await run(again, rng)).contents() == (await run(loaded, rng)).contents()
    finally:
        await other.close()


async def check_what_it_tells_of_an_answer_is_true(loaded: Loaded, rng: random.Random) -> None:
    """Where a seed is said not to matter, another seed gives the same. The unspoken words are those of the whole answer, also for an answer
    of which nothing is left to do."""
    one, other = await run(loaded, rng, seed=5), await run(loaded, rng, seed=6)
    assert one.told.drew == other.told.drew
    if one.told.drew is False:
        assert one.contents() == other.contents()
    ended = await run(loaded, rng, Start(ended_ports=frozenset(loaded.produces)))
    assert (ended.told.unspoken, ended.told.unspoken_runs) == (one.told.unspoken, one.told.unspoken_runs)
    assert ended.told.drew == one.told.drew


CHECKS: Sequence[Check] = [check for name, check in globals().items() if name.startswith("check_")]
