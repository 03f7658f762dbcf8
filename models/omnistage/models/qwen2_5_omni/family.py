"""The family Qwen2.5-Omni, as data: its models, and the options that only they have. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.models.family import omni_family
from omnistage.models.options import MAX_WORKERS, Code2WavOptions, OptionsOf, TalkerOptions, ThinkerOptions
from omnistage.models.reports import LoadError

FAMILY = MODEL_TYPE = "qwen2_5_omni"

SOLVERS = ("rk4", "midpoint", "euler")
"""Names of the solvers of the flow; the first solver is the published one."""

MAX_STEPS = 100
MAX_LOOKAHEAD = 36
"""Largest `lookahead`. With the published solver and steps, a block depends on at most this many blocks ahead."""


@dataclass(frozen=True, slots=True)
class FlowOptions(Code2WavOptions):
    """Code2WavOptions with further values. solver: solver of the flow, one of SOLVERS. steps: its number of steps, one less than
    `num_steps` of Transformers; 0: as published. lookahead: blocks of 12 codes that a window looks ahead; 0: the profile of a request
    decides."""

    solver: str = SOLVERS[0]
    steps: int = 0
    lookahead: int = 0

    def __post_init__(self) -> None:
        """Raises LoadError."""
        if self.solver not in SOLVERS:
            raise LoadError(f"option solver of the code2wav of {FAMILY} is {self.solver!r}; there are {', '.join(SOLVERS)}")


THINKER = OptionsOf(ThinkerOptions, f"the thinker of {FAMILY}")
TALKER = OptionsOf(TalkerOptions, f"the talker of {FAMILY}")
CODE2WAV = OptionsOf(FlowOptions, f"the code2wav of {FAMILY}", {**MAX_WORKERS, "steps": MAX_STEPS, "lookahead": MAX_LOOKAHEAD})

SPEECH = ("talker_config", "token2wav_config")
"""Sections of a config that the Talker and Code2Wav both read."""

QWEN2_5_OMNI = omni_family(FAMILY, MODEL_TYPE, SPEECH, SPEECH, speech_files=("spk_dict.pt",))
