"""`python -m benchmarks.qwen3`: Qwen3-Omni's Thinker compared with Transformers, and the cost of a layer of experts at the published
widths, compared with a dense layer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks import by_hand, omni
from benchmarks.engine import new_engine, running
from benchmarks.figures import Figure, Report, median, run
from omnistage.engine.decoder import DecoderParts, PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.parts import DecoderConfig, Experts, ExpertSizes, experts, head_rms_norm
from omnistage.engine.scheduler import Run

ROUNDS = 15
REQUESTS = (1, 8, 32)
SIZES = ExpertSizes(experts=128, experts_per_row=8, size=768, normalized=True)
CONFIG = DecoderConfig(
    layers=1,
    hidden_size=2048,
    ffn_size=SIZES.experts_per_row * SIZES.size,
    query_heads=32,
    kv_heads=4,
    head_size=128,
    vocab_size=2048,
    context=4096,
    norm_eps=1e-6,
)
"""One layer, and a small head: the whole Thinker would take 60 GB."""


@cache
def draw_weight(rows: int, columns: int) -> torch.Tensor:
    values: torch.Tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * columns**-0.5
    return values


def weight(name: str) -> torch.Tensor | None:
    """The weight of this name, of a layer of experts or of a dense one; None if neither layer has it."""
    hidden, heads, kv = CONFIG.hidden_size, *(count * CONFIG.head_size for count in (CONFIG.query_heads, CONFIG.kv_heads))
    size = SIZES.size if ".experts." in name else CONFIG.ffn_size
    if name.endswith("norm.weight"):
        return torch.ones(CONFIG.head_size if name.endswith(("q_norm.weight", "k_norm.weight")) else hidden)
    shapes = {
        "embed_tokens": (CONFIG.vocab_size, hidden),
        "q_proj": (heads, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads),
        "gate": (SIZES.experts, hidden),
        "gate_proj": (size, hidden),
        "up_proj": (size, hidden),
        "down_proj": (hidden, size),
    }
    *_, owner, kind = name.split(".")
    return draw_weight(*shapes[owner]) if owner in shapes and kind == "weight" else None


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """One engine step of several requests, each in the middle of its answer, to be measured again and again."""

    engine: Engine
    runs: list[Run]

    @classmethod
    def of(cls, engine: Engine, requests: int) -> MeasuredSteps:
        return cls(engine, running(engine, requests, range(CONFIG.vocab_size)))

    def seconds(self) -> float:
        """CPU seconds of this thread for one step: other programs on the machine do not count."""
        begin_s = time.thread_time()
        by_hand.run(self.engine, self.runs)
        return time.thread_time() - begin_s


def shared_bytes() -> int:
    """Bytes of the weights that both layers have, including the weights of the router (`gate`)."""
    names = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate", "embed_tokens")
    return sum(values.nbytes for name in names if (values := weight(f"layers.0.{name}.weight")) is not None)


def in_use(steps: MeasuredSteps) -> int:
    """The number of experts that a step uses: those that compute at least one row."""
    counts, route = list[int](), Experts._route

    def noted(self: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = route(self, x)
        counts.append(len(set(routing[1].flatten().tolist())))
        return routing

    Experts._route = noted  # type: ignore[method-assign]
    try:
        steps.seconds()
    finally:
        Experts._route = route  # type: ignore[method-assign]
    (count,) = counts
    return count


def decoder(feed_forward: Callable[..., object] | None) -> PackedDecoder:
    options = {} if feed_forward is None else {"feed_forward": feed_forward}
    return PackedDecoder(CONFIG, weight, DecoderParts(head_norm=head_rms_norm, **options))  # type: ignore[arg-type]


def measure(report: Report) -> None:
    """Measure steps with and without experts in turns, so that other load on the machine touches both alike. `bound`: the ratio if only the
    bytes of the weights counted; with many rows the result can be above it."""
    torch.set_num_threads(1)
    mixed, dense = new_engine(decoder(experts(SIZES))), new_engine(decoder(None))
    expert_bytes = 3 * SIZES.size * CONFIG.hidden_size * torch.float32.itemsize  # Three matrices.
    with torch.inference_mode():
        for requests in REQUESTS:
            sparse_steps, dense_steps = MeasuredSteps.of(mixed, requests), MeasuredSteps.of(dense, requests)
            ratios, durations = list[float](), list[float]()
            used = in_use(sparse_steps)
            dense_steps.seconds()
            for _ in range(ROUNDS):
                durations.append(sparse_steps.seconds())
                ratios.append(dense_steps.seconds() / durations[-1])
            bound = min((shared_bytes() + SIZES.experts_per_row * expert_bytes) / (shared_bytes() + used * expert_bytes), 1.0)
            setup = f"{median(durations) * 1000:.0f} ms of processor; float32, one thread; median of {ROUNDS}"
            note = f"a step without experts over one with; {used} of {SIZES.experts} in use: {bound:.3f} by bytes; {setup}"
            if requests == 1:
                report.add(Figure("experts_over_dense_1", median(ratios), "", ">= 0.8", note))
            else:
                report.add(Figure(f"experts_over_bytes_{requests}", median(ratios) / bound, "", ">= 0.8", f"{note}; over that bound"))


if __name__ == "__main__":
    sys.exit(run("qwen3", __doc__, {"beside Transformers": omni.qwen3, "experts": measure}))
