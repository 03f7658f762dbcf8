"""Which families of models there are. One line a family: how to load its model of each kind, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnistage.models.devices import check_possible
from omnistage.models.errors import LoadError
from omnistage.models.interface import Code2WavModel, DiffusionModel, StageModel, TalkerModel, ThinkerModel


class UnknownModel(LoadError):
    """No such family, or it has no model of that kind."""


class SettingsLike(Protocol):
    """The settings of a server that say how to load; see omnistage.stage.settings."""

    model_path: str
    device: str
    threads: int
    max_sessions: int
    options: dict[str, int | float | str | bool]

    @property
    def dtype(self) -> str: ...


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


@dataclass(frozen=True, slots=True)
class Family:
    """check: raises LoadError for what can be known to be wrong with the options without importing anything heavy. load: raises it for the
    rest. devices, dtypes: what a kind can compute on and in, where that is more than cpu and float32; auto is always one."""

    kinds: frozenset[str]
    check: Callable[[str, LoadOptions], None]
    load: Callable[[str, LoadOptions], StageModel]
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _check_toy(kind: str, options: LoadOptions) -> None:
    from omnistage.models.toy import stages

    if options.path is not None:
        raise LoadError(f"the toy models have no weights: leave the folder {options.path} out")
    stages.ToyOptions.from_settings(dict(options.family))


def _toy(kind: str, options: LoadOptions) -> StageModel:
    from omnistage.models.toy import stages

    models: Mapping[str, Callable[[stages.ToyOptions], StageModel]] = {
        "thinker": stages.ToyThinker,
        "talker": stages.ToyTalker,
        "code2wav": stages.ToyCode2Wav,
        "diffusion": stages.ToyDiffusion,
    }
    return models[kind](stages.ToyOptions.from_settings(dict(options.family)))


def _check_smol(kind: str, options: LoadOptions) -> None:
    from omnistage.models.smol.family import check

    check(kind, options)


def _smol(kind: str, options: LoadOptions) -> StageModel:
    from omnistage.models.smol.family import load

    return load(kind, options)


FAMILIES: Mapping[str, Family] = {
    "toy": Family(frozenset({"thinker", "talker", "code2wav", "diffusion"}), _check_toy, _toy),
    "smol": Family(
        frozenset({"thinker", "talker", "code2wav"}),
        _check_smol,
        _smol,
        devices={"code2wav": ("cpu", "cuda")},
        dtypes={"thinker": ("float32", "bfloat16")},
    ),
}


def dtypes(family: str, kind: str) -> tuple[str, ...]:
    """What a model of a family computes in, besides auto. Raises UnknownModel."""
    return _family(family, kind).dtypes.get(kind, ("float32",))


def check(family: str, kind: str, options: LoadOptions) -> None:
    """Raises LoadError for a model that cannot be loaded so, as far as that can be known without importing torch: a setting that a model
    would not use is refused as well, since whoever gave it expects something of it."""
    chosen = _family(family, kind)
    devices = chosen.devices.get(kind, ("cpu",))
    if options.device.partition(":")[0] not in devices:
        raise LoadError(f"device {options.device}: the {kind} of {family} computes on {' or '.join(devices)} only")
    if options.dtype not in ("auto", *dtypes(family, kind)):
        raise LoadError(f"dtype {options.dtype}: the {kind} of {family} computes in {' or '.join(dtypes(family, kind))} only")
    check_possible(options.device)
    chosen.check(kind, options)


def load_thinker(family: str, options: LoadOptions) -> ThinkerModel:
    return _load(family, "thinker", options)  # type: ignore[return-value]


def load_talker(family: str, options: LoadOptions) -> TalkerModel:
    return _load(family, "talker", options)  # type: ignore[return-value]


def load_code2wav(family: str, options: LoadOptions) -> Code2WavModel:
    return _load(family, "code2wav", options)  # type: ignore[return-value]


def load_diffusion(family: str, options: LoadOptions) -> DiffusionModel:
    return _load(family, "diffusion", options)  # type: ignore[return-value]


def _load(family: str, kind: str, options: LoadOptions) -> StageModel:
    check(family, kind, options)
    try:
        return FAMILIES[family].load(kind, options)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("omnistage"):
            raise
        raise LoadError(f"the package {error.name} is missing, which {family} needs: pip install 'omnistage[models]'") from error


def _family(family: str, kind: str) -> Family:
    if family not in FAMILIES or kind not in FAMILIES[family].kinds:
        having = sorted(name for name, known in FAMILIES.items() if kind in known.kinds)
        raise UnknownModel(f"no {kind} named {family!r}; there are {', '.join(having)}")
    return FAMILIES[family]
