"""`python -m benchmarks.pipeline [--family qwen3_omni]`: an Omni model from a question to sound, compared with Transformers, which runs the
same stages one after the other. The weights are random, of size small; an answer has 40 tokens, and as many frames as `Chain.frames`
says. The model is asked with text, and with a sound alone; and with one and with two replicas of Talker and Code2Wav."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.figures import Figure, Report, arguments, median
from benchmarks.talker import NEVER_ENDS, steps_s, thinker_params, words
from helpers import media_files
from helpers.fleet import Fleet, fleet
from helpers.omni_answers import messages
from helpers.omni_reference import OmniReference, Qwen3Reference, Seen
from helpers.servers import CHAIN, omni_stub
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.models.conversation import Media, Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import SpeechRequest, TextRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import talker as loading_talker2_5
from omnistage.models.qwen2_5_omni import thinker as loading2_5
from omnistage.models.qwen2_5_omni.wave import code2wav as loading_wave2_5
from omnistage.models.qwen2_5_omni.wave.code2wav import Speech as FlowSpeech
from omnistage.models.qwen2_5_omni.wave.code2wav import sound
from omnistage.models.qwen3_omni import talker as loading_talker3
from omnistage.models.qwen3_omni import thinker as loading3
from omnistage.models.qwen3_omni.wave import code2wav as loading_wave3
from omnistage.models.qwen3_omni.wave.code2wav import Speech as CausalSpeech
from omnistage.models.speech.talker import PLACES, PROMPT, RowTalker
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny
from omnistage.models.tiny.qwen3_omni import SIZES, SPECIAL
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.chunks import chunks_of

TOKENS, CHARACTERS = 40, 80
"""Tokens of an answer, and characters of a question."""


class SoundPath(ABC):
    """The model calls from a question to the first sound, run in this process; each call needs the result of the call before it."""

    frames: ClassVar[int]
    """How many frames the first sound needs."""
    row_delay_steps: ClassVar[int]
    """How many steps of the Thinker a row comes after its token."""

    loaders: ClassVar[tuple[Callable[[Path, LoadOptions], Any], ...]]

    def __init__(self, folder: Path) -> None:
        models = [load(folder, LoadOptions(path=folder, dtype="float32")) for load in self.loaders]
        self.thinker: MediaThinker = models[0]
        self.talker: RowTalker = models[1]
        self.code2wav = models[2]

    @abstractmethod
    async def window_s(self, seed: int) -> float:
        """Seconds that Code2Wav takes for the sound of the first frames."""

    async def seconds(self, seed: int) -> float:
        """Seconds from a question to the first sound, if each call begins when the one before it ends."""
        text = thinker_params(seed, CHARACTERS).messages[0].parts[0].text
        request = TextRequest((Turn("user", (text,)),), seed=seed, max_tokens=TOKENS, ignore_eos=True)
        text_sequence = SequenceRequest(Prompt.of_tokens((await self.thinker.prepare(request)).prompt_ids), seed, TOKENS, taps_from=0)
        speech_request = await self.talker.prepare(SpeechRequest(seed, max_frames=self.frames))
        width = {port.name: port.width for port in self.talker.info.accepts}
        speech_sequence = self.talker.sequence(speech_request, np.zeros((width[PLACES], len(text_sequence.prompt)), np.int64))
        rows = torch.randn(len(speech_sequence.prompt), width[PROMPT]).to(self.talker.engine.spec.dtype)
        with torch.inference_mode():
            thinker_s = steps_s(self.thinker.engine, text_sequence, steps=self.frames - 1 + self.row_delay_steps)
            talker_s = steps_s(self.talker.engine, speech_sequence, steps=self.frames - 1, vectors=rows)
        return self._frames_s(thinker_s, talker_s) + await self.window_s(seed)

    def _frames_s(self, thinker_s: Sequence[float], talker_s: Sequence[float]) -> float:
        """Seconds until the last frame is made, if both compute at the same time: the first frame needs the row of the Thinker's first
        token, and each frame after it the row of the next token. thinker_s, talker_s: seconds of the prompt, then of each step."""
        row_ends = list(accumulate(thinker_s))[self.row_delay_steps :]
        frame_end = row_ends[0] + talker_s[0]
        for row_end, step_s in zip(row_ends[1:], talker_s[1:], strict=True):
            frame_end = max(row_end, frame_end) + step_s
        return frame_end

    async def close(self) -> None:
        await asyncio.gather(self.thinker.close(), self.talker.close(), self.code2wav.close())


class FlowPath(SoundPath):
    """The path of Qwen2.5-Omni, whose first sound needs 24 codes, a window of Code2Wav."""

    frames = 24
    row_delay_steps = 1
    loaders = (loading2_5.load_thinker, loading_talker2_5.load_talker, loading_wave2_5.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = FlowSpeech(model.config, model.windows, await model.prepare(WaveRequest(seed=0)))
        codes = torch.randint(0, 8192, (self.frames, 1), generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        step = speech.next()
        assert step is not None
        window, flow = step
        while not flow.done:
            model.windows.step([flow])
        vocoding = speech.solved(window, flow)
        while not vocoding.done:
            model.windows.step([vocoding])
        sound(vocoding)
        return time.perf_counter() - begin_s


class CausalPath(SoundPath):
    """The path of Qwen3-Omni, whose first sound needs one frame."""

    frames = 1
    row_delay_steps = 0
    loaders = (loading3.load_thinker, loading_talker3.load_talker, loading_wave3.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = CausalSpeech(model.config, model.windows.net, (await model.prepare(WaveRequest(seed=0, profile="latency"))).schedule)
        shape = (self.frames, model.config.codebooks)
        codes = torch.randint(0, model.config.codes, shape, generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        step = speech.next()
        assert step is not None
        window, job = step
        model.windows.step([job])
        speech.finish(window, job)
        return time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class Chain:
    """A family to measure. maker: makes its checkpoint. family: names its pipeline and models. suffix: ends the names of its figures.
    frames, samples: length of an answer. profile: for Code2Wav. sampling: for the Talker. reference: loads the model of Transformers.
    generate_arguments: makes more arguments of its `generate` from its config. path: makes a SoundPath. goal, relays: goals of
    ttfa_over_hf_e2e and ttfa_relays."""

    maker: str
    family: str
    suffix: str
    frames: int
    samples: int
    profile: str
    sampling: stage_pb2.Sampling
    reference: Callable[[Path], OmniReference]
    generate_arguments: Callable[[Any], Mapping[str, Any]]
    path: Callable[[Path], SoundPath]
    goal: str
    relays: str = ""

    def figure(self, name: str, value: float, unit: str, goal: str, note: str) -> Figure:
        """Make a figure of this family."""
        return Figure(f"{name}{self.suffix}", value, unit, goal, note)


def _arguments2_5(config: Any) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do. Items that are no codes are banned: the vocoder has no row for
    them."""
    others = range(config.token2wav_config.dit_config.num_embeds, config.talker_config.vocab_size)
    count = CHAINS["qwen2_5_omni"].frames
    return {"talker_max_new_tokens": count, "talker_min_new_tokens": count, "talker_bad_words_ids": [[number] for number in others]}


