"""LoRA (Hu et al. 2021): small files that change the weights of a pipeline, chosen when it is loaded, by the loader of Diffusers.

A file may come from anyone. Only safetensors are read, and from a file's own metadata only sizes, scales and names: the loader would pass
on all of the metadata. The loader also turns the names of other tools into its own. Diffusers goes on without weights that fit nowhere, and
writes a line to its log; here such files are refused: the weights that each model got are compared with its weights afterwards."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors import safe_open

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.header import Stored, check_finite, check_unpacked, weights_in
from omnistage.models.diffusers.folder import mute_libraries
from omnistage.models.reports import LoadError

log = logging.getLogger(__name__)

MAX_LORAS = 16
PARTS = ("transformer", "transformer_2")
"""Parts of pipelines of two experts; the first expert is for steps of much noise."""
WHICH = "the first has the steps of high noise, the second those of low"
SECOND = "load_into_transformer_2"
"""The name of the second part for Diffusers' loader."""
MAX_SCALE = 100.0
SIDE = re.compile(r"(?<=[._]lora)(_|\d*\.|_linear_layer\.)(A|B|down|up)\b")
"""Matches, in names of weights, one of a LoRA's two sides, in all spellings: A or down leads from a layer to as many numbers as the rank,
B or up leads back from them."""
OTHER_SIDE: Mapping[str, str] = {"A": "B", "down": "up", "B": "A", "up": "down"}
FIRST_SIDES = ("A", "down")
LORA_WEIGHT = re.compile(
    r"[._]lora(_[AB]|(_|\d*\.|_linear_layer\.)(down|up))(\.\w+)?\.(weight|bias)$|\.lora_magnitude_vector\b|\.alpha$|\.diff(_b)?$"
)
"""Matches names of everything that a LoRA may hold: two sides, lengths of columns (DoRA as peft writes it), the number that scales a
change, and, besides these, whole weights and biases (in files made of the difference of two models)."""
DIFFERENCE = re.compile(r"\.diff(_b)?$")
"""Matches names of whole weights and biases."""
OTHER_KIND = re.compile(r"\.(hada|lokr)_")
"""Matches names of weights of LoHa and LoKr."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
NOT_CHOSEN = "to draw with it, give --lora FILE, or the option lora of the stage"
NOT_READ = "LoHa and LoKr are not read; give a LoRA"
NOT_SAFE = "only safetensors are read; convert it"
PLAIN = re.compile(r"[A-Za-z0-9_.]+")
METADATA = "lora_adapter_metadata"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Lora:
    """A file to load. scale: the factor of the change. part: the model that the file changes, in a pipeline of two; empty: the only one."""

    path: Path
    scale: float = 1.0
    part: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __str__(self) -> str:
        return f"{self.path}{self.part and f' in {self.part}'} at {self.scale:g}"


def read_loras(text: str) -> tuple[Lora, ...]:
    """Read the option: FILE[@PART][=SCALE], with commas between several. Raises LoadError."""
    loras = []
    for word in filter(None, text.split(",")):
        # The name of a file may have the signs = and @ in it.
        has_scale = "=" in word and not Path(word).is_file()
        name, _, scale = word.rpartition("=") if has_scale else (word, "", "1")
        has_part = name.rpartition("@")[2] in PARTS and not Path(name).is_file()
        path, _, part = name.rpartition("@") if has_part else (name, "", "")
        try:
            lora = Lora(Path(path), float(scale), part)
        except ValueError:
            lora = Lora(Path(path), math.nan)  # Refused below.
        if not path or not abs(lora.scale) <= MAX_SCALE:
            raise LoadError(f"option lora {word}: give FILE or FILE=SCALE, a number from -{MAX_SCALE:g} to {MAX_SCALE:g}")
        loras.append(lora)
    if len(loras) > MAX_LORAS or len({(lora.path.resolve(), lora.part) for lora in loras}) < len(loras):
        raise LoadError(f"option lora: give at most {MAX_LORAS} files, each once")
    return tuple(loras)


def add_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Add the files to a pipeline on the CPU. Raises BadCheckpoint, with the file and the part of it that does not fit."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise LoadError(f"option lora: {type(pipe).__name__} of diffusers takes none; leave it out")
    for lora in loras:
        _check_part(pipe, lora)
    names = [f"lora_{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        _check_file(lora.path)
        try:
            with mute_libraries():
                _load(pipe, lora, name)
        except (BadCheckpoint, MemoryError):
            raise
        except Exception as error:  # the loader raises every kind of error for a bad file, in words for those who wrote it
            log.warning("%s: the loader of diffusers raised %s: %s", lora.path, type(error).__name__, " ".join(str(error).split())[:300])
            raise BadCheckpoint(f"{lora.path} does not fit {type(pipe).__name__}; is it a LoRA of another model?") from error
    pipe.set_adapters(names, [lora.scale for lora in loras])


def _check_part(pipe: Any, lora: Lora) -> None:
    """Raises LoadError if the LoRA names a model that the pipeline lacks, or no model and the pipeline has two."""
    parts = [part for part in PARTS if getattr(pipe, part, None) is not None]
    if lora.part and lora.part not in parts:
        raise LoadError(f"option lora {lora.path}@{lora.part}: {type(pipe).__name__} has no {lora.part}; leave it out")
    if not lora.part and len(parts) > 1:
        choices = " or ".join(f"{lora.path}@{part}" for part in parts)
        raise LoadError(f"option lora {lora.path}: {type(pipe).__name__} has two models that draw; give {choices}, or both: {WHICH}")


def loras_beside(folder: Path, read: Collection[Path]) -> dict[Path, str]:
    """The LoRA files in a folder that are not in `read`, the files in use, each with the reason. Safetensors files are recognised by the
    names in them; pickled files, which are not opened, by their file names."""
    return {path: reason for path in sorted(folder.rglob("*")) if path.resolve() not in read and (reason := _why_unused(path))}


def _why_unused(path: Path) -> str:
    """The reason why a file that nothing reads has no effect; empty for a file that is no LoRA."""
    if path.suffix in PICKLED:
        return NOT_SAFE if "lora" in path.stem.lower() else ""
    names = _names(path) if path.suffix == ".safetensors" else []
    if any(map(OTHER_KIND.search, names)):
        return NOT_READ
    return NOT_CHOSEN if any((side := SIDE.search(name)) and side[2] in FIRST_SIDES for name in names) else ""


def _names(path: Path) -> list[str]:
    """The names of the weights in a file; none if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except Exception:  # the library's errors have no other base than Exception; a damaged file that nobody reads is no LoRA
        return []


