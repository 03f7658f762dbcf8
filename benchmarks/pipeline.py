"""`python -m benchmarks.pipeline`: Qwen2.5-Omni from a question to sound, beside Transformers, which runs the same stages one after the
other. Random weights of size small; an answer of 40 tokens and 500 codes, which are ten seconds of speech."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from benchmarks.figures import Figure, Report, arguments, median
from benchmarks.talker import speech_of, steps_s, talker_params, thinker_params
from helpers.fleet import Fleet, fleet
from helpers.omni_reference import OmniReference
from helpers.servers import omni_stub
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.loading import load_thinker
from omnistage.models.qwen2_5_omni.loading_talker import load_talker
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav
from omnistage.models.qwen2_5_omni.wave.loading import load_code2wav
from omnistage.models.qwen2_5_omni.wave.speech import Speech, sound
from omnistage.models.tiny.makers import Order, make_tiny
from omnistage.v1 import omni_pb2, omni_pb2_grpc
from omnistage.wire.batches import chunks_of

ROUNDS = 3
TOKENS, FRAMES = 40, 500
CODE_SAMPLES = 480
AT_ONCE = 8
CHARACTERS = 80
FIRST_CODES = 24


@dataclass
class Heard:
    """Of one answer, seconds after it was asked for. waited_s: that the server told a player to wait. late_s: by how much sound came too
    late for who did."""

    first_s: float = 0.0
    total_s: float = 0.0
    samples: int = 0
    waited_s: float = 0.0
    late_s: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        for chunk in chunks_of(event) if event.WhichOneof("event") in ("chunk", "chunks") else ():
            if chunk.port != "audio" or not chunk.count:
                continue
            now = time.perf_counter() - self._begun
            if not self.samples:
                self.first_s, self.waited_s = now, chunk.audio.prebuffer_ms / 1000
            due = self.first_s + self.waited_s + self.late_s + self.samples / chunk.audio.sample_rate_hz
            self.late_s += max(now - due, 0.0)
            self.samples += chunk.count

    def end(self) -> None:
        self.total_s = time.perf_counter() - self._begun
        assert self.samples == FRAMES * CODE_SAMPLES


def question(seed: int) -> omni_pb2.GenerateRequest:
    thinker = thinker_params(seed, CHARACTERS, TOKENS)
    return omni_pb2.GenerateRequest(seed=seed, outputs=["text", "audio"], thinker=thinker, talker=talker_params(FRAMES))


async def answered(stub: omni_pb2_grpc.OmniServiceAsyncStub, seed: int) -> Heard:
    heard = Heard()
    async for event in stub.Generate(question(seed), timeout=600):
        heard.take(event)
    heard.end()
    return heard


# Transformers ----------------------------------------------------------------------------------------------------------------------


class Sequential:
    """Transformers' own `generate`, with sound, on so many threads as are faster."""

    def __init__(self, folder: Path) -> None:
        self._reference = OmniReference(folder)
        self.threads = min((1, 2), key=lambda threads: self.answer_s(0, threads))

    def answer_s(self, seed: int, threads: int = 0) -> float:
        turns = (Turn("user", (thinker_params(seed, CHARACTERS).messages[0].parts[0].text,)),)
        ids, inputs = self._reference.inputs(turns, ([], []))
        torch.set_num_threads(threads or self.threads)
        torch.manual_seed(seed)
        # Random weights draw what is no code, which their vocoder has no row for.
        config = self._reference.whole.config
        others = range(config.token2wav_config.dit_config.num_embeds, config.talker_config.vocab_size)
        begun = time.perf_counter()
        with torch.inference_mode():
            _, sound = self._reference.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                thinker_max_new_tokens=TOKENS,
                thinker_min_new_tokens=TOKENS,
                thinker_do_sample=True,
                talker_max_new_tokens=FRAMES,
                talker_min_new_tokens=FRAMES,
                talker_bad_words_ids=[[number] for number in others],
            )
        taken = time.perf_counter() - begun
        torch.set_num_threads(1)
        # Without what cannot be a code of its own, `generate` drops the last one.
        assert abs(sound.numel() - FRAMES * CODE_SAMPLES) <= CODE_SAMPLES, sound.numel()
        return taken


