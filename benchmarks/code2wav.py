"""`python -m benchmarks.code2wav`: the cost of sound that is made while the speech goes on, and its difference from sound that is made at
once. Code2Wav of Qwen2.5-Omni and of Qwen3-Omni with random weights; and the default voice, which is real, with its word errors."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.asr import recognise, recogniser, word_error_rate
from benchmarks.figures import OUT, Figure, Report, arguments, median
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
CODES = 500
SPEAKERS = 8
TEXTS = (
    "The sky is blue because the air scatters the light of the sun. Short waves are scattered more than long ones.",
    "A kite is a light frame with cloth on it, which flies in the wind at the end of a long string.",
    "Plants make their food from water, air and light. They take in the air through small holes in their leaves.",
    "Bread is made of flour, water, salt and yeast. The dough has to rest for an hour before it goes into the oven.",
)
CAUSAL_SCALE = 8
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
    sound. cost_s: CPU seconds in all. first_sound_s: length of the first sound."""

    samples: NDArray[np.float32]
    first_items: int
    first_s: float
    cost_s: float
    first_sound_s: float


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
    rate_hz = model.info.produces[0].rate_hz

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
            first_items, first_s, first_sound_s = item_count, time.process_time() - begin_s, len(sound.samples) / rate_hz
        parts.append(sound.samples[:, 0])
    assert parts
    return Sounded(np.concatenate(parts), first_items, first_s, time.process_time() - begin_s, first_sound_s)


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


async def lines(
    voice: str, model: Code2WavModel[Any], speeches: Sequence[Array], seconds_of_item: float
) -> tuple[list[ProfileFigures], Mapping[str, list[Sounded]]]:
    """Compare each profile with `offline`, in turn; returns figures, and sounds by profile. seconds_of_item: speech in an item."""
    sounds: dict[str, list[Sounded]] = {profile: [] for profile in Profile}
    await make_sounds(model, WaveRequest(0), speeches[0])
    costs: dict[str, list[float]] = {profile: [] for profile in Profile}
    firsts: dict[str, list[float]] = {profile: [] for profile in Profile}
    for turn in range(ROUNDS):
        for profile in Profile:
            profile_sounds = [await make_sounds(model, WaveRequest(n, profile), items) for n, items in enumerate(speeches)]
            costs[profile].append(sum(one.cost_s for one in profile_sounds))
            firsts[profile].append(median([one.first_s for one in profile_sounds]))
            sounds[profile] = profile_sounds if turn == 0 else sounds[profile]
    figures = []
    for profile in Profile:
        pairs = [(one.samples, reference.samples) for one, reference in zip(sounds[profile], sounds["offline"], strict=True)]
        figures.append(
            ProfileFigures(
                voice,
                profile,
                median([one.first_items for one in sounds[profile]]) * seconds_of_item,
                median(firsts[profile]),
                median([decibels(*pair) for pair in pairs]),
                median([spectral_distance(*pair) for pair in pairs]),
                median([one / reference for one, reference in zip(costs[profile], costs["offline"], strict=True)]),
            )
        )
    return figures, sounds


async def flow(report: Report, folder: Path) -> list[ProfileFigures]:
    """Measure the Code2Wav of Qwen2.5-Omni, in a checkpoint that is made in `folder`."""
    make_tiny("qwen2.5-omni", folder, CheckpointOrder(size="small"))
    # One thread: the figure is the cost of streaming, on any number of cores.
    model = load_code2wav(folder, LoadOptions(path=folder, family={"workers": 1}))
    source = np.random.default_rng(0)
    codes = source.integers(0, 8192, (CODES, 1)).astype(np.uint32)
    figures, sounds = await lines("qwen2_5_omni (small, random weights)", model, [codes], 0.02)
    setup = f"{CODES} codes, one thread, CPU time; small; median of {ROUNDS} in turn"
    by_profile = {line.profile: line for line in figures}
    report.add(
        Figure("x_cost_balanced", by_profile["balanced"].cost, "x", "<= 1.35", f"over the whole sequence at once; {setup}"),
        Figure("x_cost_latency", by_profile["latency"].cost, "x", "", setup),
        Figure("x_cost_quality", by_profile["quality"].cost, "x", "", setup),
        Figure(
            "first_packet_codes",
            sounds["balanced"][0].first_items,
            "codes",
            "<= 24",
            "balanced: that had come when the first sound was there",
        ),
        Figure("first_packet", sounds["balanced"][0].first_sound_s, "s", "", "how long it is"),
        Figure("snr_balanced", by_profile["balanced"].snr, "dB", "", "of the whole over what differs from it"),
        Figure("snr_quality", by_profile["quality"].snr, "dB", "", "the same"),
    )
    alone_s, together_s = [], []
    for n in range(ROUNDS):
        alone_s.append(await all_s(model, [WaveRequest(n)], codes[:200]))
        together_s.append(await all_s(model, [WaveRequest(n + speaker) for speaker in range(SPEAKERS)], codes[:200]))
    speed = median([SPEAKERS * single_s / batch_s for single_s, batch_s in zip(alone_s, together_s, strict=True)])
    report.add(
        Figure("x_speakers_8", speed, "x", "", f"sound a second of {SPEAKERS} at once over one alone: {model.info.settings['batch']}")
    )
    await model.close()
    return figures


