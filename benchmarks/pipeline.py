"""`python -m benchmarks.pipeline [--family qwen3_omni]`: an Omni model from a question to sound, compared with Transformers, which runs the
same stages one after the other. The weights are random, of size small; an answer has 40 tokens, and as many frames as `Chain.frames`
says. The model is asked with text, and with a sound alone; and with one and with two replicas of Talker and Code2Wav."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from benchmarks.figures import Benchmark, Figure, arguments, median, ratio, run, time_call
from benchmarks.path import TOKENS, CausalPath, FlowPath, SoundPath
from helpers import media_files
from helpers.fleet import Fleet, fleet
from helpers.omni_answers import messages
from helpers.omni_reference import OmniReference, Qwen3Reference, Seen
from helpers.servers import CHAIN, omni_stub
from helpers.waves import ENDS
from omnistage.models.conversation import Media, Turn
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny
from omnistage.models.tiny.qwen3_omni import SIZES, SPECIAL
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.chunks import chunks_of

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub

CHARACTERS = 80
"""The length of a question."""
NEVER = -100.0
"""The bias of tokens that would end the speech."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A family to measure. maker: makes its checkpoint. family: names its pipeline and models. suffix: ends the names of its figures.
    frames: length of an answer. least_frames: the same in a smallest run. frame_samples: samples of a frame. lost_samples: how many are
    missing at the end. profile: for Code2Wav. sampling: for the Talker. reference: loads the model of Transformers. generate_arguments:
    makes more arguments of its `generate` from its config and a number of frames. path: makes a SoundPath. goal, relays: goals of
    ttfa_over_hf_e2e and ttfa_relays."""

    maker: str
    family: str
    suffix: str
    frames: int
    least_frames: int
    frame_samples: int
    lost_samples: int
    profile: str
    sampling: stage_pb2.Sampling
    reference: Callable[[Path], OmniReference]
    generate_arguments: Callable[[Any, int], Mapping[str, Any]]
    path: Callable[[Path], SoundPath]
    goal: str
    relays: str = ""

    @property
    def samples(self) -> int:
        """The length of the sound of an answer."""
        return self.frames * self.frame_samples - self.lost_samples

    def figure(self, name: str, value: float, unit: str, goal: str, note: str) -> Figure:
        """Make a figure of this family."""
        return Figure(f"{name}{self.suffix}", value, unit, goal, note)


def _arguments2_5(config: Any, frames: int) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do. Items that are no codes are banned: the vocoder has no row for
    them."""
    others = range(config.token2wav_config.dit_config.num_embeds, config.talker_config.vocab_size)
    return {"talker_max_new_tokens": frames, "talker_min_new_tokens": frames, "talker_bad_words_ids": [[number] for number in others]}