def _arguments3(config: Any) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do: its Talker makes one frame fewer than it may make tokens."""
    count = CHAINS["qwen3_omni"].frames + 1
    return {"talker_max_new_tokens": count, "talker_min_new_tokens": count}


class _Speaking(Qwen3Reference):
    """The model of Transformers with its Talker."""

    loading: ClassVar = {}


_END = SIZES["small"]["talker"]["codes"] + SPECIAL["codec_eos_token_id"]
CHAINS: Mapping[str, Chain] = {
    "qwen2_5_omni": Chain(
        "qwen2.5-omni",
        "qwen2_5_omni",
        "",
        frames=500,
        samples=500 * 480,
        profile="",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=NEVER_ENDS),
        reference=OmniReference,
        generate_arguments=_arguments2_5,
        path=FlowPath,
        goal="<= 0.15",
    ),
    "qwen3_omni": Chain(
        "qwen3-omni",
        "qwen3_omni",
        "_qwen3",
        frames=63,
        samples=63 * 1920 - 555,
        profile="latency",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, logit_bias={_END: -100.0}),
        reference=_Speaking,
        generate_arguments=_arguments3,
        path=CausalPath,
        goal="<= 0.10",
        relays="<= 0.10",
    ),
}
"""By the names of the families. Answers of ten seconds, and of five."""


ROUNDS = 3
AT_ONCE = 8
SOUND_S = 5.0
"""Seconds of a question that is a sound."""


@dataclass
class SpeechTimes:
    """Seconds of an answer. waited_s: how long the server asks a player to wait. late_s: how long the player lacks sound afterwards."""

    first_s: float = 0.0
    total_s: float = 0.0
    samples: int = 0
    talker: str = ""
    """The name of the replica that spoke."""
    waited_s: float = 0.0
    late_s: float = 0.0
    _begin_s: float = field(default_factory=time.perf_counter)

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        """Note an event: the times of its sound, and the replica of the Talker."""
        self.talker = next((report.replica for report in event.usage.stages if report.kind == stage_pb2.STAGE_KIND_TALKER), "")
        for chunk in chunks_of(event) if event.WhichOneof("event") in ("chunk", "chunks") else ():
            if chunk.port != "audio" or not chunk.count:
                continue
            elapsed_s = time.perf_counter() - self._begin_s
            if not self.samples:
                self.first_s, self.waited_s = elapsed_s, chunk.audio.prebuffer_ms / 1000
            # The player has played all earlier samples at this moment.
            due_s = self.first_s + self.waited_s + self.late_s + self.samples / chunk.audio.sample_rate_hz
            self.late_s += max(elapsed_s - due_s, 0.0)
            self.samples += chunk.count

    def end(self, samples: int) -> None:
        self.total_s = time.perf_counter() - self._begin_s
        assert self.samples == samples, self.samples


def conversation(seed: int, *, is_sound: bool = False) -> tuple[Turn, ...]:
    """A question in text, or if `is_sound` a sound alone."""
    part = Media("audio/wav", media_files.sound(seed, SOUND_S)) if is_sound else words(seed, CHARACTERS)
    return (Turn("user", (part,)),)


def question(chain: Chain, seed: int, turns: Sequence[Turn]) -> omni_pb2.GenerateRequest:
    thinker = stage_pb2.ThinkerParams(
        messages=messages(turns), sampling=stage_pb2.Sampling(temperature=1), max_tokens=TOKENS, ignore_eos=True
    )
    talker = stage_pb2.TalkerParams(sampling=chain.sampling, max_frames=chain.frames)
    return omni_pb2.GenerateRequest(
        seed=seed, outputs=["text", "audio"], thinker=thinker, talker=talker, code2wav=stage_pb2.Code2WavParams(profile=chain.profile)
    )


async def measure_answer(stub: omni_pb2_grpc.OmniServiceAsyncStub, chain: Chain, seed: int, turns: Sequence[Turn] = ()) -> SpeechTimes:
    """Ask and measure the answer. turns: the question, by default one in text."""
    request, times = question(chain, seed, turns or conversation(seed)), SpeechTimes()
    async for event in stub.Generate(request, timeout=600):
        times.take(event)
    times.end(chain.samples)
    return times


# Transformers ----------------------------------------------------------------------------------------------------------------------


class Sequential:
    """Asks Transformers, whose `generate` makes text, then codes, then sound; on 1 or 2 threads, whichever is faster."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._reference = chain, chain.reference(folder)
        self.threads = min((1, 2), key=lambda threads: self._answer_s(0, conversation(0), ([], []), threads))

    async def answer_s(self, seed: int, turns: Sequence[Turn]) -> float:
        """Seconds of an answer. A sound in the question is decoded before, outside the measured time."""
        return self._answer_s(seed, turns, await self._reference.read(turns), self.threads)

    def _answer_s(self, seed: int, turns: Sequence[Turn], media: Seen, threads: int) -> float:
        """Seconds of an answer. media: of the question, decoded."""
        ids, inputs = self._reference.inputs(turns, media)
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        begin_s = time.perf_counter()
        with torch.inference_mode():
            _, sound = self._reference.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                thinker_max_new_tokens=TOKENS,
                thinker_min_new_tokens=TOKENS,
                thinker_do_sample=True,
                **self._chain.generate_arguments(self._reference.whole.config),
            )
        duration_s = time.perf_counter() - begin_s
        torch.set_num_threads(1)
        # `generate` of Qwen2.5-Omni drops the last code unless it cannot be a code of its own.
        assert abs(sound.numel() - self._chain.samples) <= self._chain.samples // self._chain.frames + 1, sound.numel()
        return duration_s