def causal(report: Report) -> None:
    """Measure Qwen3-Omni's Code2Wav: how much less it costs to keep the state after each chunk than to compute the last AGAIN_FRAMES frames
    a second time, as Transformers' chunked_decode does. That gives another sound, because attention looks farther back."""
    net, frames = shrunk(CAUSAL_SCALE), 48
    source = np.random.default_rng(0)
    codes = torch.from_numpy(source.integers(0, net.config.codes, (1, AGAIN_FRAMES + frames, net.config.codebooks)))
    ends = {size: range(AGAIN_FRAMES + size, AGAIN_FRAMES + frames + 1, size) for size in (1, 4, 12)}

    def go_on(size: int) -> None:
        """Keep the state after each chunk."""
        _, states = net.step(codes[:, :AGAIN_FRAMES], [net.start()])
        for end in ends[size]:
            _, states = net.step(codes[:, end - size : end], states)

    def compute_again(size: int) -> None:
        """Compute AGAIN_FRAMES frames before each chunk a second time."""
        for end in ends[size]:
            net.step(codes[:, end - size - AGAIN_FRAMES : end], [net.start()])

    def read_prefix() -> None:
        """Do only what `go_on` does before its chunks."""
        net.step(codes[:, :AGAIN_FRAMES], [net.start()])

    with torch.inference_mode():
        calls: list[Callable[[], None]] = [read_prefix, *(partial(call, size) for size in ends for call in (go_on, compute_again))]
        costs = [[cpu_s(call) for call in calls] for _ in range(ROUNDS + 1)][1:]  # The first round warms up.
    prefix_s, *pairs_s = map(median, zip(*costs, strict=True))
    setup = f"{frames} frames, one thread, CPU time; a {CAUSAL_SCALE}th of the published width, random weights; median of {ROUNDS} in turn"
    for size, own_s, again_s in zip(ends, pairs_s[::2], pairs_s[1::2], strict=True):
        target = ">= 3" if size == 4 else ""
        note = f"cost a frame in chunks of {size} with {AGAIN_FRAMES} frames computed again, over that with what they left; {setup}"
        report.add(Figure(f"x_causal_chunk{size}", again_s / (own_s - prefix_s), "x", target, note))


def cpu_s(call: Callable[[], None]) -> float:
    """CPU seconds of one call."""
    begin_s = time.process_time()
    call()
    return time.process_time() - begin_s


async def all_s(model: Code2WavModel[Any], requests: Sequence[WaveRequest], items: Array) -> float:
    """Seconds to make the sound of these items for all requests at once."""
    begin_s = time.perf_counter()
    await asyncio.gather(*(make_sounds(model, request, items) for request in requests))
    return time.perf_counter() - begin_s


async def default_voice(report: Report) -> list[ProfileFigures]:
    """Measure the default voice, with the word error rate of a recogniser; returns the figures of each profile."""
    folder = model_directory()
    talker, model = load_talker(folder / "talker"), load_smol_code2wav(folder / "code2wav")
    speeches = [await rows_of(talker, text) for text in TEXTS]
    figures, sounds = await lines("default", model, speeches, 1 / 40)
    listener = await asyncio.to_thread(recogniser)
    judged = []
    for line in figures:
        pairs = [(text, recognise(listener, one.samples, 24000)) for text, one in zip(TEXTS, sounds[line.profile], strict=True)]
        judged.append(replace(line, errors=word_error_rate(pairs)))
        report.add(Figure(f"default_word_error_rate_{line.profile}", judged[-1].errors or 0.0, "", "<= 0.04", f"{len(TEXTS)} texts"))
        report.add(Figure(f"default_spectral_distance_{line.profile}", line.distance, "dB", "", "from the whole"))
    await asyncio.gather(talker.close(), model.close())
    return judged


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


def write(figures: Sequence[ProfileFigures], *, docs: bool) -> None:
    """Write the table and the picture to OUT. docs: also into the page, between its marks."""
    OUT.mkdir(exist_ok=True)
    (OUT / "latency-and-quality.md").write_text(table(figures))
    draw(OUT / PICTURE.name, figures)
    if docs:
        shutil.copy(OUT / PICTURE.name, PICTURE)
        begin, rest = PAGE.read_text().split("<!-- made by make bench-code2wav -->\n")
        PAGE.write_text(f"{begin}<!-- made by make bench-code2wav -->\n{table(figures)}{rest[rest.index('<!-- end -->') :]}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table and the picture into docs/latency-and-quality.md")
    options = parser.parse_args()
    report = Report("code2wav")
    torch.set_num_threads(1)
    figures: list[ProfileFigures] = []
    with report.part("causal"):
        causal(report)
    with tempfile.TemporaryDirectory() as folder, report.part("flow"):
        figures += asyncio.run(flow(report, Path(folder)))
    with report.part("default voice"):
        figures += asyncio.run(default_voice(report))
    write(figures, docs=options.docs)
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
