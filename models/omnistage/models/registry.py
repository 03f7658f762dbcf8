"""The table of the families of models, to which installed packages add families, and functions that read it. A family's code is imported
when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from omnistage.models.checkpoint.files import BadCheckpoint, Config, Unreachable, check_files, json_object, offline, read_config
from omnistage.models.devices import check_possible, check_there
from omnistage.models.diffusers.family import DIFFUSERS
from omnistage.models.family import Family, Loader, Mark, ModelEntry, OptionsReader
from omnistage.models.interface import StageModel
from omnistage.models.options import GPU_MEMORY, MEMORY_SHARE, OPTIONAL, LoadOptions, value_text
from omnistage.models.qwen2_5_omni.family import QWEN2_5_OMNI
from omnistage.models.qwen3_omni.family import QWEN3_OMNI
from omnistage.models.reports import LoadError, ShowProgress
from omnistage.models.smol.family import SMOL
from omnistage.models.toy.family import TOYS


class UnknownFamily(LoadError):
    """There is no such family, or it has no model of that kind."""


class UnknownCheckpoint(LoadError):
    """The checkpoint in a folder belongs to no family, or to several."""


ADVICE: Mapping[str, str] = {
    "tensor_parallel_size": "computes on one device; for more answers at once run more replicas of it",
    "max_batch_size": "computes one session after the other; leave it out",
}
"""Setting -> advice to a user who sets it for a model that does not use it."""

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that building a model may raise if its files cannot be read, or if its config has unforeseen values."""

FAMILIES: Mapping[str, Family] = {
    **TOYS,
    "smol": SMOL,
    "qwen2_5_omni": QWEN2_5_OMNI,
    "qwen3_omni": QWEN3_OMNI,
    "diffusers": DIFFUSERS,
}
"""The families of this repository. Each is described in the module `family` of its folder."""

GROUP = "omnistage.families"
"""Entry points of this group name families of other packages: `name = "module:ATTRIBUTE"`, where the Family is. An entry point with the
name of a family in the table is ignored."""


def family_of(name: str) -> Family | None:
    """The family of this name, from the table or an installed package; None: there is none. Raises LoadError for a package that names a
    family and lacks it."""
    points = () if name in FAMILIES else tuple(entry_points(group=GROUP, name=name))
    return _load_family(points) if points else FAMILIES.get(name)


def families() -> dict[str, Family]:
    """All families by name, without those of packages that lack the family that they name."""
    return _sound_and_broken()[0]


def _sound_and_broken() -> tuple[dict[str, Family], list[LoadError]]:
    """(all families by name, the errors of packages whose family cannot be used). Such a package must not hinder other packages."""
    points = entry_points(group=GROUP)
    by_name, broken = dict[str, Family](), list[LoadError]()
    for name in sorted(points.names - FAMILIES.keys()):
        try:
            by_name[name] = _load_family(tuple(points.select(name=name)))
        except LoadError as error:
            broken.append(error)
    return {**by_name, **FAMILIES}, broken


def _load_family(points: tuple[EntryPoint, ...]) -> Family:
    """The family to which the entry point of a name leads. points: all entry points of this name. Raises LoadError if there are several, or
    if it is no Family."""
    packages = [point.dist.name if point.dist else "a package" for point in points]
    name = points[0].name
    if len(points) > 1:
        raise LoadError(f"the family {name} is brought by {' and by '.join(packages)}: uninstall one of them")
    try:
        family = points[0].load()
    except Exception as error:  # Importing the package of somebody else may raise any error.
        raise LoadError(f"the family {name} of the package {packages[0]} cannot be imported: {error!r}") from error
    if not isinstance(family, Family):
        raise LoadError(f"the family {name} of the package {packages[0]}: {points[0].value} is no Family but a {type(family).__name__}")
    return family


def dtypes(family: str, kind: str) -> tuple[str, ...]:
    """The types that a family's model of a kind can compute in, without auto, which is always possible. Raises UnknownFamily."""
    return _entry(family, kind).dtypes


def has_model(family: str, kind: str) -> bool:
    """Whether a family has models of a kind."""
    definition = family_of(family)
    return definition is not None and kind in definition.models


def find_gaps(folder: Path, models: Iterable[tuple[str, str]]) -> list[str]:
    """The kinds of the models that a checkpoint lacks, judged by its config.json. folder: the checkpoint. models: (family, kind) of each
    model. Raises LoadError."""
    paths = [(family, kind, folder / _entry(family, kind).folder / "config.json") for family, kind in models]
    return [kind for family, kind, path in paths if path.is_file() and not is_said(Config(json_object(path), str(path)), family, kind)]


