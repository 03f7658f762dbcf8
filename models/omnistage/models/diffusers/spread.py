"""A transformer in several processes: each has a part of its weights, cut as Diffusers says, or all of them and a part of the tokens.

Only the first rank has encoders, VAE, schedulers and latents. Before each pass it sends the transformer's arguments to the others.
Diffusers can cut weights itself, but only on accelerators, and its sums lose an error of another rank; here the engine's sums are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from diffusers import ContextParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from omnistage.engine.devices import Group, RanksApart
from omnistage.models.checkpoint.decoder import weights_of_part
from omnistage.models.checkpoint.files import json_object
from omnistage.models.devices import dtype_of
from omnistage.models.diffusers.folder import load_part, read_index
from omnistage.models.diffusers.memory_plan import MemoryPlan
from omnistage.models.diffusers.options import DiffusersOptions
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import Team
from omnistage.models.reports import LoadError

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
        """transformer: of the first rank. team: the other ranks. min_tokens: fewest tokens of words, and of pictures, in a pass."""
        self._forward, self._team, self._least = transformer.forward, team, min_tokens
        self._apart = ""  # Why no further pass is possible; empty if passes are.
        transformer.forward = self

    def __call__(self, **arguments: Any) -> Any:
        """Computes a pass on all ranks. Raises RanksApart, also for every pass after a failed pass: the other ranks might be in the middle
        of the failed pass. Raises ValueError, and sends nothing, if there are fewer tokens than ranks to share them."""
        if self._apart:
            raise RanksApart(self._apart)
        for name in ("hidden_states", "encoder_hidden_states"):
            if (count := arguments[name].shape[1]) < self._least:
                raise ValueError(f"{count} tokens of {name} cannot be shared by {self._least} ranks: draw it larger, or say more")
        try:
            with self._team.together(Forward(arguments)), _translate_loss():
                return self._forward(**arguments)
        except RanksApart as error:
            self._apart = str(error)
            self._team.abandon()
            raise


def is_spread(transformer: Any) -> bool:
    """Whether other ranks take part in the passes of this transformer."""
    return isinstance(transformer.forward, Spread)


def place_pipeline(pipe: Any, memory: MemoryPlan, team: Team | None) -> Any:
    """A pipeline that was loaded on the CPU, moved to where it computes; with several ranks, together with the others. Raises LoadError."""
    if team is None:
        return memory.placed(pipe)
    sharing = memory.ranks if memory.chosen.context_parallel else 1
    if sharing == 1:
        cut(pipe.transformer, team.group)
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
        cut(transformer, group)
    return FollowerOfDrawing(transformer.to(options.device), group.size if shares else 1)


def cut(transformer: Any, group: Group) -> None:
    """Keep only the rank's part of the weights that the plan of Diffusers names; other weights stay whole."""
    plan: Mapping[str, str] = type(transformer)._tp_plan
    part = weights_of_part(transformer.state_dict().get, plan, group)
    for name, module in list(transformer.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "")
        if not style:
            continue
        weight, bias = part(f"{name}.weight"), part(f"{name}.bias")
        assert weight is not None
        if style != "colwise":
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