async def beside_transformers(running: Fleet, folder: Path, report: Report) -> None:
    sequential = Sequential(folder)
    async with omni_stub(running.address("router")) as stub:
        await answered(stub, 0)
        others, mine = list[float](), list[Heard]()
        for seed in range(1, 1 + ROUNDS):
            others.append(sequential.answer_s(seed))
            mine.append(await answered(stub, seed))
        begun = time.perf_counter()
        together = await asyncio.gather(*(answered(stub, 100 + n) for n in range(AT_ONCE)))
        together_s = time.perf_counter() - begun
    theirs = median(others)
    how = f"{TOKENS} tokens, {FRAMES} codes; small; median of {ROUNDS}; Transformers: {theirs:.1f} s on {sequential.threads} threads"
    report.add(
        Figure("hf_e2e", theirs, "s", "", f"generate of Transformers on the faster of 1 and 2 threads: {sequential.threads}"),
        Figure("ttfa", median([heard.first_s for heard in mine]), "s", "", "through the router"),
        Figure("e2e", median([heard.total_s for heard in mine]), "s", "", "through the router"),
        Figure("prebuffer_told", median([heard.waited_s for heard in mine]), "s", "", "what a player was told to wait"),
        Figure("late_after_it", max(heard.late_s for heard in mine), "s", "", "the longest that who waited so had nothing to play"),
        Figure("ttfa_over_hf_e2e", median([a.first_s / b for a, b in zip(mine, others, strict=True)]), "", "<= 0.15", how),
        Figure("e2e_over_hf_e2e", median([a.total_s / b for a, b in zip(mine, others, strict=True)]), "", "<= 0.7", how),
        Figure("x_throughput_8", AT_ONCE * theirs / together_s, "x", ">= 4", f"{AT_ONCE} at once in {together_s:.1f} s; {how}"),
        Figure("ttfa_8", median([heard.first_s for heard in together]), "s", "", f"of {AT_ONCE} at once, median"),
    )


# The critical path -----------------------------------------------------------------------------------------------------------------


def first_window_s(model: FlowCode2Wav, prepared: object, seed: int) -> float:
    """Seconds to make sound of the first codes, as calls."""
    speech = Speech(model.config, model.windows, prepared)  # type: ignore[arg-type]
    codes = torch.randint(0, 8192, (FIRST_CODES, 1), generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
    begun = time.perf_counter()
    speech.feed(0, codes, last=False)
    flow = speech.next()
    assert flow is not None
    while not flow.done:
        model.windows.step([flow])
    vocoding = speech.solved(flow)
    while not vocoding.done:
        model.windows.step([vocoding])
    sound(vocoding)
    return time.perf_counter() - begun


def codes_s(thinker: Sequence[float], talker: Sequence[float]) -> float:
    """When the last code is there, if both compute at the same time: the first code needs the row of the Thinker's first token, which comes
    with its second one, and each code after it the row of the next token. Seconds of the prompt and of each step."""
    rows = list(accumulate(thinker))[1:]
    done = rows[0] + talker[0]
    for row, step in zip(rows[1:], talker[1:], strict=True):
        done = max(row, done) + step
    return done


async def critical_path(running: Fleet, folder: Path, report: Report) -> None:
    """The first sound beside what must be computed for it, as calls of the models in this process: the longest chain of steps of Thinker
    and Talker of which each needs the one before it, up to 24 codes, and a window of Code2Wav."""
    options = LoadOptions(path=folder)
    thinker, talker, code2wav = load_thinker(folder, options), load_talker(folder, options), load_code2wav(folder, options)
    prepared, ratios, paths = await code2wav.prepare(WaveRequest(seed=0)), list[float](), list[float]()
    async with omni_stub(running.address("router")) as stub:
        for seed in range(200, 200 + 2 * ROUNDS):
            text = thinker_params(seed, CHARACTERS).messages[0].parts[0].text
            asked = TextRequest((Turn("user", (text,)),), seed=seed, max_tokens=TOKENS, ignore_eos=True)
            thought = SequenceRequest(Prompt.of_tokens((await thinker.prepare(asked)).prompt_ids), seed, TOKENS, taps_from=0)
            rows = torch.randn(len(thought.prompt) + 2, talker.config.row_size).to(talker.engine.spec.dtype)
            with torch.inference_mode():
                thoughts = steps_s(thinker.engine, thought, steps=FIRST_CODES)
                codes = steps_s(talker.engine, speech_of(talker.config, len(rows), seed), steps=FIRST_CODES - 1, given=rows)
            path = codes_s(thoughts, codes) + first_window_s(code2wav, prepared, seed)
            paths.append(path)
            ratios.append((await answered(stub, seed)).first_s / path)
    await asyncio.gather(thinker.close(), talker.close(), code2wav.close())
    note = f"the first sound through the router, over {median(paths) * 1000:.0f} ms of calls; small; median of {len(ratios)}"
    report.add(Figure("ttfa_over_critical_path", median(ratios), "x", "<= 1.25", note))


async def _measure(report: Report, folder: Path) -> None:
    make_tiny("qwen2.5-omni", folder / "small", Order(size="small"))
    (folder / "logs").mkdir()
    with fleet(
        folder / "logs",
        replicas=1,
        kinds=("thinker", "talker", "code2wav"),
        pipeline="qwen2_5_omni",
        family="qwen2_5_omni",
        stage_args=["--checkpoint", str(folder / "small"), "--dtype", "float32"],
    ) as running:
        with report.part("beside Transformers"):
            await beside_transformers(running, folder / "small", report)
        with report.part("critical path"):
            await critical_path(running, folder / "small", report)


def main() -> int:
    given = arguments(__doc__).parse_args()
    report = Report("pipeline")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(report, Path(folder)))
    return report.finish(judge=not given.report)


if __name__ == "__main__":
    sys.exit(main())