def is_said(config: Config, family: str, kind: str) -> bool:
    """Whether the checkpoint has a family's model of a kind, judged by its config: no section of the model is absent or empty, and no
    switch is false. Raises BadCheckpoint for a value of another type."""
    entry = _entry(family, kind)
    section_flags = [config.has(name) and bool(config.section(name).raw) for name in entry.sections]
    return all([*section_flags, *(config.value(switch, bool, True) for switch in entry.switches)])


def check_said(config: Config, family: str, kind: str) -> None:
    """Raises BadCheckpoint for a checkpoint that lacks a family's model of a kind."""
    if not is_said(config, family, kind):
        raise BadCheckpoint(f"{config.place}: this checkpoint has no {kind.title()}; serve a pipeline of its Thinker alone")


def voices(family: str, kind: str) -> tuple[str, ...]:
    """The voices that every model of this family and kind has; empty: the checkpoint decides which voices there are."""
    return _entry(family, kind).voices


def uses(family: str, kind: str, setting: str, device: str) -> bool:
    """Whether a setting of options.OPTIONAL may be set for a family's model of a kind on a device: either the model uses it, or it has no
    effect on that device, as `loading_texts` then says. Raises UnknownFamily."""
    return setting in _entry(family, kind).uses or (setting == GPU_MEMORY and device == "cpu")


def loading_texts(family: str, kind: str, options: LoadOptions) -> dict[str, str]:
    """Setting -> text for humans, on how a family's model of a kind is loaded, as far as the options determine it."""
    dtypes = _entry(family, kind).dtypes
    texts = {
        "family": family,
        "checkpoint": "own" if options.path is None else str(options.path),
        "device": options.describe("device", options.device),
        "dtype": options.describe("dtype", dtypes[0] if len(dtypes) == 1 else options.dtype),
        "threads": options.describe("threads", options.threads),
    }
    if MEMORY_SHARE in _entry(family, kind).uses:
        texts[MEMORY_SHARE] = options.describe(MEMORY_SHARE, f"{options.memory_share:g}")
    if options.is_set(GPU_MEMORY) and options.device == "cpu":
        texts[GPU_MEMORY] = f"{options.gpu_memory_utilization:g}, which means nothing on a CPU"
    return texts


def check(family: str, kind: str, options: LoadOptions) -> None:
    """Raises LoadError if a model cannot be loaded with these options, as far as this shows without importing torch. A setting that the
    model would not use is refused too, because a user who sets it expects an effect."""
    entry = _entry(family, kind)
    if options.device.partition(":")[0] not in entry.devices:
        raise LoadError(f"device {options.device}: the {kind} of {family} computes on {' or '.join(entry.devices)} only")
    if options.dtype not in ("auto", *entry.dtypes):
        raise LoadError(f"dtype {options.dtype}: the {kind} of {family} computes in {' or '.join(entry.dtypes)} only")
    for setting in OPTIONAL:
        if options.is_set(setting) and not uses(family, kind, setting, options.device):
            advice = ADVICE.get(setting, "has no use for it; leave it out")
            raise LoadError(f"{setting} {value_text(getattr(options, setting))}: the {kind} of {family} {advice}")
    check_possible(options.device)
    if entry.options:
        cast(OptionsReader, _import_name(entry.options)).from_settings(dict(options.family))
    elif options.family:
        raise LoadError(f"the {kind} of {family} has no options, {sorted(options.family)} are given")
    if options.path is None:
        if entry.files and not has_default(family):
            raise LoadError(f"{family} has no checkpoint of its own: give the folder of one")
        return
    if not _need_family(family).marks:
        raise LoadError(f"the models of {family} have no weights: leave the folder {options.path} out")
    check_files(options.path, entry.folder, entry.files)
    if entry.model_type:
        read_config(options.path / entry.folder, entry.model_type)


def load(family: str, kind: str, options: LoadOptions) -> StageModel:
    """Load a family's model of a kind from `options.path`; if that is None, from the family's own checkpoint, which is fetched if the cache
    lacks it. Raises LoadError."""
    check(family, kind, options)
    check_there(options.device)
    entry, folder = _entry(family, kind), options.path
    if folder is None and has_default(family):
        folder = fetch_default(family)
    if folder is not None:
        folder = folder / entry.folder
    try:
        with offline():
            return _loader(family, kind)(folder, options)
    except LoadError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "omnistage":
            raise
        raise LoadError(
            f"the package {package} is missing, which {family} needs: `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[models]'"
        ) from error
    except Unreachable as error:
        raise BadCheckpoint(f"{folder} is not complete: {error}") from error
    except FAULTS as error:
        # torch has no error class of its own for a lack of memory on a CPU, so the text decides.
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise LoadError(f"the {kind} of {family} does not fit into the memory that is free: {error}") from error
        if folder is None:
            raise
        if isinstance(error, OSError):
            raise BadCheckpoint(f"{error.filename or folder} cannot be read: {error.strerror or error}") from error
        raise BadCheckpoint(f"{folder} is damaged, or of another model: {type(error).__name__}: {error}") from error