async def beside_transformers(chain: Chain, running: Fleet, folder: Path, report: Report) -> None:
    """Compare the chain with Transformers: one by one, at once, and with questions in sound."""
    sequential = Sequential(chain, folder)
    async with omni_stub(running.address("router")) as stub:
        await measure_answer(stub, chain, 0)
        mine, others = await in_turns(stub, chain, sequential, is_sound=False)
        together_s, together = await at_once(stub, chain)
        theirs = median(others)
        setup = note_of(chain, sequential, theirs)
        report.add(
            chain.figure("hf_e2e", theirs, "s", "", f"generate of Transformers on the faster of 1 and 2 threads: {sequential.threads}"),
            chain.figure("ttfa", median([times.first_s for times in mine]), "s", "", "through the router"),
            chain.figure("e2e", median([times.total_s for times in mine]), "s", "", "through the router"),
            chain.figure("prebuffer_told", median([times.waited_s for times in mine]), "s", "", "what a player was told to wait"),
            chain.figure("late_after_it", max(each.late_s for each in mine), "s", "", "the longest that who waited so had nothing to play"),
            *over_transformers(chain, "", mine, others, setup),
            chain.figure("x_throughput_8", AT_ONCE * theirs / together_s, "x", ">= 4", f"{AT_ONCE} at once in {together_s:.1f} s; {setup}"),
            chain.figure("ttfa_8", median([times.first_s for times in together]), "s", "", f"of {AT_ONCE} at once, median"),
        )
        mine, others = await in_turns(stub, chain, sequential, is_sound=True)
        setup = f"asked with {SOUND_S:g} s of sound alone; {note_of(chain, sequential, median(others))}"
        report.add(*over_transformers(chain, "_sound", mine, others, setup))


