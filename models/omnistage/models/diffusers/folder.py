"""A drawing pipeline from a folder that may come from anyone: no code in it is run, and no weight is made up. Diffusers and Transformers
load it without a word, because they write their reports to the terminal of the service. Text and pictures for Qwen2.5-VL have a
processor of our own: that of Transformers needs Torchvision, for films that are not used here."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import diffusers
import diffusers.utils.logging
import torch
import transformers
import transformers.utils.logging
from safetensors import safe_open
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnistage.models.checkpoint.files import BadCheckpoint, json_object
from omnistage.models.checkpoint.header import (
    Stored,
    bound_building,
    check_numbers,
    check_says_unpacked,
    check_stored,
    check_tensors,
    check_unpacked,
    tell_unread,
    weights_in,
)

INDEX = "model_index.json"
PIPELINES = "diffusers.pipelines"
PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "AutoProcessor")
"""Processors that are replaced by our own."""
SHOWN = 3
"""The number of names of weights that an error shows."""

KINDS: Mapping[str, tuple[type, ...]] = {
    "diffusers": (diffusers.ModelMixin, diffusers.SchedulerMixin),
    "transformers": (
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        FeatureExtractionMixin,
        ImageProcessingMixin,
    ),
}
"""The classes that a part may be of, by the library that has the class."""
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}
PREPROCESSOR = ("preprocessor_config.json", "processor_config.json")
CONFIGS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (torch.nn.Module, ("config.json",)),
    (diffusers.SchedulerMixin, ("scheduler_config.json",)),
    (transformers.PreTrainedTokenizerBase, ("tokenizer_config.json",)),
    (transformers.ProcessorMixin, PREPROCESSOR),
    (FeatureExtractionMixin, PREPROCESSOR),
    (ImageProcessingMixin, PREPROCESSOR),
)
"""The files that describe each kind of part: the published file, and the file that newer versions write instead."""
LAYER = re.compile(r"\.\d+\.")
ATTENTION = ("attn_implementation", "_attn_implementation")
SAFE_WEIGHTS: Mapping[str, Any] = {
    "local_files_only": True,
    "use_safetensors": True,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}
"""Wrong shapes are reported by `_check_weights`: the libraries would write most of them to the log."""
NO_KEYWORDS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of model_index.json. components: library and class of each part of the folder. values: other arguments."""

    class_name: str
    components: Mapping[str, tuple[str, str]]
    values: Mapping[str, Any] = field(default_factory=dict)


def read_index(folder: Path) -> Index:
    """Read model_index.json. Raises BadCheckpoint if it is missing or damaged, or names anything but fitting classes of both libraries."""
    path = folder / INDEX
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a complete pipeline of Diffusers")
    values = json_object(path)
    name = values.get("_class_name")
    pipeline: Any = _find_class("diffusers", name) if isinstance(name, str) else None
    if not isinstance(name, str) or pipeline is None or not issubclass(pipeline, diffusers.DiffusionPipeline):
        raise BadCheckpoint(f"{path}: '_class_name' is {_quote(name)}, which is no pipeline of Diffusers {diffusers.__version__}")
    if inspect.isabstract(pipeline) or pipeline is diffusers.DiffusionPipeline or getattr(pipeline, "_load_connected_pipes", False):
        raise BadCheckpoint(f"{path}: {name} does not draw by itself: give the folder of a pipeline that does")
    parameters = inspect.signature(pipeline).parameters
    components = {}
    for part, value in values.items():
        if part.startswith("_") or not isinstance(value, list):
            continue
        if part not in parameters:
            raise BadCheckpoint(f"{path}: {_quote(part)} is no part of a {name}")
        # Diffusers names a part that its pipeline makes by itself, and does not save it.
        is_own = parameters[part].default is None and part not in pipeline._optional_components and not (folder / part).exists()
        if value[:1] != [None] and not is_own:  # [None, None] stands for a part that the checkpoint lacks.
            components[part] = _check_class(f"{path}: {part!r}", value)
    other_arguments: dict[str, Any] = {}
    for part, parameter in parameters.items():
        if part in components:
            continue
        if part in pipeline._optional_components:
            other_arguments[part] = None
        elif parameter.default is parameter.empty:
            raise BadCheckpoint(f"{path} lacks {part!r}, which a {name} has")
        elif part in values and not isinstance(values[part], list):
            other_arguments[part] = values[part]
    return Index(name, components, other_arguments)


