"""`python -m benchmarks.resilience`: how much a listener notices of a lost stage, as benchmarks/out/resilience.json and as a table. It uses
two replicas of every stage and one router. It needs the folder of the tests on the path, for their processes that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import loss
from benchmarks.figures import QUESTIONS, Figure, Report, arguments, median, percentile
from benchmarks.loss import LossCase, MeasuredLoss, NothingLost, hear, lose
from helpers.disturbed import found, restore
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG
from helpers.servers import CHAIN, omni_stub
from omnistage.v1 import omni_pb2, stage_pb2

WAYS = {"frozen": signal.SIGSTOP, "hung": HANG}
"""Ways in which a process lives and does nothing: all of it, or only the thread of its event loop."""

KILLS = 10
STOPS = 5
LENGTHS = (50, 500, 2000)
LATE_KILLS = 5
LONG_INTERVAL_S = 0.02

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub


@dataclass(frozen=True)
class MeasuredPipeline:
    """A pipeline to measure. tokens: of an answer. text, sound: chunks of text or sound before a stage is lost. options: of its stages."""

    name: str
    tokens: int
    text: int
    sound: int
    options: Mapping[str, object] = field(default_factory=dict)

    def request(self, number: int) -> omni_pb2.GenerateRequest:
        message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=QUESTIONS[number % len(QUESTIONS)])])
        thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=self.tokens, ignore_eos=True)
        return omni_pb2.GenerateRequest(seed=number, thinker=thinker)


MODELS = {
    # A token comes every 10 ms and makes 20 ms of sound, so the player never has much sound in hand.
    "toy": MeasuredPipeline("toy", 150, 10, 40, {"interval_s": 0.01, "samples_per_frame": 240}),
    "smol": MeasuredPipeline("smol", 40, 20, 4),
}


async def measure(report: Report, model: MeasuredPipeline, kinds: Sequence[str], kills: int, stops: int) -> None:
    """Measure all figures of one model. kills: losses for each kind and moment. stops: losses for each kind and way, whose moments take
    turns."""
    async with _house(model) as (house, stub):
        moments = (("text", model.text), ("audio", model.sound))
        for kind in kinds:
            killed: list[MeasuredLoss] = []
            for port, chunks in moments:
                with report.part(f"{model.name}: {kind} killed after {chunks} chunks of {port}"):
                    losses = [await _loss(house, stub, model, LossCase(kind, signal.SIGKILL, port, chunks), n) for n in range(kills)]
                    report.add(*_kill_figures(model, losses))
                    killed += losses
            with report.part(f"{model.name}: {kind} noticed"):
                report.add(*_notice_figures(model, kind, killed))
            for way, stop_signal in WAYS.items():
                with report.part(f"{model.name}: {kind} {way}"):
                    frozen = [await _loss(house, stub, model, LossCase(kind, stop_signal, *moments[n % 2]), n) for n in range(stops)]
                    report.add(*_freeze_figures(model, kind, way, frozen))


async def measure_lengths(report: Report, kinds: Sequence[str], answers: Sequence[int], kills: int) -> None:
    """Measure kills late in answers of these lengths (in tokens), while other clients talk."""
    model = MODELS["toy"]
    # The others must not take all cores, or the figure would measure them.
    slow = replace(model, options={**model.options, "interval_s": LONG_INTERVAL_S})
    async with _house(slow) as (house, stub):
        for tokens in answers:
            request = replace(slow, tokens=tokens).request
            for kind in kinds:
                with report.part(f"{kind} killed in an answer of {tokens} tokens"):
                    report.add(await loss.measure(house, stub, request, kind, tokens, kills))


@asynccontextmanager
async def _house(model: MeasuredPipeline) -> AsyncIterator[tuple[Fleet, Stub]]:
    """Start and warm up the servers of a model; yields them and a client of their router."""
    with (
        tempfile.TemporaryDirectory() as logs,
        fleet(Path(logs), pipeline=model.name, family=model.name, options=model.options, can_hang=True) as running,
    ):
        async with omni_stub(running.address("router")) as stub:
            await found(running, stub)
            for number in range(4):  # warm-up
                await hear(stub, model.request(number))
            yield running, stub


async def _loss(house: Fleet, stub: Stub, model: MeasuredPipeline, case: LossCase, number: int) -> MeasuredLoss:
    """Measure one loss. The answer must be the same as without a loss, else RuntimeError; afterwards all replicas run again."""
    undisturbed = await hear(stub, model.request(number))
    try:
        loss, hearing = await lose(house, stub, model.request(number), case, undisturbed)
    finally:
        await restore(house, stub)
    if hearing.content != undisturbed.content:
        raise RuntimeError(f"another answer than without the loss: {case}, seed {number}")
    if undisturbed.chunks(case.port) <= case.chunks:
        raise NothingLost(f"the answer has only {undisturbed.chunks(case.port)} chunks of {case.port}")
    print(_line(loss), flush=True)
    return loss


def _line(loss: MeasuredLoss) -> str:
    """A line of text with the times of a loss, in ms."""
    case = loss.case
    times = {"closed": loss.closed_s, "noticed": loss.noticed_s, "open": loss.reopened_s, "first chunk": loss.resumed_s}
    times |= {"later than undisturbed": loss.delay_s, "gap": loss.gap_s}
    listed = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in times.items())
    return f"{case.stop_signal.name} {loss.victim} after {case.chunks} of {case.port}, ms: {listed}"


def _kill_figures(model: MeasuredPipeline, losses: Sequence[MeasuredLoss]) -> list[Figure]:
    """The figures of kills of one kind at one moment: the wait for the next chunk, and the silence."""
    case = losses[0].case
    name = f"{model.name}_{case.kind}_killed_in_mid_{'text' if case.port == 'text' else 'speech'}"
    goal = "<= 300" if model.name == "smol" else ""
    resumed = [1e3 * loss.resumed_s for loss in losses]
    gaps = [1e3 * loss.gap_s for loss in losses]
    opened = median([1e3 * loss.reopened_s for loss in losses])
    delay_ms = median([1e3 * loss.delay_s for loss in losses])
    note = f"{len(losses)} kills; replacement open after {opened:.0f}; the chunk came {delay_ms:.0f} later than in the undisturbed answer"
    return [
        Figure(f"{name}_first_resumed_chunk_p50", median(resumed), "ms", goal, note),
        Figure(f"{name}_first_resumed_chunk_p90", percentile(resumed, 90), "ms", "", f"longest {max(resumed):.0f}"),
        Figure(
            f"{name}_audible_gap",
            max(gaps),
            "ms",
            "<= 0" if model.name == "smol" else "",
            f"largest of {len(gaps)}, {sum(gap > 0 for gap in gaps)} above 0; a player that starts with 0.5 s of sound",
        ),
    ]


def _notice_figures(model: MeasuredPipeline, kind: str, killed: Sequence[MeasuredLoss]) -> list[Figure]:
    """The figures of how soon kills of one kind of stage were noticed; none without kills."""
    if not killed:
        return []
    noticed = [1e3 * loss.noticed_s for loss in killed]
    closed = median([1e3 * loss.closed_s for loss in killed])
    ours = median([1e3 * max(loss.noticed_s - loss.closed_s, 0.0) for loss in killed])
    note = f"{len(noticed)} kills; to the caller's log line; longest {max(noticed):.0f}"
    kernel = f"of it; the kernel frees the memory of the process before it closes its connections, which takes {closed:.0f}"
    return [
        Figure(f"{model.name}_{kind}_killed_to_noticed_p50", median(noticed), "ms", "<= 50", note),
        Figure(f"{model.name}_{kind}_killed_to_noticed_p90", percentile(noticed, 90), "ms"),
        Figure(f"{model.name}_{kind}_connection_closed_to_noticed_p50", ours, "ms", "", kernel),
    ]


def _freeze_figures(model: MeasuredPipeline, kind: str, way: str, frozen: Sequence[MeasuredLoss]) -> list[Figure]:
    """The figures of processes of one kind that were stopped. way: how they were stopped, a key of WAYS."""
    if not frozen:
        return []
    noticed = [loss.noticed_s for loss in frozen]
    resumed = [loss.resumed_s for loss in frozen]
    audible = [loss for loss in frozen if loss.gap_s > 0]
    covered = [loss for loss in frozen if loss.is_covered]
    beyond = [1e3 * (loss.gap_s - max(loss.sound_s - loss.held_s, 0.0)) for loss in frozen]
    note = f"{len(audible)} heard; held at that moment: {', '.join(f'{loss.held_s:.2f}' for loss in frozen)} s"
    return [
        Figure(
            f"{model.name}_{kind}_{way}_to_left_max", max(noticed), "s", "<= 1.5", f"{len(noticed)} times; median {median(noticed):.2f}"
        ),
        Figure(f"{model.name}_{kind}_{way}_to_resumed_max", max(resumed), "s", "", f"median {median(resumed):.2f}"),
        Figure(f"{model.name}_{kind}_{way}_audible_gap", 1e3 * max(loss.gap_s for loss in frozen), "ms", "", note),
        Figure(f"{model.name}_{kind}_{way}_covered", 100 * len(covered) / len(frozen), "%", "", "of them, by the sound that was held"),
        Figure(
            f"{model.name}_{kind}_{way}_gap_beyond_uncovered", max(beyond), "ms", "", "of the gap, what the sound held does not explain"
        ),
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--kind", choices=CHAIN, action="append")
    parser.add_argument("--kills", type=int, default=KILLS, help="of every kind and moment")
    parser.add_argument("--stops", type=int, default=STOPS, help="of every kind")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=LENGTHS, help="lengths of the toy answers that are killed late; none: left out"
    )
    parser.add_argument("--late-kills", type=int, default=LATE_KILLS, help="of every kind and length")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    report = Report("resilience")
    report.add(Figure("load_before", load, "", "", f"processes that wanted one of {os.cpu_count()} cores, in the minute before"))
    kinds = options.kind or CHAIN
    for name in options.model or MODELS:
        with report.part(name):
            asyncio.run(measure(report, MODELS[name], kinds, options.kills, options.stops))
    if options.tokens:
        with report.part("long answers"):
            asyncio.run(measure_lengths(report, kinds, options.tokens, options.late_kills))
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