def _loader(family: str, kind: str) -> Loader:
    """The function that loads a model. Raises LoadError if the table's entry names no function."""
    name = _entry(family, kind).loader
    module, _, attribute = name.partition(":")
    loader = getattr(importlib.import_module(module), attribute, None)
    if not callable(loader) or isinstance(loader, type):
        fault = "is a class" if isinstance(loader, type) else "is no function"
        if loader is None:
            fault = "is not there"
        raise LoadError(
            f"the {kind} of {family} is loaded by {name}, which {fault}: name a function of (folder, options) that returns the model, "
            f"as docs/models.md says"
        )
    return cast(Loader, loader)


def has_default(family: str) -> bool:
    """Whether a family has a checkpoint of its own, which is used if the user names no other checkpoint."""
    return bool(_need_family(family).default)


def missing_packages(family: str) -> list[str]:
    """Names of the packages that a family needs and that are not installed."""
    return [name for name in _need_family(family).needs if find_spec(name) is None]


def fetch_default(family: str, progress: ShowProgress | None = None) -> Path:
    """The folder of a family's own checkpoint, which is fetched first if the cache lacks it. Several processes may call it at once. Raises
    FetchError."""
    return cast(Callable[[Path | None, ShowProgress | None], Path], _import_name(_need_family(family).default))(None, progress)


def recognise(path: Path, among: Mapping[str, Family] | None = None, called: str = "") -> str:
    """The name of the family of the checkpoint in a folder. among: the possible families by name; None: all. called: the folder's name in
    errors; empty: its path. Raises UnknownCheckpoint if no family fits, or several; the error names packages whose family cannot be
    used."""
    called = called or str(path)
    among, broken = _sound_and_broken() if among is None else (among, [])
    # By family: the set of its marks that the checkpoint has.
    marks_by_family = {name: marks for name, family in among.items() for marks in family.marks if all(_bears(path, mark) for mark in marks)}
    # A family whose marks all name values wins over a family with a mark that accepts any value.
    names = [name for name, marks in marks_by_family.items() if all(mark.values for mark in marks)] or list(marks_by_family)
    if len(names) == 1:
        return names[0]
    if names:
        raise UnknownCheckpoint(f"{called} could be a checkpoint of {' or '.join(names)}: name the family")
    known_names = ", ".join(name for name, family in among.items() if family.marks) or "none"
    facts = "; ".join([_look(path), *map(str, broken)])
    raise UnknownCheckpoint(f"{called} is a checkpoint of no family that there is ({known_names}): {facts}")


def _bears(path: Path, mark: Mark) -> bool:
    """Whether the checkpoint in a folder has a mark."""
    if not (path / mark.file).is_file():
        return False
    json_value = json_object(path / mark.file).get(mark.key)
    if not mark.values:
        return json_value is not None
    return any(value in mark.values for value in (json_value if isinstance(json_value, list) else [json_value]))


def _look(path: Path) -> str:
    """The content of a folder, in words, for a user whose checkpoint belongs to no family."""
    if not path.is_dir():
        return "it is not a folder"
    texts = []
    for name, keys in (("config.json", ("model_type", "architectures")), ("model_index.json", ("_class_name",))):
        if (path / name).is_file():
            values = json_object(path / name)
            texts += [f"{name} has {key} {values[key]!r}" for key in keys if key in values] or [f"{name} does not say what it is of"]
    return ", ".join(texts) or "it has neither config.json nor model_index.json"


def _need_family(name: str) -> Family:
    """The family of this name. Raises UnknownFamily."""
    family = family_of(name)
    if family is None:
        raise UnknownFamily(f"no family named {name!r}; there are {', '.join(families())}")
    return family


def _entry(name: str, kind: str) -> ModelEntry:
    """The entry of a family's model of a kind. Raises UnknownFamily."""
    family = family_of(name)
    if family is None or kind not in family.models:
        names = sorted(each for each, candidate in families().items() if kind in candidate.models)
        raise UnknownFamily(f"no {kind} named {name!r}; there are {', '.join(names)}")
    return family.models[kind]


def _import_name(name: str) -> object:
    """The object that "module:name" names."""
    module, _, attribute = name.partition(":")
    return cast(object, getattr(importlib.import_module(module), attribute))