async def in_turns(
    stub: omni_pb2_grpc.OmniServiceAsyncStub, chain: Chain, sequential: Sequential, *, is_sound: bool
) -> tuple[list[SpeechTimes], list[float]]:
    """Ask our chain and Transformers in turn; returns our times, and the seconds of Transformers for the same answers. is_sound: ask with
    sound."""
    mine, others = list[SpeechTimes](), list[float]()
    for seed in range(1, 1 + ROUNDS):
        turns = conversation(seed, is_sound=is_sound)
        others.append(await sequential.answer_s(seed, turns))
        mine.append(await measure_answer(stub, chain, seed, turns))
    return mine, others


async def at_once(stub: omni_pb2_grpc.OmniServiceAsyncStub, chain: Chain) -> tuple[float, list[SpeechTimes]]:
    """Ask for AT_ONCE answers at once; returns the seconds for all of them, and the times of each."""
    begin_s = time.perf_counter()
    together = await asyncio.gather(*(measure_answer(stub, chain, 100 + n) for n in range(AT_ONCE)))
    return time.perf_counter() - begin_s, together


def note_of(chain: Chain, sequential: Sequential, theirs: float) -> str:
    """The note of the figures that compare with Transformers. theirs: seconds of an answer of Transformers."""
    size = f"{TOKENS} tokens, {chain.frames} frames; small"
    return f"{size}; median of {ROUNDS}; Transformers: {theirs:.1f} s on {sequential.threads} threads"


