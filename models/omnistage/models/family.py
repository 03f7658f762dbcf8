"""A family of models, as data: nothing here imports a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnistage.models.checkpoint.files import WEIGHTS
from omnistage.models.interface import StageModel
from omnistage.models.options import LoadOptions

Loader = Callable[[Path | None, LoadOptions], StageModel]
"""The type of the function that a ModelEntry names. It returns the model from the files in a folder (None: the model has no files). It
raises LoadError, or ValueError, KeyError or OSError for bad files."""


class OptionsReader(Protocol):
    """The interface of the class that ModelEntry.options names."""

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> object:
        """The options of a model, from the settings of a server. Raises LoadError for an unknown option, or a value of another type."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A family's model for one kind of stage.

    loader: "module:function", a Loader that is imported when the model is loaded. devices, dtypes: devices and types that it supports,
    apart from the type auto. uses: the settings of options.OPTIONAL that it uses; other settings are refused, because a user who sets them
    expects an effect. options: "module:Class" of an OptionsReader that needs no torch, for options that only this model has; empty: it has
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
