"""`python -m benchmarks.diffusion`: pictures drawn step by step, many at once, compared with Diffusers' pipelines; checkpoints with random
weights of size small, one thread. Seconds are CPU time of this process, unless something else is said, because the process is never idle
from the first request to the last picture. With `--device cuda` only the transformer of Z-Image in its full size is measured."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from benchmarks import films
from benchmarks.figures import OUT, Figure, Report, arguments, median
from benchmarks.films import first_sound
from benchmarks.studio import STEPS, DiffusersPipeline, RequestTimes, Studio, most_apart, on_gpu, watch_calls
from omnistage.models.diffusers.painter import BatchRow
from omnistage.models.diffusers.pictures import LinearMap, Pictures
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.interface import DrawRequest

ROUNDS = 3
OVERHEAD_ROUNDS = 9
SIDES = (64, 128)
REQUESTS = 8
PREVIEWS = 8
AT_ONCE = 4
GOALS = {"qwen-image": ">= 1.3", "z-image": ">= 1.1"}
"""The goals of throughput, for the two families that are compared with the pipelines."""
FAMILIES = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "z-image", "longcat-image", "longcat-image-edit")
EDITED_AREA = 128 * 128
MAX_DIFFERENCE = 2
"""By how much, of 255, a colour in the two pictures may differ, because the two add the same numbers in another order."""


# Beside Diffusers ------------------------------------------------------------------------------------------------------------------


def one_by_one_s(arrived: Sequence[float], durations: Sequence[float]) -> list[float]:
    """The seconds from the arrival of each request to its end, if each waits for all before it. arrived, durations: in seconds."""
    free, latencies = 0.0, list[float]()
    for at, duration in zip(arrived, durations, strict=True):
        free = max(free, at) + duration
        latencies.append(free - at)
    return latencies


class SpeedUp(NamedTuple):
    """How many times as good our engine is as the pipeline: in throughput, mean latency, and latency of the last request."""

    speed: float
    latency: float
    last: float


async def compare(studio: Studio, pipeline: DiffusersPipeline, side: int) -> SpeedUp:
    """Measure our engine and the pipeline in turn with REQUESTS requests that come a step apart; returns medians of the rounds."""
    step_s = pipeline.step_s(studio.request(0, side, guided=False))
    await studio.watched(studio.request(0, side, guided=True))
    rounds = list[SpeedUp]()
    for turn in range(1, 1 + ROUNDS):
        requests = [studio.request(100 * turn + n, side, guided=n % 2 == 1) for n in range(REQUESTS)]
        ours: list[RequestTimes] = []
        if turn % 2:  # Each of the two goes first in every second round.
            ours = await studio.together(requests, step_s)
        theirs = [pipeline.called(request) for request in requests]
        if not ours:
            ours = await studio.together(requests, step_s)
        difference = max(most_apart(times.data, image) for times, (_, image) in zip(ours, theirs, strict=True))
        if difference > MAX_DIFFERENCE:
            raise AssertionError(f"{studio.name} and its pipeline draw pictures that are {difference} of 255 apart")
        begin_s = min(times.arrived_s for times in ours)
        durations = [duration_s for duration_s, _ in theirs]
        latencies = one_by_one_s([times.arrived_s - begin_s for times in ours], durations)
        rounds.append(
            SpeedUp(
                sum(durations) / (max(times.done_s for times in ours) - begin_s),
                sum(latencies) / sum(times.taken_s for times in ours),
                latencies[-1] / ours[-1].taken_s,
            )
        )
    return SpeedUp(*(median(each) for each in zip(*rounds, strict=True)))


async def throughput(report: Report, folder: Path) -> None:
    """Compare the families of GOALS with their pipelines; see `compare`."""
    latencies = dict[str, float]()
    setup = f"{REQUESTS} requests one step apart, half of them guided, {STEPS} steps; over calls of the pipeline one by one; small"
    for name, goal in GOALS.items():
        studio = Studio(name, folder)
        pipeline, key = studio.pipeline(), name.replace("-", "_")
        speed_ups = {side: await compare(studio, pipeline, side) for side in SIDES}
        await studio.model.close()
        for side, times in speed_ups.items():
            latencies[f"{name} {side} px"] = times.latency
            report.add(
                Figure(f"x_throughput_{key}_{REQUESTS}_{side}px", times.speed, "x", "", setup),
                Figure(f"x_late_joiner_latency_{key}_{side}px", times.latency, "x", "", "mean from arrival to picture; the same requests"),
                Figure(f"x_last_joiner_latency_{key}_{side}px", times.last, "x", "", "of the last of them alone"),
            )
        worse = min(times.speed for times in speed_ups.values())
        report.add(Figure(f"x_throughput_{key}_{REQUESTS}", worse, "x", goal, f"the worse of {SIDES} px; median of {ROUNDS}; {setup}"))
    worst = min(latencies, key=latencies.__getitem__)
    note = f"mean latency one by one, each waits for those before it, over ours; the worst: {worst}; median of {ROUNDS}"
    report.add(Figure("x_late_joiner_latency", latencies[worst], "x", ">= 1.5", note))


# One picture -----------------------------------------------------------------------------------------------------------------------


async def first_preview(report: Report, folder: Path, side: int = SIDES[-1]) -> None:
    """Divide the time to the first preview by the time to the picture: with the linear map, and with the VAE if there is no map."""
    shares = dict[str, float]()
    for name in GOALS:
        studio = Studio(name, folder)
        linear, decoded = list[float](), list[float]()
        await studio.watched(studio.request(0, side, guided=True))
        for turn in range(1, 1 + ROUNDS):
            request = studio.request(turn, side, guided=True, previews=PREVIEWS)
            product = cast(Pictures, studio.drawing.product)
            fitted, product._previews = product._previews, LinearMap()
            times = await studio.watched(request)
            decoded.append((times.first_preview_s - times.arrived_s) / times.taken_s)
            product._previews = fitted
            times = await studio.watched(request)
            linear.append((times.first_preview_s - times.arrived_s) / times.taken_s)
        await studio.model.close()
        shares[name] = median(linear)
        key, setup = name.replace("-", "_"), f"{STEPS} steps, {PREVIEWS} previews, {side} px, guided; median of {ROUNDS}"
        report.add(
            Figure(f"first_preview_over_e2e_{key}", shares[name], "", "", f"by the linear map; {setup}"),
            Figure(f"first_preview_by_vae_over_e2e_{key}", median(decoded), "", "", f"before any picture was drawn; {setup}"),
        )
    worst = max(shares, key=shares.__getitem__)
    first = -(-STEPS // (PREVIEWS + 1))
    note = f"to the first preview over the time to the picture; the worse: {worst}; it shows step {first} of {STEPS}, which alone is"
    report.add(Figure("first_preview_over_e2e", shares[worst], "", "<= 0.15", f"{note} {first / STEPS:g} of the steps"))


def by_hand(studio: Studio, plan: DrawingPlan) -> None:
    """Draw one picture without the engine: only transformer, guidance and scheduler, as a pipeline of Diffusers does it."""
    painter = studio.painter
    with torch.inference_mode():
        canvas = painter.canvas(plan, painter.encode(plan), 0)
        texts = [text for text in (canvas.conditions.positive, canvas.conditions.negative) if text is not None]
        rows = [BatchRow(canvas, text, residuals) for text, residuals in zip(texts, canvas.residuals, strict=False)]
        while not canvas.is_drawn:
            velocities = painter.velocities(rows)
            velocity = painter.guided(velocities[0], velocities[1], canvas) if len(velocities) == 2 else velocities[0]
            sampler = canvas.sampler
            canvas.latents = sampler.scheduler.step(velocity, sampler.timestep, canvas.latents, return_dict=False)[0]
            sampler.step += 1


async def overhead(studio: Studio, side: int, *, guided: bool, clock: Callable[[], float]) -> tuple[float, str]:
    """The time that the engine adds to a step, as a share of a step by hand, and a note with both in milliseconds. Each picture is drawn
    both ways. clock: gives the seconds."""
    with_engine, without = list[float](), list[float]()

    async def draw(engine: bool, request: DrawRequest) -> None:
        plan = await studio.model.prepare(request)
        with watch_calls(studio.painter, "velocities", clock) as calls:
            if engine:
                await studio.watched(request)
            else:
                by_hand(studio, plan)
        (with_engine if engine else without).append(median(calls.between_s))

    for turn in range(OVERHEAD_ROUNDS):
        request = studio.request(turn, side, guided=guided)
        for engine in (True, False) if turn % 2 else (False, True):
            await draw(engine, request)
    added = median([ours / bare - 1 for ours, bare in zip(with_engine, without, strict=True)])
    return added, f"ms: {1e3 * median(with_engine):.2f}, by hand {1e3 * median(without):.2f}"


async def engine_overhead(report: Report, folder: Path, side: int = SIDES[-1]) -> None:
    """Measure what the engine adds to a step, in CPU time and by the clock; see `overhead`."""
    shares = dict[str, float]()
    for name in GOALS:
        studio = Studio(name, folder)
        await studio.watched(studio.request(0, side, guided=False))
        for guided in (False, True):
            label = f"{name.replace('-', '_')}{'_guided' if guided else ''}"
            shares[label], note_cpu = await overhead(studio, side, guided=guided, clock=time.process_time)
            wall, note_wall = await overhead(studio, side, guided=guided, clock=time.perf_counter)
            report.add(
                Figure(f"engine_overhead_of_a_step_{label}", shares[label], "", "", note_cpu),
                Figure(f"engine_overhead_of_a_step_{label}_wall", wall, "", "", f"of the wall, with waiting for threads; {note_wall}"),
            )
        await studio.model.close()
    worst = max(shares, key=shares.__getitem__)
    setup = f"a step over the same by hand (transformer, guidance, scheduler), less 1; one picture, {side} px"
    note = f"{setup}; median of {OVERHEAD_ROUNDS} pictures drawn by both in turn; the worst: {worst}"
    report.add(Figure("engine_overhead_of_a_step", shares[worst], "", "<= 0.03", note))


async def prompt_cache(report: Report, folder: Path) -> None:
    """Measure the time that is saved when a prompt is asked for the second time, and the memory that this takes."""
    for name in ("qwen-image", "z-image", "qwen-image-edit"):
        studio = Studio(name, folder, family={"condition_area": EDITED_AREA})
        saved, cache_bytes = list[float](), list[int]()
        await studio.watched(studio.editing(0, SIDES[0]))
        for turn in range(1, 1 + ROUNDS):
            request = studio.editing(turn, SIDES[0])
            bytes_before = studio.painter._texts.bytes + studio.painter._pictures.bytes
            with watch_calls(studio.painter, "encode") as encoded:
                first = await studio.watched(request)
                cache_bytes.append(studio.painter._texts.bytes + studio.painter._pictures.bytes - bytes_before)
                await studio.watched(request)
            saved.append((encoded.each_s[0] - encoded.each_s[1]) / first.taken_s)
        await studio.model.close()
        key = name.replace("-", "_")
        inputs = "words and picture" if studio.painter.limits.images[0] else "words"
        report.add(
            Figure(f"prompt_cache_{key}", median(saved), "", "", f"of a request's time, {inputs}; the encoder is small too; {STEPS} steps"),
            Figure(f"prompt_cache_bytes_{key}", median(cache_bytes), "bytes", "", "kept of one request"),
        )


# All families ----------------------------------------------------------------------------------------------------------------------


async def families(report: Report, folder: Path) -> None:
    """Measure one picture of each family alone, and AT_ONCE pictures at once; write a table to OUT."""
    rows = [f"| pipeline | pixels | a picture alone | a step | each of {AT_ONCE} at once |", "|---|---|---|---|---|"]
    for name in FAMILIES:
        studio = Studio(name, folder, family={"condition_area": EDITED_AREA})
        fresh = map(studio.editing, count(), repeat(SIDES[0]))
        await studio.watched(replace(next(fresh), steps=2))  # Only to warm up.
        alone_s, step_s, together_s = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):
            with watch_calls(studio.painter, "velocities") as calls:
                alone_s.append((await studio.watched(next(fresh))).taken_s)
            step_s.append(median(calls.between_s))
            times = await studio.together(list(islice(fresh, AT_ONCE)))
            together_s.append((max(one.done_s for one in times) - min(one.arrived_s for one in times)) / AT_ONCE)
        plan = await studio.model.prepare(next(fresh))
        await studio.model.close()
        size, key = f"{plan.width}x{plan.height}" + (f" x {plan.layers}" if plan.layers else ""), name.replace("-", "_")
        setup = f"{size} px, {STEPS} steps, guided; small; median of {ROUNDS}"
        report.add(
            Figure(f"picture_{key}", median(alone_s), "s", "", setup),
            Figure(f"step_{key}", median(step_s), "s", "", "of it"),
            Figure(f"picture_of_{AT_ONCE}_{key}", median(together_s), "s", "", f"each, {AT_ONCE} at once"),
        )
        rows.append(f"| {name} | {size} | {median(alone_s):.2f} s | {1e3 * median(step_s):.1f} ms | {median(together_s):.2f} s |")
    OUT.mkdir(exist_ok=True)
    (OUT / "diffusion.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


PARTS: dict[str, Callable[[Report, Path], Coroutine[Any, Any, None]]] = {
    "throughput": throughput,
    "first preview": first_preview,
    "engine": engine_overhead,
    "prompt cache": prompt_cache,
    "families": families,
    "first sound": first_sound,
    "films at once": films.throughput,
    "first frame": films.first_frame,
    "memory of films": films.memory,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: only the full-size transformer on a GPU")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU is here: nothing was measured")
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            report = Report("diffusion-cuda")
            with report.part("full size"):
                asyncio.run(on_gpu(report, Path(folder)))
            return report.finish(judge=not options.report)
        report = Report("diffusion")
        for name, part in PARTS.items():
            if not options.only or name in options.only:
                with report.part(name):
                    asyncio.run(part(report, Path(folder)))
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
