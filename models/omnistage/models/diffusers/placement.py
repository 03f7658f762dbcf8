"""The placement of a pipeline's weights: on which device and in how many bits each is, from which size on pictures are decoded in tiles,
and the spread of a transformer over several processes.

A spread transformer has in each process a part of its weights, cut as Diffusers says, or all of them and a part of the tokens. Only the
first rank has encoders, VAE, schedulers and latents. Before each pass it sends the transformer's arguments to the others. Diffusers can
cut weights itself, but only on accelerators, and its sums lose an error of another rank; here the engine's sums are used."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import torch.distributed as distributed
from diffusers import ContextParallelConfig
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from omnistage.engine.devices import Group, RanksApart
from omnistage.models.checkpoint.decoder import weights_of_part
from omnistage.models.checkpoint.files import json_object
from omnistage.models.devices import dtype_of
from omnistage.models.diffusers.folder import load_part, read_index
from omnistage.models.diffusers.options import AREA, NOT_SET, DiffusersOptions
from omnistage.models.fetch.own_files import OwnFolder
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import Team
from omnistage.models.reports import LoadError

DENOISERS = ("transformer", "transformer_2", "unet")
"""Parts that have most of the weights and compute in every step: only these are kept in fewer bits."""
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
"""Parts that are offloaded as well: they are used once for a picture."""


class Quantizer(NamedTuple):
    """A library that packs weights. module: the module to import. package: the package that has it. cpu: whether it works on a CPU."""

    module: str
    package: str
    cpu: bool


QUANTIZERS: Mapping[str, Quantizer] = {
    "bitsandbytes_4bit": Quantizer("bitsandbytes", "bitsandbytes", cpu=False),
    "bitsandbytes_8bit": Quantizer("bitsandbytes", "bitsandbytes", cpu=False),
    "torchao_int8": Quantizer("torchao", "torchao", cpu=True),
    "quanto_int8": Quantizer("optimum.quanto", "optimum-quanto", cpu=True),
}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The choices for a device. dtype: the type in which the models compute. ranks: number of processes that share the transformer."""

    options: DiffusersOptions
    device: str
    dtype: torch.dtype
    ranks: int = 1

    @classmethod
    def of(cls, options: DiffusersOptions, load_options: LoadOptions, dtype: torch.dtype) -> MemoryPlan:
        """Make the plan from the options. Raises LoadError for a choice that this device, or an installed library, cannot follow."""
        plan = cls(options, load_options.device, dtype, load_options.tensor_parallel_size)
        if options.context_parallel and plan.ranks == 1:
            raise LoadError(f"option context_parallel {options.context_parallel}: give tensor_parallel_size, the number of ranks, with it")
        for name in ("offload", "storage", "quantization", "lora"):
            if plan.ranks > 1 and (value := getattr(options, name)):
                conflict = f"tensor_parallel_size {plan.ranks} and option {name} {value} exclude each other"
                raise LoadError(f"{conflict}: each rank has a part of the weights as they are; leave one of them out")
        if options.offload == "model" and plan.device == "cpu":
            raise LoadError("offload model: moves whole models to an accelerator and back, and device is cpu; take offload disk, or none")
        if options.quantization:
            plan._check_quantizer()
        if options.offload_folder and not Path(options.offload_folder).is_dir():
            raise LoadError(f"option offload_folder {options.offload_folder}: there is no such folder; make it, on a disk with room")
        return plan

    @property
    def tiles_above(self) -> int:
        """Pixels above which a picture is decoded in tiles; 0: never. Decoding needs memory for every pixel, on a GPU that holds weights
        and other drawings too: a picture larger than the usual might not fit. A CPU has room, so it avoids the seams of tiles."""
        if self.options.vae_tiling_above != NOT_SET:
            return self.options.vae_tiling_above
        return 0 if self.device == "cpu" else AREA

    @property
    def settings(self) -> str:
        """The choices as text for the revision of a model; empty if nothing was chosen."""
        words = [self.options.offload, self.options.storage, self.options.quantization]
        if self.tiles_above:
            words.append(f"tiles above {self.tiles_above}")
        if self.ranks > 1:
            words.append(f"{self.ranks} ranks {self.options.context_parallel}")
        return " ".join(filter(None, words))

    def describe(self) -> dict[str, str]:
        """The choices by name, as text for people."""
        offload, weight_type = self.options.offload, self.options.storage or self.options.quantization
        place = {"": self.device, "group": "CPU", "disk": "disk", "model": "CPU"}[offload]
        weights = f"{weight_type} in the transformer" if weight_type else "as computed (default)"
        tiles = f"of more than {self.tiles_above} pixels" if self.tiles_above else "never"
        tiles += " (default)" if self.options.vae_tiling_above == NOT_SET else ""
        offload_text = f" (offload {offload})" if offload else " (default)"
        share = "tokens" if self.options.context_parallel else "weights"
        return {
            "ranks": f"{self.ranks}, each with a part of the {share} of the transformer" if self.ranks > 1 else "1 (default)",
            "weights": f"{weights}, on the {place}{offload_text}",
            "pictures decoded in tiles": tiles,
        }

    def arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """The arguments for loading the parts of a pipeline, by part."""
        if not self.options.quantization:
            return {}
        quantization = self._quantization()
        return {name: {"quantization_config": quantization} for name in DENOISERS}

    def placed(self, pipe: diffusers.DiffusionPipeline) -> diffusers.DiffusionPipeline:
        """The pipeline, loaded on the CPU, placed as the plan says. Raises LoadError if it lacks a part for that."""
        parts: Mapping[str, Any] = pipe.components
        inner = [parts[name] for name in DENOISERS if parts.get(name) is not None]
        if not inner and (self.options.offload or self.options.storage or self.options.quantization):
            raise LoadError(f"{self.settings}: {type(pipe).__name__} has none of {', '.join(DENOISERS)}; leave it out")
        if self.options.storage:
            for model in inner:
                model.enable_layerwise_casting(storage_dtype=getattr(torch, self.options.storage), compute_dtype=self.dtype)
        if self.options.offload in ("group", "disk"):
            self._offload(pipe)
        elif self.options.offload == "model":
            pipe.enable_model_cpu_offload(device=self.device)
        else:
            pipe.to(self.device)
        self._tile(pipe)
        return pipe

    def _offload(self, pipe: diffusers.DiffusionPipeline) -> None:
        """Keep the large models on the CPU or on the disk, from which they are fetched block by block. Raises LoadError."""
        parts: Mapping[str, Any] = pipe.components
        offload_parts = {name: parts[name] for name in (*DENOISERS, *ENCODERS) if parts.get(name) is not None}
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module) and name not in offload_parts:
                part.to(self.device)
        folder = self._folder(pipe) if self.options.offload == "disk" else None
        for name, part in offload_parts.items():
            offload_options: dict[str, Any] = {"onload_device": torch.device(self.device), "offload_device": torch.device("cpu")}
            if folder is not None:
                untie(part)
                offload_options["offload_to_disk_path"] = str(folder / name)
            try:
                if name in DENOISERS:
                    stream = self.device != "cpu" and folder is None
                    part.enable_group_offload(offload_type="block_level", num_blocks_per_group=1, use_stream=stream, **offload_options)
                else:  # The search for groups of blocks does not find its layers, and the request decides which of them are used.
                    apply_group_offloading(part, offload_type="leaf_level", **offload_options)
            except (OSError, SafetensorError) as error:
                raise LoadError(f"offload {self.options.offload}: weights cannot be written to {folder}: {error}") from error

    def _folder(self, pipe: diffusers.DiffusionPipeline) -> Path:
        """Make a new folder for weights: files of another process would be used as its own. It is removed with the pipeline or, after a
        kill, by the next process."""
        try:
            folder = OwnFolder("offload", Path(self.options.offload_folder) if self.options.offload_folder else None)
        except OSError as error:
            raise LoadError(f"offload disk: no folder can be made: {error}; choose another one with offload_folder") from error
        weakref.finalize(pipe, folder.remove)
        return folder.path

    def _tile(self, pipe: Any) -> None:
        """Decode large pictures in tiles. Wan's VAE decodes one frame at a time, so a long film needs no more memory than a short one; it
        decodes in tiles only if the option asks for that."""
        vae: Any = getattr(pipe, "vae", None)
        if not self.tiles_above or (isinstance(vae, diffusers.AutoencoderKLWan) and self.options.vae_tiling_above == NOT_SET):
            return
        if not hasattr(vae, "use_tiling"):
            if self.options.vae_tiling_above != NOT_SET:
                raise LoadError(f"option vae_tiling_above {self.tiles_above}: {type(pipe).__name__} does not decode in tiles; leave it out")
            return
        side = next(getattr(pipe, name) for name in ("vae_scale_factor", "vae_scale_factor_spatial") if hasattr(pipe, name))
        vae.tiled_above = self.tiles_above / side**2  # A number of places of the latents, not of pixels.
        vae.decode = partial(_decode_tiled, vae, vae.decode)

    def _check_quantizer(self) -> None:
        """Raises LoadError if the chosen quantization needs a package that is not installed, or a GPU."""
        name, quantizer = self.options.quantization, QUANTIZERS[self.options.quantization]
        if not _is_there(quantizer.module):
            raise LoadError(f"quantization {name}: its package is not installed: pip install {quantizer.package}")
        if self.device == "cpu" and not quantizer.cpu:
            able = " or ".join(other for other, each in QUANTIZERS.items() if each.cpu)
            raise LoadError(f"quantization {name}: needs a GPU, and device is cpu; take {able}, or option storage")

    def _quantization(self) -> Any:
        """The quantization for the loader of Diffusers. Raises LoadError for a package that is installed and cannot be imported."""
        name = self.options.quantization
        try:
            if name == "torchao_int8":
                return diffusers.TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())
            if name == "quanto_int8":
                return diffusers.QuantoConfig(weights_dtype="int8")
            if name == "bitsandbytes_8bit":
                return diffusers.BitsAndBytesConfig(load_in_8bit=True)
            return diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=self.dtype)
        except (ImportError, RuntimeError) as error:
            raise LoadError(f"quantization {name}: its package does not work here: {error}") from error


