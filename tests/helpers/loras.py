"""LoRA files with random weights, and the ways to spell their names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from omnistage.models.diffusers.lora import METADATA

Weights = dict[str, torch.Tensor]


def random_lora(
    pipe: Any,
    part: str,
    path: Path,
    *,
    layers: str | tuple[str, ...] = "to_q",
    rank: int = 4,
    seed: int = 0,
    said: dict[str, Any] | None = None,
) -> Path:
    """Writes a LoRA that changes, by this much, the layers of one part whose names end like this. said: what the file says of itself."""
    draws, weights = torch.Generator().manual_seed(seed), Weights()
    for name, module in getattr(pipe, part).named_modules():
        if name.endswith(layers):
            weights[f"{part}.{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=draws)
            weights[f"{part}.{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=draws)
    save_file(weights, path, {} if said is None else {METADATA: json.dumps({f"{part}.{name}": value for name, value in said.items()})})
    return path


def changes(pipe: Any) -> Weights:
    """The change that the only LoRA of a pipeline adds to each of its layers."""
    found = {}
    for part, model in pipe.components.items():
        for layer, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            for name in getattr(module, "lora_A", {}):
                found[f"{part}.{layer}"] = module.scaling[name] * module.lora_B[name].weight.detach() @ module.lora_A[name].weight.detach()
    return found


def kohya(weights: Weights, alphas: Mapping[str, float] = {}) -> Weights:
    """As the scripts of kohya-ss save one. alphas: of layers by their own names; of others twice the rank."""
    spelled = {}
    for part, layer, side, value in _sides(weights):
        inner = layer.partition(".")[2]
        flat = f"lora_te_text_model_{inner}" if part == "text_encoder" else f"lora_unet_{inner}"
        spelled[f"{flat.replace('.', '_')}.lora_{side}.weight"] = value
        spelled[f"{flat.replace('.', '_')}.alpha"] = torch.tensor(alphas.get(layer, 8.0))
    return spelled


def older(weights: Weights) -> Weights:
    """As Diffusers saved one while its attention processors had the layers."""
    spelled = {}
    for part, layer, side, value in _sides(weights):
        block, _, last = layer.removesuffix(".0").rpartition(".")
        if part == "text_encoder":
            block, last = block.replace("text_encoder.", "text_encoder.text_model."), f"to_{last.removesuffix('_proj')}"
        else:
            block = f"{block}.processor"
        spelled[f"{block}.{last}_lora.{side}.weight"] = value
    return spelled


def old(weights: Weights) -> Weights:
    """As Diffusers saved one before it had peft."""
    kinds = {"text_encoder": "lora_linear_layer"}
    return {f"{layer}.{kinds.get(part, 'lora')}.{side}.weight": value for part, layer, side, value in _sides(weights)}


def bare(weights: Weights) -> Weights:
    """Without the part of the pipeline."""
    return {name.partition(".")[2]: value for name, value in weights.items()}


def of_peft(weights: Weights) -> Weights:
    """As peft itself saves one."""
    return {f"base_model.model.{name}": value for name, value in bare(weights).items()}


def of_comfy(weights: Weights) -> Weights:
    """As ComfyUI calls the model that draws."""
    return {f"diffusion_model.{name}": value for name, value in bare(weights).items()}


def of_wan(weights: Weights) -> Weights:
    """As those who published Wan call its layers, with biases beside the sides and norms that do not change."""
    inner = (("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    spelled = {}
    for _, layer, side, value in _sides(weights):
        name = f"diffusion_model.{layer.partition('.')[2]}"
        for ours, theirs in (*inner, ("net.0.proj", "0"), ("net.2", "2")):
            name = name.replace(f".{ours}", f".{theirs}")
        spelled[f"{name}.lora_{side}.weight"] = value
        spelled[f"{name}.alpha"] = torch.tensor(3.0)
        if side == "up":
            spelled[f"{name}.diff_b"] = value[:, 0].clone()
        if name.endswith(".q"):
            spelled[f"{name.removesuffix('q')}norm_q.diff"] = torch.zeros(len(value))
    return spelled


def _sides(weights: Weights) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """(part, layer, down or up, value) of each. The layer with its part."""
    for name, value in weights.items():
        layer, _, side = name.partition(".lora_")
        yield name.partition(".")[0], layer, "down" if side.startswith("A") else "up", value
