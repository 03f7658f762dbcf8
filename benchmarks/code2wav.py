"""`python -m benchmarks.code2wav`: the cost of sound that is made while the speech goes on, and its difference from sound that is made at
once. Code2Wav of Qwen2.5-Omni and of Qwen3-Omni with random weights; and the default voice, which is real, with its word errors."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.asr import recognise, recogniser, word_error_rate
from benchmarks.figures import Benchmark, Figure, arguments, median, ratio, run
from helpers.causal_waves import shrunk
from helpers.speech import rows_of
from omnistage.models.interface import Code2WavModel, Piece, Profile, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import load_code2wav
from omnistage.models.smol.code2wav import load_code2wav as load_smol_code2wav
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.talker import load_talker
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

ROUNDS = 3
CODES, CODEBOOK = 500, 8192
"""Codes of the speech, and how many different codes there are."""
TEXTS = (
    "The sky is blue because the air scatters the light of the sun. Short waves are scattered more than long ones.",
    "A kite is a light frame with cloth on it, which flies in the wind at the end of a long string.",
    "Plants make their food from water, air and light. They take in the air through small holes in their leaves.",
    "Bread is made of flour, water, salt and yeast. The dough has to rest for an hour before it goes into the oven.",
)
CAUSAL_SCALE, CAUSAL_FRAMES = 8, 48
AGAIN_FRAMES = 25
SAME_DB = 120.0
"""From this ratio of signal to difference on, two sounds count as the same, because smaller differences are roundings of float32."""
LOOK_S = 0.001
LATE_S = 5.0
"""Profiles whose first sound comes later, in seconds of speech, are left out of the picture."""
PAGE = Path(__file__).parent.parent / "docs" / "latency-and-quality.md"
PICTURE = PAGE.parent / "images" / "latency-and-quality.png"

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sounded:
    """The sound of a speech. first_items: how many input items had come when the first sound was made. first_s: CPU seconds until the first
    sound. cost_s: CPU seconds in all."""

    samples: NDArray[np.float32]
    first_items: int
    first_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """The figures of a profile, compared with sound that is made at once. speech_s: seconds of speech before the first sound. computed_s:
    CPU seconds until that sound. snr: decibels of the signal above the difference. distance: log-spectral distance in dB. cost: CPU time
    divided by that sound's. errors: word error rate."""

    voice: str
    profile: str
    speech_s: float
    computed_s: float
    snr: float
    distance: float
    cost: float
    errors: float | None = None


async def make_sounds(model: Code2WavModel[Any], request: WaveRequest, items: Array) -> Sounded:
    """Make the sound of `items`, which are sent one by one, each after all sound of the earlier items was made."""
    prepared, port, item_count = await model.prepare(request), model.info.accepts[0].name, 0

    async def one_by_one() -> AsyncIterator[Piece]:
        nonlocal item_count
        for item_count in range(1, len(items) + 1):
            yield Piece(port, item_count - 1, item_count == len(items), items[item_count - 1 : item_count].copy())
            while True:  # All sound that can be made is made before the next item comes.
                await asyncio.sleep(LOOK_S)
                if not model.load().queued:
                    break

    begin_s, parts = time.process_time(), list[Array]()
    async for sound in model.decode(prepared, one_by_one(), {model.info.produces[0].name: 0}):
        if not parts:
            first_items, first_s = item_count, time.process_time() - begin_s
        parts.append(sound.samples[:, 0])
    assert parts
    return Sounded(np.concatenate(parts), first_items, first_s, time.process_time() - begin_s)


