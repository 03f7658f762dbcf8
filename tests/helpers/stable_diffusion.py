"""A small Stable Diffusion with random weights: a pipeline for which there is no loop of our own."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, ControlNetModel, DPMSolverMultistepScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from helpers.drawings import kept_folder
from omnistage.models.diffusers.folder import mute_libraries

SIDE = 64
"""The side of the picture that the model draws by default, in pixels."""


@cache
def stable_diffusion() -> Path:
    """Its folder, which is gone when the process ends; nobody may write to it."""
    home = kept_folder()
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    halves: dict[str, Any] = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    norms = {"norm_num_groups": 4}
    words: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": len(tokenizer)}
    text = CLIPTextConfig(**words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 4}
    with mute_libraries():
        pipe: Any = StableDiffusionPipeline(
            vae=AutoencoderKL(block_out_channels=[8, 16, 16, 16], latent_channels=4, **halves, **norms),
            text_encoder=CLIPTextModel(text),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(sample_size=SIDE // 8, **sizes, **blocks, **norms),
            scheduler=DPMSolverMultistepScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.save_pretrained(home)
    return home


def variant(class_name: str, folder: Path, scheduler: Mapping[str, Any] | None = None, *, controlled: bool = False) -> Path:
    """Another pipeline of the same parts, in a new folder. scheduler: what its config says otherwise. controlled: with a ControlNet, which
    says something."""
    shutil.copytree(stable_diffusion(), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = class_name
    if controlled:
        with mute_libraries():
            torch.manual_seed(1)
            unet = UNet2DConditionModel.from_pretrained(folder / "unet")
            controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8, 8, 8))
            for weights in controlnet.parameters():
                torch.nn.init.normal_(weights, std=0.1)
            controlnet.save_pretrained(folder / "controlnet")
        index["controlnet"] = ["diffusers", "ControlNetModel"]
    if scheduler:
        path = folder / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | scheduler))
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _tokenizer() -> CLIPTokenizer:
    letters = string.ascii_lowercase
    words = ("<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters))
    return CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)
