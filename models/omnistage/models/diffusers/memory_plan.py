"""The memory plan of a pipeline: where its weights are, in how many bits, and from which size on pictures are decoded in tiles."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.hooks import apply_group_offloading
from safetensors import SafetensorError

from omnistage.models.diffusers.options import AREA, UNSAID, DiffusersOptions
from omnistage.models.fetch.disk import OwnFolder
from omnistage.models.options import LoadOptions
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

    chosen: DiffusersOptions  # The user's options.
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
        if options.offload == "model":
            plan._check_model_offload()
        if options.quantization:
            plan._check_quantizer()
        if options.offload_folder and not Path(options.offload_folder).is_dir():
            raise LoadError(f"option offload_folder {options.offload_folder}: there is no such folder; make it, on a disk with room")
        return plan

    @property
    def tiles_above(self) -> int:
        """Pixels above which a picture is decoded in tiles; 0: never. Decoding needs memory for every pixel, on a GPU that holds weights
        and other drawings too: a picture larger than the usual might not fit. A CPU has room, so it avoids the seams of tiles."""
        if self.chosen.vae_tiling_above != UNSAID:
            return self.chosen.vae_tiling_above
        return 0 if self.device == "cpu" else AREA

    @property
    def settings(self) -> str:
        """The choices as text for the revision of a model; empty if nothing was chosen."""
        words = [self.chosen.offload, self.chosen.storage, self.chosen.quantization]
        if self.tiles_above:
            words.append(f"tiles above {self.tiles_above}")
        if self.ranks > 1:
            words.append(f"{self.ranks} ranks {self.chosen.context_parallel}")
        return " ".join(filter(None, words))

    def told(self) -> dict[str, str]:
        """The choices by name, as text for people."""
        offload, weight_type = self.chosen.offload, self.chosen.storage or self.chosen.quantization
        place = {"": self.device, "group": "CPU", "disk": "disk", "model": "CPU"}[offload]
        weights = f"{weight_type} in the transformer" if weight_type else "as computed (default)"
        tiles = f"of more than {self.tiles_above} pixels" if self.tiles_above else "never"
        by_default = " (default)" if self.chosen.vae_tiling_above == UNSAID else ""
        share = "tokens" if self.chosen.context_parallel else "weights"
        return {
            "ranks": f"{self.ranks}, each with a part of the {share} of the transformer" if self.ranks > 1 else "1 (default)",
            "weights": f"{weights}, on the {place}{f' (offload {offload})' if offload else ' (default)'}",
            "pictures decoded in tiles": f"{tiles}{by_default}",
        }

    def arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """The arguments for loading the parts of a pipeline, by part."""
        if not self.chosen.quantization:
            return {}
        quantization = self._quantization()
        return {name: {"quantization_config": quantization} for name in DENOISERS}

    def placed(self, pipe: diffusers.DiffusionPipeline) -> diffusers.DiffusionPipeline:
        """The pipeline, loaded on the CPU, placed as the plan says. Raises LoadError if it lacks a part for that."""
        parts: Mapping[str, Any] = pipe.components
        inner = [parts[name] for name in DENOISERS if parts.get(name) is not None]
        if not inner and (self.chosen.offload or self.chosen.storage or self.chosen.quantization):
            raise LoadError(f"{self.settings}: {type(pipe).__name__} has none of {', '.join(DENOISERS)}; leave it out")
        if self.chosen.storage:
            for model in inner:
                model.enable_layerwise_casting(storage_dtype=getattr(torch, self.chosen.storage), compute_dtype=self.dtype)
        if self.chosen.offload in ("group", "disk"):
            self._offload(pipe)
        elif self.chosen.offload == "model":
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
        folder = self._folder(pipe) if self.chosen.offload == "disk" else None
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
                raise LoadError(f"offload {self.chosen.offload}: weights cannot be written to {folder}: {error}") from error

    def _folder(self, pipe: diffusers.DiffusionPipeline) -> Path:
        """Make a new folder for weights: files of another process would be used as its own. It is removed with the pipeline or, after a
        kill, by the next process."""
        try:
            folder = OwnFolder("offload", Path(self.chosen.offload_folder) if self.chosen.offload_folder else None)
        except OSError as error:
            raise LoadError(f"offload disk: no folder can be made: {error}; choose another one with offload_folder") from error
        weakref.finalize(pipe, folder.remove)
        return folder.path

    def _tile(self, pipe: Any) -> None:
        """Decode large pictures in tiles; by default not films that are decoded frame by frame, which need no more memory."""
        vae: Any = getattr(pipe, "vae", None)
        if not self.tiles_above or (isinstance(vae, diffusers.AutoencoderKLWan) and self.chosen.vae_tiling_above == UNSAID):
            return
        if not hasattr(vae, "use_tiling"):
            if self.chosen.vae_tiling_above != UNSAID:
                raise LoadError(f"option vae_tiling_above {self.tiles_above}: {type(pipe).__name__} does not decode in tiles; leave it out")
            return
        side = next(getattr(pipe, name) for name in ("vae_scale_factor", "vae_scale_factor_spatial") if hasattr(pipe, name))
        vae.tiled_above = self.tiles_above / side**2
        vae.decode = partial(_decode_tiled, vae, vae.decode)

    def _check_model_offload(self) -> None:
        if self.device == "cpu":
            raise LoadError("offload model: moves whole models to an accelerator and back, and device is cpu; take offload disk, or none")

    def _check_quantizer(self) -> None:
        """Raises LoadError if the chosen quantization needs a package that is not installed, or a GPU."""
        name, quantizer = self.chosen.quantization, QUANTIZERS[self.chosen.quantization]
        if not _is_there(quantizer.module):
            raise LoadError(f"quantization {name}: its package is not installed: pip install {quantizer.package}")
        if self.device == "cpu" and not quantizer.cpu:
            able = " or ".join(other for other, each in QUANTIZERS.items() if each.cpu)
            raise LoadError(f"quantization {name}: needs a GPU, and device is cpu; take {able}, or option storage")

    def _quantization(self) -> Any:
        """The quantization for the loader of Diffusers. Raises LoadError for a package that is installed and cannot be imported."""
        name = self.chosen.quantization
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
