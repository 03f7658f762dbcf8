"""`python -m benchmarks.frame`: the cost of a frame of Qwen3-Omni's Talker, in the published widths with random weights: its code predictor
compared with the predictor's matrix products alone, and with the frame. CPU time of one thread, measured in turn."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks import by_hand
from benchmarks.figures import Figure, Report, arguments, median
from omnistage.engine.engine import Engine
from omnistage.engine.linear import Linear, multiplies_bfloat16
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.engine.sampler import Draws
from omnistage.engine.scheduler import Run
from omnistage.engine.sequence import Sequence
from omnistage.engine.types import Sampling
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.qwen3_omni.predictor import FrameHead, Predictor
from omnistage.models.qwen3_omni.talker import TalkerParts, read_parts
from omnistage.models.qwen3_omni.talker_config import TalkerConfig, read_talker_config
from omnistage.models.tiny import qwen3_omni as tiny

ROUNDS = 7
SPEAKERS = 8
CONVERSATION = 10 * PAGE_ROWS
LAYERS, PUBLISHED_LAYERS = 3, 20
ROW_SIZE, TOKENS = 2048, 64
SAMPLING = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05)
SIZE: Mapping[str, Any] = {
    "text": {"num_hidden_layers": LAYERS, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    "experts": {"intermediate_size": 2048, "num_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 384},
    "predictor": {"num_hidden_layers": 5, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "shared_expert": 768,
    "codes": 2048,
    "groups": 16,
}
"""The published sizes with fewer layers, each of which costs the same."""


def write_talker(folder: Path) -> Path:
    """Write a checkpoint that has only the Talker, with random weights; returns its folder."""
    config = tiny.talker_config(SIZE, ROW_SIZE, 24, {})
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).bfloat16()
    source, tensors = np.random.default_rng(0), {"thinker.model.embed_tokens.weight": torch.zeros(TOKENS, ROW_SIZE).bfloat16()}
    shapes = {name: tuple(weight.shape) for name, weight in tiny.part_weights({"talker_config": config}).items()}
    for name, shape in shapes.items():
        # Each weight begins at a random place of the pool, so that no two have equal numbers.
        size, begin = int(np.prod(shape)), int(source.integers(len(pool)))
        values = pool.roll(begin).repeat(-(-size // len(pool)))[:size].reshape(shape)
        scale = 1.0 if "embedding" in name else shape[-1] ** -0.5
        tensors[name] = torch.ones(shape).bfloat16() if "norm" in name else values * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    wave = tiny.code2wav_config(SIZE["groups"], SIZE["codes"])
    base_config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"hidden_size": ROW_SIZE}}, "code2wav_config": wave}
    tokens = {f"tts_{name}_token_id": number for number, name in enumerate(("bos", "eos", "pad"))}
    (folder / "config.json").write_text(json.dumps({**base_config, "talker_config": config, **tokens}))
    return folder


def read(folder: Path, config: TalkerConfig, dtype: torch.dtype) -> TalkerParts:
    with Weights(folder, ("thinker.", "code2wav.")) as weights:
        return read_parts(weights, config, dtype, torch.device("cpu"))


def products(call: Callable[[], object]) -> Callable[[], None]:
    """Run a call once; returns a function that repeats only its matrix products, with the same weights and rows."""
    linear_calls, plain = list[tuple[Linear, torch.Tensor]](), Linear.__call__

    def noted(self: Linear, x: torch.Tensor) -> torch.Tensor:
        linear_calls.append((self, x.clone()))
        return plain(self, x)

    Linear.__call__ = noted  # type: ignore[method-assign]
    try:
        call()
    finally:
        Linear.__call__ = plain  # type: ignore[method-assign]

    def run() -> None:
        for linear, x in linear_calls:
            linear(x)

    return run


class SpeakerFrames:
    """Makes one frame for each of SPEAKERS speakers with the engine whenever it is called."""

    def __init__(self, config: TalkerConfig, parts: TalkerParts, head: FrameHead) -> None:
        self._config, self._at = config, CONVERSATION
        self._engine = Engine(parts.decoder, head, pages=SPEAKERS * (CONVERSATION // PAGE_ROWS + 4))
        self._sequences = [self._begin_speaker(seed) for seed in range(SPEAKERS)]

    def _begin_speaker(self, seed: int) -> Sequence:
        """Begin a speaker: the engine reads its conversation, and has all its rows. Returns its sequence."""
        rows = torch.randn(CONVERSATION + 1, ROW_SIZE, generator=torch.Generator().manual_seed(seed)).to(self._engine.spec.dtype)
        items = np.zeros((CONVERSATION, self._config.groups), np.int64)
        items[:, 0] = self._config.text_item
        places = np.broadcast_to(np.arange(CONVERSATION), (3, CONVERSATION))
        prompt = Prompt(items, (Given(0, rows[:-1]),), places)
        request = SequenceRequest(prompt, seed, 3 * PAGE_ROWS, SAMPLING, banned=self._config.silent, appended=True)
        sequence = by_hand.begin(self._engine, request, CONVERSATION + 3 * PAGE_ROWS)
        sequence.append(rows[-1:], end=True)
        for at in range(0, CONVERSATION, PAGE_ROWS):
            by_hand.run(self._engine, [Run(sequence, at, PAGE_ROWS)])
        return sequence

    def __call__(self) -> None:
        for sequence in self._sequences:
            sequence.items.append((7,) * self._config.groups)
        by_hand.run(self._engine, [Run(sequence, self._at, 1) for sequence in self._sequences])
        self._at += 1


def cpu_s(calls: Many[Callable[[], object]]) -> list[float]:
    """CPU seconds of each call."""
    clock = [time.process_time()]
    for call in calls:
        call()
        clock.append(time.process_time())
    return np.diff(clock).tolist()


def frames(report: Report, folder: Path, dtype: torch.dtype) -> None:
    """Compare the code predictor with its matrix products alone, and measure its share of a frame of all layers."""
    config = read_talker_config(folder)
    parts = read(folder, config, dtype)
    predictor = Predictor(parts.predictor, parts.heads, parts.first, SPEAKERS)
    head = FrameHead(parts.decoder.logits, predictor, config.groups, {config.codec.eos})
    hidden = torch.randn(SPEAKERS, SIZE["text"]["hidden_size"], generator=torch.Generator().manual_seed(1)).to(dtype)
    draws = [Draws(SAMPLING, seed) for seed in range(SPEAKERS)]
    with torch.inference_mode():
        one_layer = replace(config, decoder=replace(config.decoder, layers=1))

        def passes() -> None:
            predictor.codes(hidden, [*range(SPEAKERS)], lambda codebook, logits: [codebook] * SPEAKERS)

        calls: list[Callable[[], object]] = [
            products(passes),
            passes,
            lambda: head.draw_further_codes(hidden, [*range(SPEAKERS)], draws),
            SpeakerFrames(one_layer, read(folder, one_layer, dtype), head),
            SpeakerFrames(config, parts, head),
        ]
        costs = np.array([cpu_s(calls) for _ in range(ROUNDS + 1)])[1:]  # The first round warms up.
    bare_s, passes_s, predictor_s, one_layer_s, layers_s = costs.T
    ratio, layer_s = predictor_s / bare_s, (layers_s - one_layer_s) / (LAYERS - 1)
    share = predictor_s / (one_layer_s + (PUBLISHED_LAYERS - 1) * layer_s)
    name = str(dtype).removeprefix("torch.")
    setup = f"{SPEAKERS} speakers, one thread, CPU time, {name}; {predictor.attention.sharing_text}; median of {ROUNDS} in turn"
    report.add(
        Figure(f"predictor_{name}", 1000 * median(predictor_s), "ms", "", f"the codes of a frame behind the first one; {setup}"),
        Figure(f"predictor_over_products_{name}", median(ratio), "x", "<= 1.2", f"over the products of its 15 passes alone; {setup}"),
        Figure(f"predictor_not_drawn_{name}", median(passes_s / bare_s), "x", "", "the same where codes are given and not drawn"),
        Figure(
            f"predictor_share_{name}", median(share), "", "", f"part of a frame of {PUBLISHED_LAYERS} layers, by what one of {LAYERS} costs"
        ),
    )


def main() -> int:
    options = arguments(__doc__).parse_args()
    report = Report("frame")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_talker(Path(folder))
        for dtype in (torch.float32, *([torch.bfloat16] if multiplies_bfloat16() else [])):
            with report.part(str(dtype)):
                frames(report, Path(folder), dtype)
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