def _arguments3(config: Any, frames: int) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do: its Talker makes one frame fewer than it may make tokens."""
    return {"talker_max_new_tokens": frames + 1, "talker_min_new_tokens": frames + 1}


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
        least_frames=24,
        frame_samples=480,
        lost_samples=0,
        profile="",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=dict.fromkeys(ENDS, NEVER)),
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
        least_frames=4,
        frame_samples=1920,
        lost_samples=555,
        profile="latency",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, logit_bias={_END: NEVER}),
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
    """Seconds of an answer to its first sound and to its end, and the name of the replica of the Talker that spoke."""

    first_s: float = 0.0
    total_s: float = 0.0
    samples: int = 0
    talker: str = ""
    _begin_s: float = field(default_factory=time.perf_counter)

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        """Note an event: the times of its sound, and the replica of the Talker."""
        self.talker = next((report.replica for report in event.usage.stages if report.kind == stage_pb2.STAGE_KIND_TALKER), "")
        for chunk in chunks_of(event) if event.WhichOneof("event") in ("chunk", "chunks") else ():
            if chunk.port == "audio" and chunk.count:
                self.first_s = self.first_s or time.perf_counter() - self._begin_s
                self.samples += chunk.count

    def end(self, samples: int) -> None:
        self.total_s = time.perf_counter() - self._begin_s
        assert self.samples == samples, self.samples


def words(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=CHARACTERS))


def conversation(seed: int, *, is_sound: bool = False) -> tuple[Turn, ...]:
    """A question in text, or if `is_sound` a sound alone."""
    return (Turn("user", (Media("audio/wav", media_files.sound(seed, SOUND_S)) if is_sound else words(seed),)),)


async def measure_answer(stub: Stub, chain: Chain, seed: int, *, is_sound: bool = False) -> SpeechTimes:
    """Ask and measure the answer. is_sound: ask with a sound."""
    turns, sampling = messages(conversation(seed, is_sound=is_sound)), stage_pb2.Sampling(temperature=1)
    request = omni_pb2.GenerateRequest(
        seed=seed,
        outputs=["text", "audio"],
        thinker=stage_pb2.ThinkerParams(messages=turns, sampling=sampling, max_tokens=TOKENS, ignore_eos=True),
        talker=stage_pb2.TalkerParams(sampling=chain.sampling, max_frames=chain.frames),
        code2wav=stage_pb2.Code2WavParams(profile=chain.profile),
    )
    times = SpeechTimes()
    async for event in stub.Generate(request, timeout=600):
        times.take(event)
    times.end(chain.samples)
    return times


async def at_once(stub: Stub, chain: Chain, count: int) -> tuple[float, list[SpeechTimes]]:
    """Ask for `count` answers at once; returns the seconds for all of them, and the times of each."""
    return await time_call(asyncio.gather(*(measure_answer(stub, chain, 100 + n) for n in range(count))))


# Transformers ----------------------------------------------------------------------------------------------------------------------


class Sequential:
    """Asks Transformers, whose `generate` makes text, then codes, then sound; on 1 or 2 threads, whichever is faster."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._reference = chain, chain.reference(folder)
        self.threads = min((1, 2), key=lambda threads: self._answer_s(0, conversation(0), ([], []), threads))

    async def answer(self, seed: int, *, is_sound: bool = False) -> SpeechTimes:
        """Ask and measure the answer, whose sound comes when all of it is made. The decoding of a sound in the question does not count."""
        turns = conversation(seed, is_sound=is_sound)
        answer_s = self._answer_s(seed, turns, await self._reference.read(turns), self.threads)
        return SpeechTimes(answer_s, answer_s)

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
                **self._chain.generate_arguments(self._reference.whole.config, self._chain.frames),
            )
        duration_s = time.perf_counter() - begin_s
        torch.set_num_threads(1)
        # `generate` of Qwen2.5-Omni drops the last code unless it cannot be a code of its own.
        assert abs(sound.numel() - self._chain.samples) <= self._chain.frame_samples + 1, sound.numel()
        return duration_s


async def beside_transformers(benchmark: Benchmark, chain: Chain, running: Fleet, folder: Path) -> None:
    """Compare the chain with Transformers: one by one, at once, and with questions in sound."""
    sequential = Sequential(chain, folder)
    async with omni_stub(running.address("router")) as stub:
        for suffix, is_sound in (("", False), ("_sound", True)):
            ours, theirs = await benchmark.by_turns(
                ROUNDS, partial(measure_answer, stub, chain, is_sound=is_sound), partial(sequential.answer, is_sound=is_sound)
            )
            others_s = [times.total_s for times in theirs]
            note = f"{TOKENS} tokens, {chain.frames} frames; small; median of {len(ours)}; Transformers: {median(others_s):.1f} s on"
            note = f"{f'asked with {SOUND_S:g} s of sound alone; ' if is_sound else ''}{note} {sequential.threads} threads"
            for name, goal in (("first_s", chain.goal), ("total_s", "<= 0.7")):
                figure = f"{'ttfa' if name == 'first_s' else 'e2e'}_over_hf_e2e{suffix}"
                share = ratio([getattr(times, name) for times in ours], others_s)
                benchmark.add(chain.figure(figure, share, "", goal, note))
            if not is_sound:
                benchmark.add(*own_times(chain, ours, others_s))
                count = benchmark.size(AT_ONCE, 2)
                together_s, _ = await at_once(stub, chain, count)
                speed = count * median(others_s) / together_s
                benchmark.add(chain.figure("x_throughput_8", speed, "x", ">= 4", f"{count} at once in {together_s:.1f} s; {note}"))


def own_times(chain: Chain, ours: Sequence[SpeechTimes], others_s: Sequence[float]) -> Iterator[Figure]:
    """Yield the times of our answers by themselves. others_s: seconds of Transformers' answers."""
    yield chain.figure("hf_e2e", median(others_s), "s", "", "generate of Transformers on the faster of 1 and 2 threads")
    yield chain.figure("ttfa", median([times.first_s for times in ours]), "s", "", "through the router")
    yield chain.figure("e2e", median([times.total_s for times in ours]), "s", "", "through the router")