def untie(model: torch.nn.Module) -> None:
    """Give each module weights of its own if some share them (T5: the embedding of its encoder). Diffusers writes the weights of a module
    to the disk and lets go of them, so the next module that shares them would have none to write."""
    earlier_weights = set[torch.nn.Parameter]()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight in earlier_weights:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))
            earlier_weights.add(weight)


def is_tiled(vae: Any, latents: torch.Tensor) -> bool:
    """Whether a VAE decodes latents [..., height, width] in tiles."""
    return bool(vae.use_tiling or latents.shape[-2] * latents.shape[-1] > getattr(vae, "tiled_above", math.inf))


def _decode_tiled(vae: Any, decode: Any, latents: torch.Tensor, *others: Any, **keywords: Any) -> Any:
    """Decode latents with a VAE, in tiles if they are large. The tiles are set for this call alone: the next latents may be small."""
    if vae.use_tiling or not is_tiled(vae, latents):
        return decode(latents, *others, **keywords)
    vae.enable_tiling()
    try:
        return decode(latents, *others, **keywords)
    finally:
        vae.disable_tiling()


def _is_there(module: str) -> bool:
    """Whether a module is installed. Does not import it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # The package that holds the module is missing.
        return False


ABLE: Mapping[str, str] = {"QwenImageTransformer2DModel": "Qwen-Image"}
"""Transformers for which Diffusers has plans to cut both weights and tokens, and their names for people."""
PIPELINES = ("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImageLayeredPipeline")
TRANSFORMER = "transformer"


@dataclass(frozen=True, slots=True)
class Forward:
    """Message: call the transformer with these arguments."""

    arguments: Mapping[str, Any]


class FollowerOfDrawing:
    """Implements `Follower` of rank.py: computes the passes of the transformer that the first rank asks for."""

    def __init__(self, transformer: Any, sharing: int) -> None:
        """sharing: number of ranks that share the tokens; 1: each has a part of the weights."""
        self._transformer, self._sharing = transformer, sharing

    @property
    def device(self) -> torch.device:
        device: torch.device = self._transformer.device
        return device

    def met(self) -> None:
        share_tokens(self._transformer, self._sharing)

    def follow(self, message: object) -> None:
        """Compute the pass of a message."""
        match message:
            case Forward(arguments):
                self._transformer(**tree_map_only(Tensor, lambda tensor: tensor.to(self.device), dict(arguments)))
            case _:
                raise TypeError(f"no message for a rank: {message!r}")


class Spread:
    """Passes of a transformer, computed by all ranks: it replaces the transformer's `forward`."""

    def __init__(self, transformer: Any, team: Team, min_tokens: int) -> None:
        """transformer: of the first rank. team: the other ranks. min_tokens: a pass has at least so many
        tokens of words, and at least so many of pictures."""
        self._forward, self._team, self._min_tokens = transformer.forward, team, min_tokens
        self._fault = ""  # The reason why no pass is possible any more; empty while passes are possible.
        transformer.forward = self

    def __call__(self, **arguments: Any) -> Any:
        """Computes a pass on all ranks. Raises RanksApart, also for every pass after a failed pass: the other ranks might be in the middle
        of the failed pass. Raises ValueError, and sends nothing, if there are fewer tokens than ranks to share them."""
        if self._fault:
            raise RanksApart(self._fault)
        for name in ("hidden_states", "encoder_hidden_states"):
            if (count := arguments[name].shape[1]) < self._min_tokens:
                raise ValueError(f"{count} tokens of {name} cannot be shared by {self._min_tokens} ranks: draw it larger, or say more")
        try:
            with self._team.together(Forward(arguments)), _translate_loss():
                return self._forward(**arguments)
        except RanksApart as error:
            self._fault = str(error)
            self._team.abandon()
            raise


