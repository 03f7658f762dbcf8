"""What a family of models is, as data: nothing here imports a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnistage.models.interface import StageModel
from omnistage.models.options import LoadOptions

Loader = Callable[[Path | None, LoadOptions], StageModel]
"""What the function that a ModelEntry names does: it returns the model whose files lie in that folder, None for a model without files. It
raises LoadError, or ValueError, KeyError or OSError for files that are not what they should be."""


class OptionsReader(Protocol):
    """What the class that ModelEntry.options names has."""

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> object:
        """The options of a model. Raises LoadError for one that it does not have, or that is of another type."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The model of a family for one kind.

    loader: "module:function", a Loader that is imported when the model is loaded. devices, dtypes: what it computes on and in; auto is
    always one. uses: those of options.OPTIONAL that it has a use for; others are refused, since whoever gives one expects something of it.
    options: "module:Class" of an OptionsReader that needs no torch, for what only this model can be told; empty: it has no options.
    folder: where its files lie in a checkpoint, "" at its top. files: those that it cannot do without. model_type: what its config.json
    says that it is; empty: it has none. sections: of that config.json, without one of which a checkpoint has no such model; switches: keys
    that are false there in one that has none. voices: that every checkpoint has; those of others are known when it is loaded.
    """

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
    """What a checkpoint says of itself: the object in the JSON `file` has under `key` one of `values`, or a list with one of them. No
    values: whatever it has there."""

    file: str
    key: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """models: by kind. needs: packages without which no model of it can be loaded, in the extra `models`. default: "module:function"
    that gives the folder of the default checkpoint and fetches it first if it must, as `fetch_default` of the registry says; empty: there
    is none. marks: a checkpoint with all of one of these sets of marks is one of the family; none: the models have no files.
    """

    models: Mapping[str, ModelEntry]
    needs: tuple[str, ...] = ()
    default: str = ""
    marks: tuple[tuple[Mark, ...], ...] = field(default=())
