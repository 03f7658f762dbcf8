"""`python -m benchmarks.pipeline [--family qwen3_omni]`: an Omni model from a question to sound, beside Transformers, which runs the same
stages one after the other. Random weights of size small; an answer of 40 tokens, and of as many frames as `benchmarks.chains` says."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.chains import CHAINS, CHARACTERS, TOKENS, Chain
from benchmarks.figures import Report, arguments, median
from benchmarks.talker import thinker_params
from helpers.fleet import Fleet, fleet
from helpers.servers import omni_stub
from omnistage.models.conversation import Turn
from omnistage.models.tiny.makers import Order, make_tiny
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.batches import chunks_of

ROUNDS = 3
AT_ONCE = 8


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

    def end(self, samples: int) -> None:
        self.total_s = time.perf_counter() - self._begun
        assert self.samples == samples, self.samples


def question(chain: Chain, seed: int) -> omni_pb2.GenerateRequest:
    talker = stage_pb2.TalkerParams(sampling=chain.sampling, max_frames=chain.frames)
    return omni_pb2.GenerateRequest(
        seed=seed,
        outputs=["text", "audio"],
        thinker=thinker_params(seed, CHARACTERS, TOKENS),
        talker=talker,
        code2wav=stage_pb2.Code2WavParams(profile=chain.profile),
    )


async def answered(stub: omni_pb2_grpc.OmniServiceAsyncStub, chain: Chain, seed: int) -> Heard:
    heard = Heard()
    async for event in stub.Generate(question(chain, seed), timeout=600):
        heard.take(event)
    heard.end(chain.samples)
    return heard


# Transformers ----------------------------------------------------------------------------------------------------------------------


class Sequential:
    """Transformers' own `generate`, with sound, on so many threads as are faster."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain, self._reference = chain, chain.reference(folder)
        self.threads = min((1, 2), key=lambda threads: self.answer_s(0, threads))

    def answer_s(self, seed: int, threads: int = 0) -> float:
        turns = (Turn("user", (thinker_params(seed, CHARACTERS).messages[0].parts[0].text,)),)
        ids, inputs = self._reference.inputs(turns, ([], []))
        torch.set_num_threads(threads or self.threads)
        torch.manual_seed(seed)
        begun = time.perf_counter()
        with torch.inference_mode():
            _, sound = self._reference.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                thinker_max_new_tokens=TOKENS,
                thinker_min_new_tokens=TOKENS,
                thinker_do_sample=True,
                **self._chain.asked(self._reference.whole.config),
            )
        taken = time.perf_counter() - begun
        torch.set_num_threads(1)
        # Of Qwen2.5-Omni, without what cannot be a code of its own, `generate` drops the last one.
        assert abs(sound.numel() - self._chain.samples) <= self._chain.samples // self._chain.frames + 1, sound.numel()
        return taken


async def beside_transformers(chain: Chain, running: Fleet, folder: Path, report: Report) -> None:
    sequential = Sequential(chain, folder)
    async with omni_stub(running.address("router")) as stub:
        await answered(stub, chain, 0)
        others, mine = list[float](), list[Heard]()
        for seed in range(1, 1 + ROUNDS):
            others.append(sequential.answer_s(seed))
            mine.append(await answered(stub, chain, seed))
        begun = time.perf_counter()
        together = await asyncio.gather(*(answered(stub, chain, 100 + n) for n in range(AT_ONCE)))
        together_s = time.perf_counter() - begun
    theirs = median(others)
    how = f"{TOKENS} tokens, {chain.frames} frames; small; median of {ROUNDS}; Transformers: {theirs:.1f} s on {sequential.threads} threads"
    report.add(
        chain.figure("hf_e2e", theirs, "s", "", f"generate of Transformers on the faster of 1 and 2 threads: {sequential.threads}"),
        chain.figure("ttfa", median([heard.first_s for heard in mine]), "s", "", "through the router"),
        chain.figure("e2e", median([heard.total_s for heard in mine]), "s", "", "through the router"),
        chain.figure("prebuffer_told", median([heard.waited_s for heard in mine]), "s", "", "what a player was told to wait"),
        chain.figure(
            "late_after_it",
            max(heard.late_s for heard in mine),
            "s",
            "",
            "the longest that who waited so had nothing to play",
        ),
        chain.figure("ttfa_over_hf_e2e", median([a.first_s / b for a, b in zip(mine, others, strict=True)]), "", chain.goal, how),
        chain.figure("e2e_over_hf_e2e", median([a.total_s / b for a, b in zip(mine, others, strict=True)]), "", "<= 0.7", how),
        chain.figure("x_throughput_8", AT_ONCE * theirs / together_s, "x", ">= 4", f"{AT_ONCE} at once in {together_s:.1f} s; {how}"),
        chain.figure("ttfa_8", median([heard.first_s for heard in together]), "s", "", f"of {AT_ONCE} at once, median"),
    )


# The critical path -----------------------------------------------------------------------------------------------------------------


async def critical_path(chain: Chain, running: Fleet, folder: Path, report: Report) -> None:
    """The first sound beside what must be computed for it, as calls of the models in this process."""
    path, ratios, paths = chain.path(folder), list[float](), list[float]()
    await path.seconds(199)
    async with omni_stub(running.address("router")) as stub:
        for seed in range(200, 200 + 2 * ROUNDS):
            paths.append(await path.seconds(seed))
            ratios.append((await answered(stub, chain, seed)).first_s / paths[-1])
    await path.close()
    note = f"the first sound through the router, over {median(paths) * 1000:.0f} ms of calls; small; median of {len(ratios)}"
    report.add(chain.figure("ttfa_over_critical_path", median(ratios), "x", "<= 1.25", note))
    share = "of the time to the first sound, what is no call of a model"
    report.add(chain.figure("ttfa_relays", 1 - 1 / median(ratios), "", chain.relays, share))


async def _measure(chain: Chain, report: Report, folder: Path) -> None:
    make_tiny(chain.maker, folder / "small", Order(size="small"))
    (folder / "logs").mkdir()
    with fleet(
        folder / "logs",
        replicas=1,
        kinds=("thinker", "talker", "code2wav"),
        pipeline=chain.family,
        family=chain.family,
        stage_args=["--checkpoint", str(folder / "small"), "--dtype", "float32"],
    ) as running:
        with report.part("critical path"):
            await critical_path(chain, running, folder / "small", report)
        with report.part("beside Transformers"):
            await beside_transformers(chain, running, folder / "small", report)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--family", choices=sorted(CHAINS), default="qwen2_5_omni", help="default: %(default)s")
    given = parser.parse_args()
    chain = CHAINS[given.family]
    report = Report(f"pipeline{chain.suffix}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(chain, report, Path(folder)))
    return report.finish(judge=not given.report)


if __name__ == "__main__":
    sys.exit(main())