def _check_file(path: Path) -> None:
    """Raises BadCheckpoint for a file that is missing, damaged or no LoRA, or holds more than a LoRA."""
    if path.suffix != ".safetensors" or not path.is_file():
        raise BadCheckpoint(f"{path} is no file of safetensors: give a LoRA as FILE.safetensors, nothing else is read")
    try:
        with safe_open(path, "pt") as file:
            header, metadata = weights_in(file), file.metadata() or {}
    except Exception as error:  # its errors have no base of their own but Exception
        raise BadCheckpoint(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from None
    check_unpacked(header, path)
    if any(map(OTHER_KIND.search, header)):
        raise BadCheckpoint(f"{path}: {NOT_READ}")
    if not any(map(SIDE.search, header)):
        raise BadCheckpoint(f"{path} is no LoRA: no weight in it is called so, the first is {min(header, default='missing')[:80]}")
    if unknown := [name for name in header if not LORA_WEIGHT.search(name)]:
        raise BadCheckpoint(f"{path} has more than a LoRA has, which would be left out: {_list_names(unknown)}; give one without")
    ranks = _check_sides(path, header)
    if METADATA in metadata:
        _check_said(path, metadata[METADATA], ranks)


def _check_sides(path: Path, header: Mapping[str, Stored]) -> frozenset[int]:
    """The ranks of the weights in a file. Raises BadCheckpoint for a side of a layer without the other, sides that do not fit each other,
    and a scale that is not one number of a layer: the loader would stop at these with an error of its own, or leave them out."""
    sides = {name: side for name in header if (side := SIDE.search(name)) and not name.endswith(".bias")}
    twins = {name: f"{name[: side.start()]}{side[1]}{OTHER_SIDE[side[2]]}{name[side.end() :]}" for name, side in sides.items()}
    if missing := twins.values() - header.keys():
        raise BadCheckpoint(f"{path} has a part of a layer without the other, which is missing: {_list_names(missing)}; save it anew")
    for name in sorted(twin for name, twin in twins.items() if sides[name][2] not in FIRST_SIDES):
        down, up = header[name].shape, header[twins[name]].shape
        if min(len(down), len(up)) < 2 or 0 in (*down, *up) or down[0] != up[1]:
            shapes = {each[:200]: "x".join(map(str, header[each].shape)) or "one number" for each in (name, twins[name])}
            shape_text = " and ".join(f"{each} of {shape}" for each, shape in shapes.items())
            raise BadCheckpoint(f"{path} has two parts of a layer that do not fit each other, {shape_text}; save it anew")
    layers = tuple({name[: side.start()].removesuffix("lora")[:-1] for name, side in sides.items()})
    for name, stored in sorted(header.items()):
        layer = name.removesuffix(".alpha")
        if layer != name and (math.prod(stored.shape) != 1 or not layer.startswith(layers)):
            raise BadCheckpoint(f"{path}: {name[:200]} is not one number, or of a layer that the file does not change; save it anew")
    return frozenset(header[name].shape[0] for name, side in sides.items() if side[2] in FIRST_SIDES)


def _check_said(path: Path, text: str, ranks: frozenset[int]) -> None:
    """Raises BadCheckpoint for metadata (text, in JSON) with a value that fits none of the weights. ranks: the weights' ranks."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise BadCheckpoint(f"{path}: what it says of itself is no object of JSON")
    for name, value in metadata.items():
        check = METADATA_CHECKS.get(name.rpartition(".")[2])
        if check is not None and not check(value, ranks):
            raise BadCheckpoint(f"{path}: {name[:80]!r} is {str(value)[:80]}, which fits none of its weights")


def _is_number(value: object, ranks: Collection[int]) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_rank(value: object, ranks: Collection[int]) -> bool:
    return isinstance(value, int) and value in ranks


def _are_names(value: object, ranks: Collection[int]) -> bool:
    """Whether the value lists names of layers. A single text would be a regular expression."""
    return isinstance(value, list) and all(isinstance(name, str) and PLAIN.fullmatch(name) for name in value)


METADATA_CHECKS: Mapping[str, Any] = {
    "r": _is_rank,
    "lora_alpha": _is_number,
    "rank_pattern": lambda value, ranks: _by_layer(value, ranks, _is_rank),
    "alpha_pattern": lambda value, ranks: _by_layer(value, ranks, _is_number),
    "target_modules": _are_names,
    **dict.fromkeys(("lora_bias", "use_rslora", "use_dora"), lambda value, ranks: isinstance(value, bool)),
}
"""Values that a file's metadata may hold, as in a LoraConfig of peft. All others are left out: some of them change other weights too."""


def _by_layer(value: object, ranks: Collection[int], is_fit: Any) -> bool:
    return isinstance(value, dict) and _are_names(list(value), ranks) and all(is_fit(one, ranks) for one in value.values())


@dataclass(slots=True)
class _Reading:
    """The reading of one file by the loader. path: of the file. names: all names in it. values: hashes of its weights. alphas: by name, the
    numbers that scale the changes. passed: names of weights that some model got. models: for each model, its weights by its own names, and
    its alphas."""

    path: Path
    names: set[str] = field(default_factory=set)
    values: set[bytes] = field(default_factory=set)
    alphas: dict[str, float] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    models: dict[torch.nn.Module, tuple[Mapping[str, torch.Tensor], list[float]]] = field(default_factory=dict)

    def note(self, model: torch.nn.Module, prefix: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Note that a model got these weights, which the loader made from all names that begin with the prefix."""
        self.passed.update(name for name in self.names if name.startswith(prefix))
        _check_layers(model, self.path, weights)
        self.models[model] = weights, [alpha for name, alpha in self.alphas.items() if name.startswith(prefix)]


def _load(pipe: Any, lora: Lora, name: str) -> None:
    """Load one file into the pipeline, and check that the models then have exactly its weights. name: the adapter's name."""
    path, second = lora.path, {SECOND: True} if lora.part == PARTS[1] else {}
    with _watch_loader(pipe, path) as reading:
        pipe.load_lora_weights(str(path), weight_name=path.name, adapter_name=name, local_files_only=True, use_safetensors=True, **second)
    _check_passed(pipe, path, reading)
    _check_differences(pipe, path, reading)
    for model, (weights, alphas) in reading.models.items():
        _check_loaded(model, path, name, weights)
        _check_scales(model, path, name, alphas)


@contextmanager
def _watch_loader(pipe: Any, path: Path) -> Iterator[_Reading]:
    """Within this context the loader's functions note the weights that each model gets, and pass on only metadata in METADATA_CHECKS."""
    reading = _Reading(path)
    models = {part: model for part, model in pipe.components.items() if isinstance(model, torch.nn.Module)}
    methods = [(pipe, "lora_state_dict", _watch_reading(pipe.lora_state_dict, reading))]
    for part, model in models.items():
        if hasattr(model, "load_lora_adapter"):  # of Diffusers
            methods.append((model, "load_lora_adapter", _watch_model(model, reading)))
        elif hasattr(model, "load_adapter"):  # of Transformers
            methods.append((model, "load_adapter", _watch_encoder(part, model, reading)))
    for place, method, replacement in methods:
        setattr(place, method, replacement)
    try:
        yield reading
    finally:
        for place, method, _ in methods:
            delattr(place, method)


def _watch_reading(published: Callable[..., Any], reading: _Reading) -> Callable[..., Any]:
    """A replacement for `published`, by which the loader reads a file: it notes what the file has, and leaves out most metadata."""

    def lora_state_dict(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        weights, *alphas, metadata = published(*arguments, **keywords)  # Not all pipelines return alphas, and those may return None.
        reading.names.update(weights)
        reading.values.update(map(_digest, weights.values()))
        reading.alphas.update(next((each or {} for each in alphas), {}))
        safe_metadata = {key: value for key, value in (metadata or {}).items() if key.rpartition(".")[2] in METADATA_CHECKS}
        return (weights, *alphas, safe_metadata or None)

    return lora_state_dict


def _watch_model(model: Any, reading: _Reading) -> Callable[..., None]:
    """A replacement for a model's loading method in Diffusers, which notes the weights that the model gets."""
    published = model.load_lora_adapter

    def load_lora_adapter(weights: Mapping[str, torch.Tensor], prefix: str = PARTS[0], **keywords: Any) -> None:
        mine = {name.removeprefix(f"{prefix}."): value for name, value in weights.items() if name.startswith(f"{prefix}.")}
        if mine and "lora_A" not in next(iter(mine)):  # as the method itself does
            mine = convert_unet_state_dict_to_peft(mine)
            if keywords.get("network_alphas"):  # the method leaves these names as they are, so it would not find some layers
                keywords["network_alphas"] = convert_unet_state_dict_to_peft(keywords["network_alphas"])
        reading.note(model, f"{prefix}.", mine)
        published({f"{prefix}.{name}": value for name, value in mine.items()}, prefix=prefix, **keywords)

    return load_lora_adapter


def _watch_encoder(part: str, model: Any, reading: _Reading) -> Callable[..., None]:
    """A replacement for a text encoder's loading method, which notes the weights that it gets. part: its name in the pipeline."""
    published = model.load_adapter

    def load_adapter(*, adapter_state_dict: Mapping[str, torch.Tensor], **keywords: Any) -> None:
        reading.note(model, f"{part}.", adapter_state_dict)
        published(adapter_state_dict=adapter_state_dict, **keywords)

    return load_adapter


def _check_passed(pipe: Any, path: Path, reading: _Reading) -> None:
    """Raises BadCheckpoint for weights in the file that no model got."""
    unused_names, kind = reading.names - reading.passed, type(pipe).__name__
    prefixes = [f"{part}." for part in pipe._lora_loadable_modules if part != PARTS[1]]
    if nameless := [name for name in unused_names if not name.startswith(tuple(prefixes))]:
        fault = f"names that begin with none of {', '.join(prefixes)}, as {kind} needs it: {_list_names(nameless)}"
        raise BadCheckpoint(f"{path} has {fault}; put the right one before them, or is it a LoRA of another model?")
    if unused_names:
        raise BadCheckpoint(f"{path} changes what {kind} does not have: {_list_names(unused_names)}; is it a LoRA of another model?")


def _check_differences(pipe: Any, path: Path, reading: _Reading) -> None:
    """Raises BadCheckpoint for whole weights and biases that the loader left out, unless they change nothing."""
    with safe_open(path, "pt") as file:
        differences = {name: file.get_tensor(name) for name in file.keys() if DIFFERENCE.search(name)}  # noqa: SIM118  # It is no mapping.
    if names := [name for name, value in differences.items() if value.any() and _digest(value) not in reading.values]:
        raise BadCheckpoint(f"{path} changes what diffusers leaves out in {type(pipe).__name__}: {_list_names(names)}; give one without")


def _digest(value: torch.Tensor) -> bytes:
    """A hash, equal for equal weights."""
    return hashlib.sha256(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()


def _check_layers(model: torch.nn.Module, path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises BadCheckpoint unless the model has all layers that these weights change, of their widths. weights: by the names of peft."""
    kind, layers = type(model).__name__, dict(model.named_modules())
    sides = {name: side for name in weights if (side := SIDE.search(name)) and not name.endswith(".bias")}
    places = {name: name[: side.start()].removesuffix(".lora") for name, side in sides.items()}
    if strange := {name.removesuffix(".weight") for name, place in places.items() if place not in layers}:
        raise BadCheckpoint(f"{path} changes layers that {kind} does not have: {_list_names(strange)}; is it a LoRA of another model?")
    for name, side in sides.items():
        layer = getattr(layers[places[name]], "base_layer", layers[places[name]])
        if not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d) or getattr(layer, "groups", 1) > 1:
            continue
        axis, verb = (1, "takes") if side[2] in FIRST_SIDES else (0, "gives")
        if weights[name].shape[axis] != layer.weight.shape[axis]:
            fault = f"{name[:200]} is for {weights[name].shape[axis]} values, and the layer {verb} {layer.weight.shape[axis]}"
            raise BadCheckpoint(f"{path} does not fit {kind}: {fault}; is it a LoRA of another model?")


def _check_loaded(model: torch.nn.Module, path: Path, name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises BadCheckpoint unless a model has exactly these weights of the file, and all are numbers. name: the adapter's name. The
    libraries would make up weights that the file lacks."""
    kind, file_weights = type(model).__name__, {weight.removesuffix(".weight"): values for weight, values in weights.items()}
    loaded = {
        weight.replace(f".{name}.", ".").removesuffix(".weight"): values
        for weight, values in model.named_parameters()
        if f".{name}." in weight
    }
    if extra_names := file_weights.keys() - loaded.keys():
        raise BadCheckpoint(f"{path} changes layers that {kind} does not have: {_list_names(extra_names)}; is it a LoRA of another model?")
    if made_up := loaded.keys() - file_weights.keys():
        raise BadCheckpoint(f"{path} has a part of a layer without the other, which is missing: {_list_names(made_up)}; save it anew")
    for weight, values in loaded.items():
        check_finite(values, weight, path)
        if not torch.equal(values, file_weights[weight].to(values.dtype)):
            raise BadCheckpoint(f"{path}: {weight} became something else when {kind} loaded it; save it anew")


def _check_scales(model: torch.nn.Module, path: Path, name: str, alphas: list[float]) -> None:
    """Raises BadCheckpoint unless a model's layers are scaled by `alphas`, as the file says. name: the adapter's name."""
    layers: list[Any] = [module for module in model.modules() if name in getattr(module, "scaling", {})]
    used = sorted(layer.scaling[name] * layer.r[name] for layer in layers)
    if alphas and not (len(alphas) == len(used) and all(map(_is_same, sorted(alphas), used))):
        stated = ", ".join(f"{alpha:g}" for alpha in sorted(set(alphas))[:SHOWN])
        raise BadCheckpoint(
            f"{path}: diffusers does not scale layers of {type(model).__name__} by what it says, alpha {stated}; save it anew"
        )


def _is_same(alpha: float, used: float) -> bool:
    return math.isfinite(alpha) and math.isclose(alpha, used, rel_tol=1e-6)


def _list_names(names: Collection[str]) -> str:
    """The first names as text, and how many there are if they are more."""
    count_text = f", … ({len(names)})" if len(names) > SHOWN else ""
    return ", ".join(each[:200] for each in sorted(names)[:SHOWN]) + count_text
