"""The default family, as data: small models that the store fetches. No torch."""

from __future__ import annotations

from omnistage.models.family import CONFIG_AND_WEIGHTS, ON_ENGINE, Family, Mark, ModelEntry

SMOL = Family(
    models={
        "thinker": ModelEntry(
            "omnistage.models.smol.thinker:load_thinker",
            devices=("cpu", "cuda"),
            dtypes=("float32", "bfloat16"),
            uses=ON_ENGINE,
            folder="thinker",
            files=(*CONFIG_AND_WEIGHTS, "tokenizer.json"),
            model_type="qwen2_5_omni_thinker",
        ),
        "talker": ModelEntry(
            "omnistage.models.smol.talker:load_talker",
            uses=("threads",),
            folder="talker",
            files=CONFIG_AND_WEIGHTS,
            model_type="hibari-talker",
            voices=("heart",),
        ),
        "code2wav": ModelEntry(
            "omnistage.models.smol.code2wav:load_code2wav",
            devices=("cpu", "cuda"),
            uses=("threads",),
            folder="code2wav",
            files=CONFIG_AND_WEIGHTS,
            model_type="hibari-code2wav",
        ),
    },
    needs=("torch", "transformers", "tokenizers", "safetensors", "hibari"),
    default="omnistage.models.smol.store:model_directory",
    marks=(
        (
            Mark("thinker/config.json", "model_type", ("qwen2_5_omni_thinker",)),
            Mark("talker/config.json", "model_type", ("hibari-talker",)),
            Mark("code2wav/config.json", "model_type", ("hibari-code2wav",)),
        ),
    ),
)
