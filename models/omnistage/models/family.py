"""A family of models, as data: nothing here imports a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omnistage.models.checkpoint.files import WEIGHTS
from omnistage.models.interface import StageModel
from omnistage.models.options import GPU_MEMORY, MEMORY_SHARE, LoadOptions

Loader = Callable[[Path | None, LoadOptions], StageModel]
"""The type of the function that a ModelEntry names. It returns the model from the files in a folder (None: the model has no files). It
raises LoadError, or ValueError, KeyError or OSError for bad files."""


class OptionsReader(Protocol):
    """The interface of the object that ModelEntry.options names: a class of options with a class method, or an OptionsOf."""

    def from_settings(self, options: dict[str, Any], /) -> object:
        """The options of a model, from the settings of a server. Raises LoadError for an unknown option, or a value of another type."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A family's model for one kind of stage.

    loader: "module:function", a Loader that is imported when the model is loaded. devices, dtypes: devices and types that it supports,
    apart from the type auto. uses: the settings of options.OPTIONAL that it uses; other settings are refused, because a user who sets them
    expects an effect. options: "module:NAME" of an OptionsReader that needs no torch, for options that only this model has; empty: it has
    none. folder: folder of its files in a checkpoint; empty: the checkpoint itself. files: names of files that it needs. model_type: type
    in its config.json; empty: it has no such file. sections: sections of that config.json; a checkpoint that lacks any of these sections
    has no such model. switches: keys of the config.json; a checkpoint in which one is false has no such model. voices: voices that every
    checkpoint has; other voices become known when a checkpoint is loaded."""

    loader: str
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    uses: tuple[str, ...] = ()
    options: str = ""
    folder: str = ""
    files: tuple[str, ...] = ()
    model_type: str = ""
    sections: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    voices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark by which a checkpoint is recognised: the JSON object in `file` has under `key` one of `values`, or a list with one of them.
    values: empty: any value is accepted."""

    file: str
    key: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. models: kind of stage -> its model. needs: packages of the extra `models` without which its models cannot be
    loaded. default: "module:function" that returns the folder of the default checkpoint, and fetches it first if it is missing, see
    `fetch_default` of the registry; empty: there is no default. marks: sets of marks; a checkpoint that has all marks of one set belongs to
    the family; empty: the models have no files."""

    models: Mapping[str, ModelEntry]
    needs: tuple[str, ...] = ()
    default: str = ""
    marks: tuple[tuple[Mark, ...], ...] = field(default=())


CONFIG_AND_WEIGHTS = ("config.json", WEIGHTS)
"""Names of files that a model with weights needs."""

ON_ENGINE = ("threads", "max_batch_size", "max_batch_tokens", "kv_cache_bytes", "enable_cache")
"""Names of settings that every model on the engine uses."""

SPEAKS = ("enable_audio_output", "enable_talker")
"""Keys of a config that are false if the checkpoint has neither Talker nor Code2Wav."""


def omni_family(
    name: str, model_type: str, talker_sections: tuple[str, ...], wave_sections: tuple[str, ...], speech_files: tuple[str, ...] = ()
) -> Family:
    """A family of the Omni kind: one checkpoint in the published layout has a Thinker that takes media, a Talker and a Code2Wav.

    name: of its folder here, whose modules `thinker`, `talker` and `wave.code2wav` load the models, and whose module `family` has their
    options as THINKER, TALKER and CODE2WAV. model_type, talker_sections, wave_sections: see ModelEntry. speech_files: files that Talker and
    Code2Wav need in addition to config and weights."""
    package = f"omnistage.models.{name}"
    entry = partial(ModelEntry, devices=("cpu", "cuda"), model_type=model_type)
    on_engine = partial(entry, dtypes=("float32", "bfloat16"))
    uses, files = (*ON_ENGINE, GPU_MEMORY, MEMORY_SHARE), (*CONFIG_AND_WEIGHTS, *speech_files)
    return Family(
        models={
            "thinker": on_engine(
                f"{package}.thinker:load_thinker",
                uses=(*uses, "tensor_parallel_size"),
                options=f"{package}.family:THINKER",
                files=(*CONFIG_AND_WEIGHTS, "tokenizer.json", "preprocessor_config.json"),
            ),
            "talker": on_engine(
                f"{package}.talker:load_talker",
                uses=uses,
                options=f"{package}.family:TALKER",
                files=files,
                sections=talker_sections,
                switches=SPEAKS,
            ),
            "code2wav": entry(
                f"{package}.wave.code2wav:load_code2wav",
                uses=("threads", "max_batch_size"),
                options=f"{package}.family:CODE2WAV",
                files=files,
                sections=wave_sections,
                switches=SPEAKS,
            ),
        },
        needs=("torch", "transformers", "tokenizers", "safetensors", "jinja2", "av", "PIL", "soxr"),
        marks=((Mark("config.json", "model_type", (model_type,)),),),
    )