def load_pipeline(
    folder: Path, dtype: torch.dtype, arguments: Mapping[str, Mapping[str, Any]] = NO_KEYWORDS, other_files: Collection[Path] = ()
) -> diffusers.DiffusionPipeline:
    """The pipeline on the CPU, with all its weights from the files, as `dtype`. arguments: further ones for loading some models, by part.
    other_files: files that another part of the program reads. Raises BadCheckpoint, with the fault and its place."""
    index = read_index(folder)
    with mute_libraries():
        parts = {part: _load_part(folder / part, *kind, dtype, arguments.get(part, NO_KEYWORDS)) for part, kind in index.components.items()}
        tell_unread(folder, [*weights_of(folder), *other_files])
        for part, tokenizer in parts.items():
            _check_tokens(folder / part, tokenizer, parts.get(part.replace("tokenizer", "text_encoder")))
        with _translate_errors(folder / INDEX):
            pipeline: Any = getattr(diffusers, index.class_name)(**parts, **index.values)
            pipeline.register_to_config(_name_or_path=str(folder))
    return cast(diffusers.DiffusionPipeline, pipeline)


def weights_of(folder: Path) -> list[Path]:
    return [file for part in read_index(folder).components for name in WEIGHTS.values() for file in _files(folder / part, name)]


def load_part(folder: Path, part: str, dtype: torch.dtype) -> Any:
    """One part of a pipeline, loaded on the CPU. part: its name in the index. Raises BadCheckpoint."""
    kind = read_index(folder).components[part]
    with mute_libraries():
        return _load_part(folder / part, *kind, dtype)


def _check_class(place: str, value: list[Any]) -> tuple[str, str]:
    """A part's library and class, from its entry in the index. place: the entry's name. Raises BadCheckpoint unless both fit a part."""
    if len(value) != 2 or not all(isinstance(word, str) for word in value):
        raise BadCheckpoint(f"{place} is {_quote(value)}, not a library and a class")
    library, name = value
    if library not in KINDS and not _is_of_pipelines(library):
        raise BadCheckpoint(f"{place} is of {_quote(library)}: of {' and '.join(KINDS)} only classes are loaded, and no other code is")
    if library == "transformers" and name in PROCESSORS:
        return library, name
    kind = _find_class(library, name)
    if kind is None or not issubclass(kind, KINDS.get(library, (*KINDS["diffusers"], *KINDS["transformers"]))):
        version = diffusers.__version__ if library != "transformers" else transformers.__version__
        raise BadCheckpoint(f"{place} is {_quote(name)}, which is no class of {library} {version} that can be a part of a pipeline")
    return library, name


def _is_of_pipelines(library: str) -> bool:
    """Whether Diffusers has parts under this name for one kind of pipeline alone, such as the safety checker of `stable_diffusion`."""
    return library.isidentifier() and not library.startswith("_") and find_spec(f"{PIPELINES}.{library}") is not None


def _find_class(library: str, name: str) -> type | None:
    """A public class of a library; None if the library has no class of that name, or lacks a package for it."""
    if not name.isidentifier() or name.startswith("_"):
        return None
    try:
        value = getattr(importlib.import_module(library if library in KINDS else f"{PIPELINES}.{library}"), name)
    except Exception:  # both libraries import a class when it is asked for, and an import may raise anything
        return None
    return value if inspect.isclass(value) else None


