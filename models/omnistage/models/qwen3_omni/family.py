"""The family Qwen3-Omni, as data: its models, and the options that only they have. No torch."""

from __future__ import annotations

from omnistage.models import options
from omnistage.models.family import CONFIG_AND_WEIGHTS, ON_ENGINE, SPEAKS, Family, Mark, ModelEntry
from omnistage.models.options import GPU_MEMORY, MEMORY_SHARE

FAMILY = "qwen3_omni"


class ThinkerOptions(options.ThinkerOptions):
    """See the common ThinkerOptions."""

    __slots__ = ()
    family = FAMILY


class TalkerOptions(options.TalkerOptions):
    """See the common TalkerOptions."""

    __slots__ = ()
    family = FAMILY


class Code2WavOptions(options.Code2WavOptions):
    """See the common Code2WavOptions."""

    __slots__ = ()
    family = FAMILY


QWEN3_OMNI = Family(
    models={
        "thinker": ModelEntry(
            "omnistage.models.qwen3_omni.thinker:load_thinker",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=(*ON_ENGINE, GPU_MEMORY, MEMORY_SHARE, "tensor_parallel_size"),
            options="omnistage.models.qwen3_omni.family:ThinkerOptions",
            files=(*CONFIG_AND_WEIGHTS, "tokenizer.json", "preprocessor_config.json"),
            model_type="qwen3_omni_moe",
        ),
        "talker": ModelEntry(
            "omnistage.models.qwen3_omni.talker:load_talker",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=(*ON_ENGINE, GPU_MEMORY, MEMORY_SHARE),
            options="omnistage.models.qwen3_omni.family:TalkerOptions",
            files=CONFIG_AND_WEIGHTS,
            model_type="qwen3_omni_moe",
            sections=("talker_config", "code2wav_config"),
            switches=SPEAKS,
        ),
        "code2wav": ModelEntry(
            "omnistage.models.qwen3_omni.wave.code2wav:load_code2wav",
            devices=("cpu", "cuda"),
            uses=("threads", "max_batch_size"),
            options="omnistage.models.qwen3_omni.family:Code2WavOptions",
            files=CONFIG_AND_WEIGHTS,
            model_type="qwen3_omni_moe",
            sections=("code2wav_config",),
            switches=SPEAKS,
        ),
    },
    needs=("torch", "transformers", "tokenizers", "safetensors", "jinja2", "av", "PIL", "soxr"),
    marks=((Mark("config.json", "model_type", ("qwen3_omni_moe",)),),),
)