def is_spread(transformer: Any) -> bool:
    """Whether other ranks take part in the passes of this transformer."""
    return isinstance(transformer.forward, Spread)


def place_pipeline(pipe: Any, memory: MemoryPlan, team: Team | None) -> Any:
    """A pipeline that was loaded on the CPU, moved to where it computes; with several ranks, together with the others. Raises LoadError."""
    if team is None:
        return memory.placed(pipe)
    sharing = memory.ranks if memory.options.context_parallel else 1
    if sharing == 1:
        cut_weights(pipe.transformer, team.group)
    memory.placed(pipe)
    team.connect(torch.device(memory.device), met=partial(share_tokens, pipe.transformer, sharing))
    Spread(pipe.transformer, team, sharing)
    return pipe


def team_of(folder: Path, options: LoadOptions) -> Team | None:
    """The other ranks, which begin to load; None for a single rank. Raises LoadError for an impossible pipeline or number of ranks."""
    size = options.tensor_parallel_size
    if size == 1:
        return None
    if size < 1:
        raise LoadError(f"tensor_parallel_size {size}: there is at least one rank")
    index = read_index(folder)
    _, kind = index.components.get(TRANSFORMER, ("", "none"))
    if index.class_name not in PIPELINES or kind not in ABLE:
        fault = f"a {index.class_name} computes on one device; for more answers at once run more replicas of it"
        raise LoadError(f"tensor_parallel_size {size}: {fault}. These can be spread: {', '.join(PIPELINES)}")
    heads = json_object(folder / TRANSFORMER / "config.json").get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        able = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise LoadError(f"tensor_parallel_size {size}: does not divide the {heads} heads of this transformer; it can be {able}")
    return Team(f"{__name__}:{read_part.__name__}", folder, options)