def _load_part(folder: Path, library: str, name: str, dtype: torch.dtype, arguments: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """A part, loaded from its folder. library, name: its library and class. arguments: further ones of its loader. Raises BadCheckpoint."""
    if not folder.is_dir():
        raise BadCheckpoint(f"{folder} is missing: give the folder of a complete pipeline of Diffusers")
    if library == "transformers" and name in PROCESSORS:
        _read_config(folder, PREPROCESSOR)
        _check_vocabulary(folder, transformers.Qwen2Tokenizer)
        with _translate_errors(folder):
            return load_processor(folder)
    kind: Any = _find_class(library, name)
    values = _read_config(folder, next(files for base, files in CONFIGS if issubclass(kind, base)))
    if issubclass(kind, transformers.PreTrainedTokenizerBase):
        _check_vocabulary(folder, kind)
    if issubclass(kind, torch.nn.Module | diffusers.SchedulerMixin):
        check_numbers(values, folder)
    if not issubclass(kind, torch.nn.Module):
        with _translate_errors(folder):
            return kind.from_pretrained(folder, **SAFE)
    owner = "transformers" if issubclass(kind, transformers.PreTrainedModel) else "diffusers"
    header = _check_files(folder, WEIGHTS[owner])
    check_says_unpacked(values, str(folder / "config.json"))
    dtype_arguments = {"dtype": dtype} if owner == "transformers" else {"torch_dtype": dtype, "low_cpu_mem_usage": True}
    try:
        with _translate_errors(folder), bound_building(header, folder):
            model, report = kind.from_pretrained(folder, **SAFE_WEIGHTS, **dtype_arguments, **arguments)
    except BadCheckpoint:
        check_unpacked(header, folder)  # The library's error for packed weights does not say that they are packed.
        raise
    check_stored(header, model, report, folder)
    _check_weights(folder, model, report)
    check_tensors(model, folder)
    return model


def _read_config(folder: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """The config of a part. files: its possible names. Raises BadCheckpoint if it is missing, damaged, or names code of a hub."""
    path = next((folder / file for file in files if (folder / file).is_file()), None)
    if path is None:
        raise BadCheckpoint(f"{folder / files[0]} is missing: give the folder of a complete pipeline of Diffusers")
    values = json_object(path)
    for section in (values, *(value for value in values.values() if isinstance(value, dict))):
        for key in ATTENTION:
            if section.get(key) is not None and "/" in str(section[key]):
                raise BadCheckpoint(f"{path}: {key!r} is {_quote(section[key])}, which is code of a hub: none is run")
    return values


def _check_vocabulary(folder: Path, kind: type[transformers.PreTrainedTokenizerBase]) -> None:
    """Raises BadCheckpoint if a tokenizer's folder has no vocabulary: Transformers would make a vocabulary without words."""
    files = dict(kind.vocab_files_names)
    tokenizer_file = files.pop("tokenizer_file", "tokenizer.json")
    missing = [file for file in files.values() if not (folder / file).is_file()]
    if missing and not (folder / tokenizer_file).is_file():
        raise BadCheckpoint(f"{folder / missing[0]} is missing, and so is {tokenizer_file}")


def _check_tokens(folder: Path, tokenizer: Any, encoder: Any) -> None:
    """Raises BadCheckpoint if a tokenizer has tokens that its text encoder does not know. Ignores parts of other kinds."""
    if isinstance(tokenizer, transformers.PreTrainedTokenizerBase) and isinstance(encoder, transformers.PreTrainedModel):
        embedding: Any = encoder.get_input_embeddings()
        rows = embedding.weight.shape[0]
        if len(tokenizer) > rows:
            raise BadCheckpoint(f"{folder} has {len(tokenizer)} tokens, and the text encoder knows {rows} only")


def _check_files(folder: Path, weights: str) -> dict[str, Stored]:
    """The headers of the weights in the files, by name. Raises BadCheckpoint for the first file that is missing or not whole."""
    header: dict[str, Stored] = {}
    for path, names in _files(folder, weights).items():
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing: weights are read from safetensors only")
        try:
            with safe_open(path, "pt") as file:
                header |= weights_in(file)
                absent = sorted(names.difference(file.keys()))
        except Exception as error:  # the library's errors have no other base than Exception
            raise BadCheckpoint(f"{path} is damaged: {_line(error)}") from None
        if absent:
            raise BadCheckpoint(f"{path} lacks {_list_names(absent)}, which {weights}.index.json says it has")
    return header


def _files(folder: Path, weights: str) -> dict[Path, frozenset[str]]:
    """The files with the weights of a part, each with the names that it must have: one file, or the shards of an index."""
    index = folder / f"{weights}.index.json"
    return _shards(index) if index.is_file() else {folder / weights: frozenset()}


def _shards(index: Path) -> dict[Path, frozenset[str]]:
    """The files that an index lists, each with the names of its weights. Raises BadCheckpoint for files in another folder."""
    table = json_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise BadCheckpoint(f"{index} lacks the object 'weight_map'")
    shards: dict[Path, set[str]] = {}
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise BadCheckpoint(f"{index}: {_quote(name)} is in {_quote(file)}, which is no safetensors file beside it")
        shards.setdefault(index.parent / file, set()).add(name)
    return {path: frozenset(names) for path, names in shards.items()}


def _check_weights(folder: Path, model: torch.nn.Module, report: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint if any weight did not come from the files, or some layers in them have no place. Both libraries would go on:
    with random memory as weights, or without those layers."""
    wrong = sorted(f"{name} is {list(file_shape)}, not {list(model_shape)}" for name, file_shape, model_shape in report["mismatched_keys"])
    if wrong:
        raise BadCheckpoint(f"{folder} has weights of other shapes than its config.json wants: {_list_names(wrong)}")
    missing = sorted(map(str, report["missing_keys"]))
    if missing:
        raise BadCheckpoint(f"{folder} lacks {_list_names(missing)} of a {type(model).__name__}")
    if report["error_msgs"]:
        raise BadCheckpoint(f"{folder} cannot be loaded: {_list_names(list(map(str, report['error_msgs'])))}")
    # Names of layers beyond those of the model: they differ from the model's names only in the number of the layer.
    places = {_place(name) for name in model.state_dict()}
    lists = {name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)}
    extra_names = sorted(
        name
        for name in map(str, report["unexpected_keys"])
        if (layer := LAYER.search(name)) and (_place(name) in places or name[: layer.start()] in lists)
    )
    if extra_names:
        raise BadCheckpoint(f"{folder} has more layers than its config.json wants: {_list_names(extra_names)}")
    empty = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if empty:
        raise BadCheckpoint(f"{folder} left without values: {_list_names(empty)}")


def _place(name: str) -> str:
    """A weight's name without the number of its layer."""
    return LAYER.sub(".#.", name)


@contextmanager
def _translate_errors(place: Path) -> Iterator[None]:
    """Turns all errors of the libraries about the files at a place, even errors of the system, into BadCheckpoint."""
    try:
        yield
    except (BadCheckpoint, MemoryError):
        raise
    except Exception as error:
        raise BadCheckpoint(f"{place} cannot be loaded: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The text of an error, in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{text[:300]}…" if len(text) > 300 else (text or type(error).__name__)


def _list_names(names: list[str]) -> str:
    """The first names as text, and how many there are if they are more."""
    count_text = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + count_text


def _quote(value: object) -> str:
    return repr(value)[:80]


IMAGE_TOKEN = "<|image_pad|>"

SAFE: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for everything that is loaded from a folder: nothing is fetched, and no code in the folder is run."""


class PictureProcessor(transformers.ProcessorMixin):
    """Qwen2VLProcessor without films: the same tokens, pixels and grids. A picture's token is repeated for each merged patch."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[no-untyped-call]

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        """The text that stands for the picture of that index. image_inputs: image_grid_thw has frames, height and width in patches."""
        return IMAGE_TOKEN * int(image_inputs["image_grid_thw"][image_idx].prod() // self.image_processor.merge_size**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]


def load_processor(folder: Path) -> transformers.ProcessorMixin:
    """The processor of a published folder with preprocessor_config.json and a tokenizer. Raises what Transformers raises."""
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder, **SAFE)
    return PictureProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder, **SAFE), tokenizer, chat_template=tokenizer.chat_template)


LIBRARIES: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)

_lock = threading.RLock()
"""`mute_libraries` changes the state of the process. So do the libraries while they load: the default dtype, and how weights begin."""


def silence() -> None:
    """Silence both libraries for the life of a serving process: their warnings quote requests, whose words belong to the client alone."""
    for library in LIBRARIES:
        library.set_verbosity_error()


@contextmanager
def mute_libraries() -> Iterator[None]:
    """Silences both libraries in this context, which one thread at a time enters; afterwards all settings are as before."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in LIBRARIES]
        try:
            for library in LIBRARIES:
                library.set_verbosity(logging.CRITICAL)
                library.disable_progress_bar()
            yield
        finally:
            for library, (verbosity, shows_progress) in zip(LIBRARIES, before, strict=True):
                library.set_verbosity(verbosity)
                if shows_progress:
                    library.enable_progress_bar()