def decibels(sound: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """The ratio of the signal to the difference of two sounds in dB, at most 150."""
    noise = ((sound.astype(np.float64) - reference) ** 2).mean()
    return min(float(10 * np.log10((reference.astype(np.float64) ** 2).mean() / max(noise, 1e-30))), 150.0)


def spectral_distance(sound: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """The log-spectral distance of two sounds in dB: root mean square over the frequencies, mean over windows of 1024 samples. Values below
    -60 dB of the loudest are raised to it."""
    window = torch.hann_window(1024)
    spectra = [torch.stft(torch.from_numpy(one.copy()), 1024, 256, window=window, return_complex=True).abs() for one in (sound, reference)]
    floor = 1e-3 * spectra[1].max()
    logs = [20 * each.clamp(min=floor).log10() for each in spectra]
    return float((logs[0] - logs[1]).square().mean(0).sqrt().mean())


async def compare(
    benchmark: Benchmark, voice: str, model: Code2WavModel[Any], speeches: Sequence[Array], seconds_of_item: float
) -> tuple[list[ProfileFigures], Mapping[str, list[Sounded]]]:
    """Compare each profile with `offline`; returns figures, and sounds by profile. seconds_of_item: speech in an item."""

    async def speak(profile: str, _: int) -> list[Sounded]:
        return [await make_sounds(model, WaveRequest(number, profile), items) for number, items in enumerate(speeches)]

    await make_sounds(model, WaveRequest(0), speeches[0])
    ways = [partial(speak, profile) for profile in Profile]
    rounds: dict[str, list[list[Sounded]]] = dict(zip(Profile, await benchmark.by_turns(ROUNDS, *ways, warm_ups=0), strict=True))
    costs = {profile: [sum(one.cost_s for one in sounds) for sounds in of_profile] for profile, of_profile in rounds.items()}
    sounds = {profile: of_profile[0] for profile, of_profile in rounds.items()}
    figures = []
    for profile, of_profile in rounds.items():
        pairs = [(one.samples, reference.samples) for one, reference in zip(sounds[profile], sounds["offline"], strict=True)]
        figures.append(
            ProfileFigures(
                voice,
                profile,
                median([one.first_items for one in sounds[profile]]) * seconds_of_item,
                median([median([one.first_s for one in of_round]) for of_round in of_profile]),
                median([decibels(*pair) for pair in pairs]),
                median([spectral_distance(*pair) for pair in pairs]),
                ratio(costs[profile], costs["offline"]),
            )
        )
    return figures, sounds


async def flow(benchmark: Benchmark) -> list[ProfileFigures]:
    """Measure the Code2Wav of Qwen2.5-Omni, with random weights."""
    folder, size, count = benchmark.folder / "flow", benchmark.size("small", "tiny"), benchmark.size(CODES, 60)
    make_tiny("qwen2.5-omni", folder, CheckpointOrder(size=size))
    # One thread: the figure is the cost of streaming, on any number of cores.
    model = load_code2wav(folder, LoadOptions(path=folder, family={"workers": 1}))
    codes = np.random.default_rng(0).integers(0, CODEBOOK, (count, 1)).astype(np.uint32)
    figures, _ = await compare(benchmark, f"qwen2_5_omni ({size}, random weights)", model, [codes], 0.02)
    await model.close()
    return figures


async def causal(benchmark: Benchmark) -> None:
    """Measure Qwen3-Omni's Code2Wav: how much less it costs to keep the state after each chunk than to compute the last AGAIN_FRAMES frames
    a second time, as Transformers' chunked_decode does. That gives another sound, because attention looks farther back."""
    net, frames, source = shrunk(CAUSAL_SCALE), benchmark.size(CAUSAL_FRAMES, 12), np.random.default_rng(0)
    codes = torch.from_numpy(source.integers(0, net.config.codes, (1, AGAIN_FRAMES + frames, net.config.codebooks)))
    ends = {size: range(AGAIN_FRAMES + size, AGAIN_FRAMES + frames + 1, size) for size in (1, 4, 12)}

    def go_on(size: int) -> None:
        """Keep the state after each chunk."""
        _, states = net.step(codes[:, :AGAIN_FRAMES], [net.start()])
        for end in ends.get(size, ()):
            _, states = net.step(codes[:, end - size : end], states)

    def compute_again(size: int) -> None:
        """Compute AGAIN_FRAMES frames before each chunk a second time."""
        for end in ends[size]:
            net.step(codes[:, end - size - AGAIN_FRAMES : end], [net.start()])

    async def cpu_s(call: Callable[[int], None], size: int, _: int) -> float:
        """CPU seconds of one call."""
        begin_s = time.process_time()
        with torch.inference_mode():
            call(size)
        return time.process_time() - begin_s

    calls = [partial(cpu_s, call, size) for size in ends for call in (go_on, compute_again)]
    only_prefix = partial(cpu_s, go_on, 0)
    prefix_s, *pairs_s = map(median, await benchmark.by_turns(ROUNDS, only_prefix, *calls))
    setup = f"{frames} frames, one thread, CPU time; an {CAUSAL_SCALE}th of the published width, random weights; by turns"
    for size, own_s, again_s in zip(ends, pairs_s[::2], pairs_s[1::2], strict=True):
        note = f"cost a frame in chunks of {size} with {AGAIN_FRAMES} frames computed again, over that with what they left; {setup}"
        benchmark.add(Figure(f"x_causal_chunk{size}", again_s / (own_s - prefix_s), "x", ">= 3" if size == 4 else "", note))


async def default_voice(benchmark: Benchmark) -> list[ProfileFigures]:
    """Measure the default voice, with the word error rate of a recogniser; returns the figures of each profile."""
    folder = model_directory()
    talker, model, texts = load_talker(folder / "talker"), load_smol_code2wav(folder / "code2wav"), TEXTS[: benchmark.size(len(TEXTS), 1)]
    figures, sounds = await compare(benchmark, "default", model, [await rows_of(talker, text) for text in texts], 1 / 40)
    listener = await asyncio.to_thread(recogniser)
    await asyncio.gather(talker.close(), model.close())
    errors = {
        profile: word_error_rate((text, recognise(listener, one.samples, 24000)) for text, one in zip(texts, of_profile, strict=True))
        for profile, of_profile in sounds.items()
    }
    return [replace(line, errors=errors[line.profile]) for line in figures]


GOALS = {("qwen2_5_omni", "balanced", "cost"): "<= 1.35", ("qwen2_5_omni", "balanced", "speech"): "<= 0.48"}


def figures_of(line: ProfileFigures) -> Iterator[Figure]:
    """Yield the figures of a profile, as the table has them."""
    voice = line.voice.split()[0]
    values = {"speech": (line.speech_s, "s"), "computing": (line.computed_s, "s"), "snr": (line.snr, "dB")}
    values |= {"distance": (line.distance, "dB"), "cost": (line.cost, "x")}
    for name, (value, unit) in values.items():
        yield Figure(f"{voice}_{line.profile}_{name}", value, unit, GOALS.get((voice, line.profile, name), ""))
    if line.errors is not None:
        yield Figure(f"{voice}_{line.profile}_word_error_rate", line.errors, "", "<= 0.04")


# The page --------------------------------------------------------------------------------------------------------------------------


def table(figures: Sequence[ProfileFigures]) -> str:
    """The figures as a table in Markdown."""
    head = "| voice | profile | speech before the first sound | computing | of the whole | spectral distance | cost | words heard wrong |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for line in figures:
        errors = "" if line.errors is None else f"{100 * line.errors:.1f} %"
        snr_text = "the same" if line.snr >= SAME_DB else f"{line.snr:.0f} dB"
        pace = f"{line.speech_s:.2f} s | {1000 * line.computed_s:.0f} ms"
        rows.append(f"| {line.voice} | {line.profile} | {pace} | {snr_text} | {line.distance:.3f} dB | {line.cost:.2f} x | {errors} |")
    return "\n".join(rows) + "\n"


def draw(path: Path, figures: Sequence[ProfileFigures]) -> None:
    """Draw the cost of each profile against its time to the first sound, and write the picture to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    voices = list(dict.fromkeys(line.voice for line in figures))
    drawing = Drawing(figsize=(9, 3.4), dpi=160, layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, voice in zip(drawing.subplots(1, len(voices), squeeze=False)[0], voices, strict=True):
        shown = [line for line in figures if line.voice == voice and line.speech_s < LATE_S]
        axes.scatter([line.speech_s for line in shown], [line.cost for line in shown], s=70, c="#0f9d8a", zorder=3)
        for line in shown:
            snr_text = "same" if line.snr >= SAME_DB else f"{line.snr:.0f} dB"
            point = (line.speech_s, line.cost)
            axes.annotate(f"{line.profile}, {snr_text}", point, textcoords="offset points", xytext=(8, -3), fontsize=8)
        axes.set_title(voice, fontsize=9, loc="left")
        axes.set_xlabel("speech that has come before the first sound (s)", fontsize=8)
        axes.set_ylabel("cost, over that of the whole at once", fontsize=8)
        axes.margins(0.3)
        axes.grid(color="#e4e7eb")
        axes.tick_params(labelsize=8)
    drawing.savefig(path)


async def voices(benchmark: Benchmark, *, docs: bool) -> None:
    """Measure both voices and write the table and the picture beside the figures. docs: also into the page, between its marks."""
    figures = [*await flow(benchmark), *await default_voice(benchmark)]
    benchmark.add(*(figure for line in figures for figure in figures_of(line)))
    (benchmark.out / "latency-and-quality.md").write_text(table(figures))
    draw(benchmark.out / PICTURE.name, figures)
    if docs:
        shutil.copy(benchmark.out / PICTURE.name, PICTURE)
        begin, rest = PAGE.read_text().split("<!-- made by make bench-code2wav -->\n")
        PAGE.write_text(f"{begin}<!-- made by make bench-code2wav -->\n{table(figures)}{rest[rest.index('<!-- end -->') :]}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table and the picture into docs/latency-and-quality.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return run("code2wav", options, {"causal": causal, "voices": partial(voices, docs=options.docs)})


if __name__ == "__main__":
    sys.exit(main())
