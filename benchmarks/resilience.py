"""`python -m benchmarks.resilience`: what a listener notices of a lost stage, as benchmarks/out/resilience.json and as a table.

Two replicas of every stage, one router. Needs the folder of the tests on the path, for their processes that can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, median, percentile, publish
from benchmarks.loss import Case, Hearing, Loss, NothingLost, hear, lose
from benchmarks.prompts import SPOKEN
from helpers.drill import found, restore
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, omni_stub
from omnistage.v1 import omni_pb2, stage_pb2

KILLS = 10
STOPS = 5
CLIENTS = {"toy": 8, "smol": 4}
LOOP_S = 15.0

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub


@dataclass(frozen=True)
class Model:
    """A pipeline to measure. tokens: of every answer. text, sound: chunks of it that come before a loss in mid text or in mid speech."""

    name: str
    tokens: int
    text: int
    sound: int
    options: Mapping[str, object] = field(default_factory=dict)

    def request(self, number: int) -> omni_pb2.GenerateRequest:
        message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=SPOKEN[number % len(SPOKEN)])])
        thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=self.tokens, ignore_eos=True)
        return omni_pb2.GenerateRequest(seed=number, thinker=thinker)


MODELS = {
    # A token every 10 ms is twenty of sound: the chain and the player are never far from each other.
    "toy": Model("toy", 150, 10, 40, {"interval_s": 0.01, "samples_per_frame": 240}),
    "smol": Model("smol", 40, 20, 4),
}


async def measure(model: Model, kinds: Sequence[str], kills: int, stops: int, loop_s: float) -> list[Figure]:
    """All figures of one model."""
    async with _house(model) as (house, stub):
        figures = []
        moments = (("text", model.text), ("audio", model.sound))
        for kind in kinds:
            killed = []
            for port, chunks in moments:
                losses = [await _loss(house, stub, model, Case(kind, signal.SIGKILL, port, chunks), n) for n in range(kills)]
                figures += _kill_figures(model, losses)
                killed += losses
            frozen = [await _loss(house, stub, model, Case(kind, signal.SIGSTOP, *moments[n % 2]), n) for n in range(stops)]
            figures += _detection_figures(model, kind, killed, frozen)
        if loop_s:
            figures += await _throughput(house, stub, model, kinds, loop_s)
        return figures


@asynccontextmanager
async def _house(model: Model) -> AsyncIterator[tuple[Fleet, Stub]]:
    with tempfile.TemporaryDirectory() as logs, fleet(Path(logs), pipeline=model.name, model=model.name, options=model.options) as running:
        async with omni_stub(running.address("router")) as stub:
            await found(running, stub)
            for number in range(4):  # warm-up
                await hear(stub, model.request(number))
            yield running, stub


async def _loss(house: Fleet, stub: Stub, model: Model, case: Case, number: int) -> Loss:
    """One loss; the answer must be the undisturbed one, and then everything is as before."""
    undisturbed = await hear(stub, model.request(number))
    try:
        loss, hearing = await lose(house, stub, model.request(number), case, undisturbed)
    finally:
        await restore(house, stub)
    if hearing.content != undisturbed.content:
        raise RuntimeError(f"another answer than without the loss: {case}, seed {number}")
    _check_cadence(undisturbed, case)
    print(_line(loss), flush=True)
    return loss


def _line(loss: Loss) -> str:
    case = loss.case
    times = {"closed": loss.closed_s, "noticed": loss.noticed_s, "open": loss.reopened_s, "first chunk": loss.resumed_s}
    times |= {"later than undisturbed": loss.delay_s, "gap": loss.gap_s}
    told = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in times.items())
    return f"{case.number.name} {loss.victim} after {case.chunks} of {case.port}, ms: {told}"


def _check_cadence(undisturbed: Hearing, case: Case) -> None:
    if undisturbed.chunks(case.port) <= case.chunks:
        raise NothingLost(f"the answer has only {undisturbed.chunks(case.port)} chunks of {case.port}")


def _kill_figures(model: Model, losses: Sequence[Loss]) -> list[Figure]:
    """What a client notices of one kind being killed at one moment."""
    case = losses[0].case
    name = f"{model.name}_{case.kind}_killed_in_mid_{'text' if case.port == 'text' else 'speech'}"
    goal = "p50 <= 300" if model.name == "smol" else ""
    resumed = [1e3 * loss.resumed_s for loss in losses]
    gaps = [1e3 * loss.gap_s for loss in losses]
    opened = median([1e3 * loss.reopened_s for loss in losses])
    late = median([1e3 * loss.delay_s for loss in losses])
    note = f"{len(losses)} kills; replacement open after {opened:.0f}; the chunk came {late:.0f} later than in the undisturbed answer"
    return [
        Figure(f"{name}_first_resumed_chunk_p50", median(resumed), "ms", goal, note),
        Figure(f"{name}_first_resumed_chunk_p90", percentile(resumed, 90), "ms", "", f"longest {max(resumed):.0f}"),
        Figure(
            f"{name}_audible_gap",
            max(gaps),
            "ms",
            "0" if model.name == "smol" else "",
            f"largest of {len(gaps)}, {sum(gap > 0 for gap in gaps)} above 0; a player that starts with 0.5 s of sound",
        ),
    ]


def _detection_figures(model: Model, kind: str, killed: Sequence[Loss], frozen: Sequence[Loss]) -> list[Figure]:
    noticed = [1e3 * loss.noticed_s for loss in killed]
    left = [loss.noticed_s for loss in frozen]
    resumed = [loss.resumed_s for loss in frozen]
    closed = median([1e3 * loss.closed_s for loss in killed])
    ours = median([1e3 * max(loss.noticed_s - loss.closed_s, 0.0) for loss in killed])
    note = f"{len(noticed)} kills; to the caller's log line; longest {max(noticed):.0f}"
    kernel = f"of it; the kernel frees the memory of the process before it closes its connections, which takes {closed:.0f}"
    figures = [
        Figure(f"{model.name}_{kind}_killed_to_noticed_p50", median(noticed), "ms", "<= 50", note),
        Figure(f"{model.name}_{kind}_killed_to_noticed_p90", percentile(noticed, 90), "ms"),
        Figure(f"{model.name}_{kind}_connection_closed_to_noticed_p50", ours, "ms", "", kernel),
    ]
    if frozen:
        note = f"{len(left)} stops; median {median(left):.2f}"
        figures += [
            Figure(f"{model.name}_{kind}_frozen_to_left_max", max(left), "s", "<= 1.5", note),
            Figure(f"{model.name}_{kind}_frozen_to_resumed_max", max(resumed), "s", "", f"median {median(resumed):.2f}"),
            Figure(f"{model.name}_{kind}_frozen_audible_gap", 1e3 * max(loss.gap_s for loss in frozen), "ms"),
        ]
    return figures


async def _throughput(house: Fleet, stub: Stub, model: Model, kinds: Sequence[str], loop_s: float) -> list[Figure]:
    """Requests a second of a closed loop, with both replicas and while one is down, in turns."""
    both, figures = [await _requests_per_second(stub, model, loop_s)], []
    for kind in kinds:
        house.kill(f"{kind}-1")
        one = await _requests_per_second(stub, model, loop_s)
        await restore(house, stub)
        both.append(await _requests_per_second(stub, model, loop_s))
        with_two = median(both[-2:])
        clients = f"{CLIENTS[model.name]} clients for {loop_s:g} s each; none failed"
        note = f"{one:.2f} requests/s with one, {with_two:.2f} with two (before and after); {clients}; load {os.getloadavg()[0]:.1f}"
        figures.append(Figure(f"{model.name}_throughput_lost_without_a_{kind}", 100 * (1 - one / with_two), "%", "", note))
    return figures


async def _requests_per_second(stub: Stub, model: Model, loop_s: float) -> float:
    """Of a closed loop. What is under way when the time is over counts by the part of it that fell into the time."""
    begun = time.monotonic()
    end = begun + loop_s

    async def client(first: int) -> float:
        done, number = 0.0, first
        while (before := time.monotonic()) < end:
            await hear(stub, model.request(number))
            done += min(1.0, (end - before) / (time.monotonic() - before))
            number += CLIENTS[model.name]
        return done

    return sum(await asyncio.gather(*(client(first) for first in range(CLIENTS[model.name])))) / loop_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--kind", choices=CHAIN, action="append")
    parser.add_argument("--kills", type=int, default=KILLS, help="of every kind and moment")
    parser.add_argument("--stops", type=int, default=STOPS, help="of every kind")
    parser.add_argument("--loop", type=float, default=LOOP_S, help="seconds of each closed loop; 0: no throughput")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    figures = [Figure("load_before", load, "", "", f"processes that wanted one of {os.cpu_count()} cores, in the minute before")]
    for name in given.model or MODELS:
        figures += asyncio.run(measure(MODELS[name], given.kind or CHAIN, given.kills, given.stops, given.loop))
    publish("resilience", figures)


if __name__ == "__main__":
    main()
