"""Which families of models there are. One line a family: how to load its model of each kind, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnistage.models.interface import Code2WavModel, DiffusionModel, StageModel, TalkerModel, ThinkerModel


class UnknownModel(ValueError):
    """No such family, or it has no model of that kind."""


class SettingsLike(Protocol):
    """The settings of a server that say how to load; see omnistage.stage.settings."""

    model_path: str
    device: str
    dtype: str
    threads: int
    max_sessions: int
    options: dict[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. path: folder of a checkpoint, None for the family's own default. max_sessions: 0 for the model's own limit."""

    path: Path | None = None
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    max_sessions: int = 0
    family: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: SettingsLike) -> LoadOptions:
        path = Path(settings.model_path) if settings.model_path else None
        return cls(path, settings.device, settings.dtype, settings.threads, settings.max_sessions, settings.options)


def _toy(kind: str, options: LoadOptions) -> StageModel:
    from omnistage.models.toy import stages

    models: Mapping[str, Callable[[stages.ToyOptions], StageModel]] = {
        "thinker": stages.ToyThinker,
        "talker": stages.ToyTalker,
        "code2wav": stages.ToyCode2Wav,
        "diffusion": stages.ToyDiffusion,
    }
    return models[kind](stages.ToyOptions.from_settings(dict(options.family)))


def _smol(kind: str, options: LoadOptions) -> StageModel:
    from omnistage.models.smol.family import load

    return load(kind, options)


FAMILIES: Mapping[str, tuple[frozenset[str], Callable[[str, LoadOptions], StageModel]]] = {
    "toy": (frozenset({"thinker", "talker", "code2wav", "diffusion"}), _toy),
    "smol": (frozenset({"thinker", "talker", "code2wav"}), _smol),
}


def load_thinker(family: str, options: LoadOptions) -> ThinkerModel:
    return _load(family, "thinker", options)  # type: ignore[return-value]


def load_talker(family: str, options: LoadOptions) -> TalkerModel:
    return _load(family, "talker", options)  # type: ignore[return-value]


def load_code2wav(family: str, options: LoadOptions) -> Code2WavModel:
    return _load(family, "code2wav", options)  # type: ignore[return-value]


def load_diffusion(family: str, options: LoadOptions) -> DiffusionModel:
    return _load(family, "diffusion", options)  # type: ignore[return-value]


def _load(family: str, kind: str, options: LoadOptions) -> StageModel:
    if family not in FAMILIES or kind not in FAMILIES[family][0]:
        having = sorted(name for name, (kinds, _) in FAMILIES.items() if kind in kinds)
        raise UnknownModel(f"no {kind} named {family!r}; there are {having}")
    return FAMILIES[family][1](kind, options)