def read_part(folder: Path, options: LoadOptions, group: Group) -> FollowerOfDrawing:
    """A `rank.RankReader`: loads the transformer of another rank, with its part of the weights."""
    dtype = dtype_of(options.device) if options.dtype == "auto" else options.dtype
    transformer = load_part(folder, TRANSFORMER, getattr(torch, dtype))
    shares = bool(DiffusersOptions.from_settings(dict(options.family)).context_parallel)
    if not shares:
        cut_weights(transformer, group)
    return FollowerOfDrawing(transformer.to(options.device), group.size if shares else 1)


def cut_weights(transformer: Any, group: Group) -> None:
    """Keep only the rank's part of the weights that the plan of Diffusers names; other weights stay whole."""
    plan: Mapping[str, str] = type(transformer)._tp_plan
    part = weights_of_part(transformer.state_dict().get, plan, group)
    for name, module in list(transformer.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "")
        if not style:
            continue
        weight, bias = part(f"{name}.weight"), part(f"{name}.bias")
        assert weight is not None
        if style != "colwise":  # Then the ranks divide the columns of the layer's input.
            transformer.set_submodule(name, _Summed(weight, bias, group))
            continue
        module.weight = _fixed_parameter(weight)
        if bias is not None:
            module.bias = _fixed_parameter(bias)


def share_tokens(transformer: Any, size: int) -> None:
    """Make each of `size` ranks compute a part of the tokens, and all tokens only for attention (Jacobs et al. 2023). The ranks meet in
    this call.

    `enable_parallelism` of Diffusers does the same, but only on an accelerator."""
    if size == 1:
        return
    device: torch.device = transformer.device
    mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("ring", "ulysses"))
    # Any number of tokens, because prompts have any length.
    config = ContextParallelConfig(ulysses_degree=size, ulysses_anything=True, mesh=mesh)
    parallel_config = ParallelConfig(context_parallel_config=config)
    parallel_config.setup(mesh.get_rank(), size, device, mesh=mesh)
    for module in transformer.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = parallel_config
    apply_context_parallel(transformer, config, transformer._cp_plan)
    distributed.barrier()  # The groups were made through a store that may be gone when all have met.


@contextmanager
def _translate_loss() -> Iterator[None]:
    """Turns the error of an exchange of Diffusers in which a rank was lost into RanksApart: Diffusers has no error of its own for that."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RanksApart(f"a pass failed: {error}") from error


class _Summed(torch.nn.Module):
    """A linear layer with its input columns divided among the ranks, whose results are added up. bias: only the first rank has one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self._group = _fixed_parameter(weight), None if bias is None else _fixed_parameter(bias), group

    def forward(self, rows: Tensor) -> Tensor:
        return self._group.all_reduce(torch.nn.functional.linear(rows, self.weight, self.bias))


def _fixed_parameter(weight: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight, requires_grad=False)
