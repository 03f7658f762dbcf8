"""The family Qwen3-Omni, as data: its models, and the options that only they have. No torch."""

from __future__ import annotations

from omnistage.models.family import omni_family
from omnistage.models.options import MAX_WORKERS, Code2WavOptions, OptionsOf, TalkerOptions, ThinkerOptions

FAMILY, MODEL_TYPE = "qwen3_omni", "qwen3_omni_moe"

THINKER = OptionsOf(ThinkerOptions, f"the thinker of {FAMILY}")
TALKER = OptionsOf(TalkerOptions, f"the talker of {FAMILY}")
CODE2WAV = OptionsOf(Code2WavOptions, f"the code2wav of {FAMILY}", MAX_WORKERS)

QWEN3_OMNI = omni_family(FAMILY, MODEL_TYPE, talker_sections=("talker_config", "code2wav_config"), wave_sections=("code2wav_config",))