def over_transformers(chain: Chain, suffix: str, mine: Sequence[SpeechTimes], others: Sequence[float], note: str) -> Iterator[Figure]:
    """Our times divided by `others`, seconds of a whole answer of Transformers. suffix: end of the figures' names. note: their note."""
    pairs = list(zip(mine, others, strict=True))
    yield chain.figure(f"ttfa_over_hf_e2e{suffix}", median([a.first_s / b for a, b in pairs]), "", chain.goal, note)
    yield chain.figure(f"e2e_over_hf_e2e{suffix}", median([a.total_s / b for a, b in pairs]), "", "<= 0.7", note)


# The critical path -----------------------------------------------------------------------------------------------------------------


async def critical_path(chain: Chain, running: Fleet, folder: Path, report: Report) -> None:
    """Compare the time to the first sound with the time of the model calls that it needs, made in this process."""
    path, ratios, paths = chain.path(folder), list[float](), list[float]()
    await path.seconds(199)
    async with omni_stub(running.address("router")) as stub:
        for seed in range(200, 200 + 2 * ROUNDS):
            paths.append(await path.seconds(seed))
            ratios.append((await measure_answer(stub, chain, seed)).first_s / paths[-1])
    await path.close()
    note = f"the first sound through the router, over {median(paths) * 1000:.0f} ms of calls; small; median of {len(ratios)}"
    report.add(chain.figure("ttfa_over_critical_path", median(ratios), "x", "<= 1.25", note))
    share = "of the time to the first sound, what is no call of a model"
    report.add(chain.figure("ttfa_relays", 1 - 1 / median(ratios), "", chain.relays, share))


# Replicas --------------------------------------------------------------------------------------------------------------------------


async def two_replicas(chain: Chain, single: Fleet, double: Fleet, report: Report) -> None:
    """Compare two Talkers and two Code2Wav, which share one Thinker, with one of each, in turn: AT_ONCE answers at once."""
    ratios, firsts, answers_by_talker = list[float](), list[float](), Counter[str]()
    async with omni_stub(single.address("router")) as one, omni_stub(double.address("router")) as two:
        await asyncio.gather(at_once(one, chain), at_once(two, chain))
        for _ in range(ROUNDS):
            (one_s, one_answers), (two_s, two_answers) = await at_once(one, chain), await at_once(two, chain)
            ratios.append(one_s / two_s)
            firsts.append(median([times.first_s for times in two_answers]) / median([times.first_s for times in one_answers]))
            answers_by_talker.update(times.talker for times in two_answers)
    shares = " and ".join(str(count) for count in sorted(answers_by_talker.values()))
    setup = f"{AT_ONCE} at once; {shares} answers of the two; {os.cpu_count()} cores; median of {ROUNDS}"
    report.add(chain.figure("x_two_talkers_8", median(ratios), "x", "", f"seconds with one Talker and Code2Wav over two of each; {setup}"))
    report.add(chain.figure("ttfa_two_over_one_talker_8", median(firsts), "x", "", f"the first sound with two of each over one; {setup}"))


def serving(chain: Chain, folder: Path, replicas: Mapping[str, int]) -> AbstractContextManager[Fleet]:
    """Start the chain in processes of its own. replicas: how many of a kind, if not one."""
    (logs := folder / f"logs-{sum(replicas.values())}").mkdir()
    stage_args = ["--checkpoint", str(folder / "small"), "--dtype", "float32"]
    return fleet(logs, replicas=replicas, kinds=CHAIN, pipeline=chain.family, family=chain.family, stage_args=stage_args)


async def _measure(chain: Chain, report: Report, folder: Path) -> None:
    make_tiny(chain.maker, folder / "small", CheckpointOrder(size="small"))
    with serving(chain, folder, {}) as running:
        with report.part("critical path"):
            await critical_path(chain, running, folder / "small", report)
        with report.part("beside Transformers"):
            await beside_transformers(chain, running, folder / "small", report)
        with report.part("two Talkers"), serving(chain, folder, {"talker": 2, "code2wav": 2}) as double:
            await two_replicas(chain, running, double, report)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--family", choices=sorted(CHAINS), default="qwen2_5_omni", help="default: %(default)s")
    options = parser.parse_args()
    chain = CHAINS[options.family]
    report = Report(f"pipeline{chain.suffix}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(chain, report, Path(folder)))
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
