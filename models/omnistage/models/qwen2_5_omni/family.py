"""The family Qwen2.5-Omni, as data: its models, and the options that only they have. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from omnistage.models import options
from omnistage.models.family import CONFIG_AND_WEIGHTS, ON_ENGINE, SPEAKS, Family, Mark, ModelEntry
from omnistage.models.options import GPU_MEMORY, MEMORY_SHARE
from omnistage.models.reports import LoadError

FAMILY = "qwen2_5_omni"
SOLVERS = ("rk4", "midpoint", "euler")
"""Names of the solvers of the flow; the first solver is the published one."""

MAX_STEPS = 100
MAX_LOOKAHEAD = 36
"""Largest `lookahead`. With the published solver and steps, a block depends on at most this many blocks ahead."""


class ThinkerOptions(options.ThinkerOptions):
    """See the common ThinkerOptions."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(options.TalkerOptions):
    """See the common TalkerOptions."""

    __slots__ = ()
    family = FAMILY


@dataclass(frozen=True, slots=True)
class Code2WavOptions(options.Code2WavOptions):
    """The common Code2WavOptions with further values. solver: solver of the flow, one of SOLVERS. steps: its number of steps, one less than
    `num_steps` of Transformers; 0: as published. lookahead: blocks of 12 codes that a window looks ahead; 0: the profile of a request
    decides."""

    family = FAMILY
    max_values: ClassVar[Mapping[str, int]] = {**options.Code2WavOptions.max_values, "steps": MAX_STEPS, "lookahead": MAX_LOOKAHEAD}

    solver: str = SOLVERS[0]
    steps: int = 0
    lookahead: int = 0

    def __post_init__(self) -> None:
        """Raises LoadError."""
        if self.solver not in SOLVERS:
            raise LoadError(f"option solver of the code2wav of {self.family} is {self.solver!r}; there are {', '.join(SOLVERS)}")


_SPEECH = ("talker_config", "token2wav_config")
"""Sections of a config that the Talker and Code2Wav both read."""

QWEN2_5_OMNI = Family(
    models={
        "thinker": ModelEntry(
            "omnistage.models.qwen2_5_omni.thinker:load_thinker",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=(*ON_ENGINE, GPU_MEMORY, MEMORY_SHARE, "tensor_parallel_size"),
            options="omnistage.models.qwen2_5_omni.family:ThinkerOptions",
            files=(*CONFIG_AND_WEIGHTS, "tokenizer.json", "preprocessor_config.json"),
            model_type="qwen2_5_omni",
        ),
        "talker": ModelEntry(
            "omnistage.models.qwen2_5_omni.talker:load_talker",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=(*ON_ENGINE, GPU_MEMORY, MEMORY_SHARE),
            options="omnistage.models.qwen2_5_omni.family:TalkerOptions",
            files=(*CONFIG_AND_WEIGHTS, "spk_dict.pt"),
            model_type="qwen2_5_omni",
            sections=_SPEECH,
            switches=SPEAKS,
        ),
        "code2wav": ModelEntry(
            "omnistage.models.qwen2_5_omni.wave.code2wav:load_code2wav",
            devices=("cpu", "cuda"),
            uses=("threads", "max_batch_size"),
            options="omnistage.models.qwen2_5_omni.family:Code2WavOptions",
            files=(*CONFIG_AND_WEIGHTS, "spk_dict.pt"),
            model_type="qwen2_5_omni",
            sections=_SPEECH,
            switches=SPEAKS,
        ),
    },
    needs=("torch", "transformers", "tokenizers", "safetensors", "jinja2", "av", "PIL", "soxr"),
    marks=((Mark("config.json", "model_type", ("qwen2_5_omni",)),),),
)
