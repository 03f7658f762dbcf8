"""A converted folder, as far as it can be judged without loading it: its files, and which model they are of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnistage.models.errors import LoadError

FILES: Mapping[str, tuple[str, ...]] = {
    "thinker": ("config.json", "model.safetensors", "tokenizer.json"),
    "talker": ("config.json", "model.safetensors"),
    "code2wav": ("config.json", "model.safetensors"),
}
MODEL_TYPES: Mapping[str, str] = {"thinker": "qwen2_5_omni_thinker", "talker": "hibari-talker", "code2wav": "hibari-code2wav"}
"""What config.json says that it is."""


class BadCheckpoint(LoadError):
    """A folder that is not a complete converted model. The text says which file or weight."""


def check_folder(directory: Path, kind: str) -> None:
    """Raises BadCheckpoint if the folder cannot be that of a stage of this kind."""
    for name in FILES[kind]:
        if not (directory / name).is_file():
            raise BadCheckpoint(
                f"{directory / name} is missing: give a folder with the converted stages thinker, talker and code2wav, "
                "or none for the default model"
            )
    read_config(directory, MODEL_TYPES[kind])


def read_config(directory: Path, model_type: str) -> dict[str, Any]:
    """config.json of the folder. Raises BadCheckpoint if it is missing or of another model."""
    path = directory / "config.json"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a converted model, or run `omnistage fetch-default`")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} is not a JSON object")
    if config.get("model_type") != model_type:
        raise BadCheckpoint(f"{path} is a {config.get('model_type')!r}, not a {model_type!r}")
    return config