# The critical path -----------------------------------------------------------------------------------------------------------------


async def critical_path(benchmark: Benchmark, chain: Chain, running: Fleet, folder: Path) -> None:
    """Compare the time to the first sound with the time of the model calls that it needs, made in this process."""
    path = chain.path(folder)
    async with omni_stub(running.address("router")) as stub:

        async def first_s(number: int) -> float:
            return (await measure_answer(stub, chain, 200 + number)).first_s

        firsts_s, paths_s = await benchmark.by_turns(2 * ROUNDS, first_s, lambda number: path.seconds(words(200 + number), 200 + number))
    await path.close()
    over = ratio(firsts_s, paths_s)
    note = f"the first sound through the router, over {median(paths_s) * 1000:.0f} ms of calls; small; median of {len(paths_s)}"
    share_note = "of the time to the first sound, what is no call of a model"
    benchmark.add(
        chain.figure("ttfa_over_critical_path", over, "x", "<= 1.25", note),
        chain.figure("ttfa_relays", 1 - 1 / over, "", chain.relays, share_note),
    )


# Replicas --------------------------------------------------------------------------------------------------------------------------


async def two_replicas(benchmark: Benchmark, chain: Chain, single: Fleet, double: Fleet) -> None:
    """Compare two Talkers and two Code2Wav, which share one Thinker, with one of each, for answers at once."""
    count = benchmark.size(AT_ONCE, 2)
    async with omni_stub(single.address("router")) as one, omni_stub(double.address("router")) as two:
        rounds = await benchmark.by_turns(ROUNDS, lambda _: at_once(one, chain, count), lambda _: at_once(two, chain, count))
    (one_s, two_s), (one_firsts_s, two_firsts_s) = (
        [[answer_s for answer_s, _ in of_way] for of_way in rounds],
        [[median([times.first_s for times in answers]) for _, answers in of_way] for of_way in rounds],
    )
    answers_by_talker = Counter(times.talker for _, answers in rounds[1] for times in answers)
    shares = " and ".join(str(count) for count in sorted(answers_by_talker.values()))
    setup = f"{count} at once; {shares} answers of the two; {os.cpu_count()} cores; median of {len(one_s)}"
    note, first_note = (
        f"seconds with one Talker and Code2Wav over two of each; {setup}",
        f"the first sound with two of each over one; {setup}",
    )
    benchmark.add(
        chain.figure("x_two_talkers_8", ratio(one_s, two_s), "x", "", note),
        chain.figure("ttfa_two_over_one_talker_8", ratio(two_firsts_s, one_firsts_s), "x", "", first_note),
    )


def serving(chain: Chain, folder: Path, replicas: Mapping[str, int]) -> AbstractContextManager[Fleet]:
    """Start the chain in processes of its own. replicas: how many of a kind, if not one."""
    (logs := folder / f"logs-{sum(replicas.values())}").mkdir()
    stage_args = ["--checkpoint", str(folder / "small"), "--dtype", "float32"]
    return fleet(logs, replicas=replicas, kinds=CHAIN, pipeline=chain.family, family=chain.family, stage_args=stage_args)


async def measure(chain: Chain, benchmark: Benchmark) -> None:
    """Measure all figures of a family."""
    chain = replace(chain, frames=benchmark.size(chain.frames, chain.least_frames))
    folder = benchmark.folder
    make_tiny(chain.maker, folder / "small", CheckpointOrder(size="small"))
    with serving(chain, folder, {}) as running:
        with benchmark.part("critical path"):
            await critical_path(benchmark, chain, running, folder / "small")
        with benchmark.part("beside Transformers"):
            await beside_transformers(benchmark, chain, running, folder / "small")
        with benchmark.part("two Talkers"), serving(chain, folder, {"talker": 2, "code2wav": 2}) as double:
            await two_replicas(benchmark, chain, running, double)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--family", choices=sorted(CHAINS), default="qwen2_5_omni", help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chain = CHAINS[options.family]
    return run(f"pipeline{chain.suffix}", options, {chain.family: partial(measure, chain)})


if __name__ == "__main__":
    sys.exit(main())
