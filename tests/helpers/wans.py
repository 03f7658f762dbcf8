"""Small Wans of random proportions, each with the pipelines of Diffusers on the same modules beside the painter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from numpy.typing import NDArray
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
from transformers.models.umt5 import UMT5Config, UMT5EncoderModel

from helpers.moving import letters
from omnistage.models.conversation import Media
from omnistage.models.diffusers.options import Defaults, DiffusersOptions
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.diffusers.plan import DrawingPlan, SourcePicture, crop_to_shape, plan_drawing
from omnistage.models.diffusers.wan import WanPainter
from omnistage.models.interface import DrawRequest
from omnistage.models.memory import TensorCache

KINDS = ("t2v", "one", "ti2v", "ti2v-i2v", "i2v", "i2v-clip", "flf")
"""The kinds of pipelines. t2v, one: a film from words, by two experts or by one. ti2v, ti2v-i2v: TI2V by the names of both its pipelines.
i2v: from a picture, by two experts. i2v-clip: with an encoder of pictures. flf: from one picture to another, with that encoder."""
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SAMPLERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "unipc": (UniPCMultistepScheduler, FLOW),
    "euler": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}),
    "dpm": (DPMSolverMultistepScheduler, FLOW),
}
PICTURE_TOKENS = 5
"""The tokens that the encoder of pictures makes."""

pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean  # Its own needs ftfy, whether that is installed or not.

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Wan:
    """pictures: of plans, by their sources."""

    kind: str
    pipe: Any
    painter: WanPainter
    sent: dict[tuple[SourcePicture, ...], Sequence[Image.Image]] = field(default_factory=dict)

    def plan(self, prompt: str, images: Sequence[Image.Image] = (), **asked: Any) -> DrawingPlan:
        media = tuple(Media("image/png", b"-") for _ in images)
        plan = plan_drawing(replace(DrawRequest(seed=0, prompt=prompt, images=media), **asked), self.painter.limits, "wan")
        given = tuple(self.painter.edited(plan, image) for image in images)
        made = self.painter.sized(replace(plan, images=given, sources=tuple(SourcePicture(image.tobytes()[:999]) for image in images)))
        self.painter.check_steps(made)
        self.sent[made.sources] = images
        return made

    def begun(self, plan: DrawingPlan) -> Canvas:
        return self.painter.canvas(plan, self.painter.encode(plan), 0)

    def drawn(self, *plans: DrawingPlan, late: int = 1) -> list[Canvas]:
        """Each joins so many steps after the one before it. Those of a group share a pass."""
        with torch.inference_mode():
            canvases, steps = [self.begun(plan) for plan in plans], 0
            while not all(canvas.is_drawn for canvas in canvases):
                joined = canvases[: 1 + steps // late] if late else canvases
                groups: dict[Any, list[Canvas]] = {}
                for canvas in joined:
                    if not canvas.is_drawn:
                        groups.setdefault(self.painter.group(canvas), []).append(canvas)
                for group in groups.values():
                    self.painter.forward(group)
                for canvas in (each for group in groups.values() for each in group):
                    self.painter.advance(canvas)
                steps += 1
        return canvases

    def frames(self, canvas: Canvas) -> Pixels:
        with torch.inference_mode():
            return np.stack(list(self.painter.shown(self.painter.finished(canvas))))

    def published(self, plan: DrawingPlan) -> tuple[torch.Tensor, Pixels]:
        """Final latents and frames of the pipeline itself, from the part of each picture that has the shape of the film."""
        kind = WanImageToVideoPipeline if plan.images else WanPipeline
        pipe: Any = self.pipe
        if type(pipe) is not kind:
            pipe = kind(**{name: part for name, part in pipe.components.items() if part is not None}, expand_timesteps=True)
        pipe.set_progress_bar_config(disable=True)
        pictures = [crop_to_shape(image, plan.width, plan.height)[0] for image in self.sent[plan.sources]]
        said = {
            "prompt": plan.prompt,
            "negative_prompt": plan.negative,
            "width": plan.width,
            "height": plan.height,
            "num_frames": plan.frames,
            "num_inference_steps": plan.steps,
            "guidance_scale": plan.guidance,
            **dict(zip(("image", "last_image"), pictures, strict=False)),
            **({"guidance_scale_2": plan.guidance_2} if self.painter.limits.second_guidance else {}),
            **dict(plan.own_options),
        }
        usual = pipe.scheduler
        name = "flow_shift" if "flow_shift" in usual.config else "shift"
        pipe.scheduler = type(usual).from_config(usual.config, **({name: plan.flow_shift} if plan.flow_shift else {}))
        try:
            latents, made = (
                pipe(**said, generator=torch.Generator().manual_seed(plan.seed), output_type=each).frames for each in ("latent", "np")
            )
        finally:
            pipe.scheduler = usual
        return latents, (made[0] * 255).round().astype(np.uint8)


def wan(kind: str, seed: int, sampler: str = "unipc", **changed: Any) -> Wan:
    """One of KINDS. changed: of transformer, second, vae: mappings; boundary_ratio; scheduler."""
    pipe = pipeline(kind, seed, sampler, **changed)
    return Wan(kind, pipe, WanPainter(pipe, TensorCache(1 << 26), TensorCache(1 << 26), Defaults(DiffusersOptions())))


def pipeline(kind: str, seed: int, sampler: str = "unipc", **changed: Any) -> Any:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    expands, sees, adds = kind.startswith("ti2v"), kind in ("i2v-clip", "flf"), kind in ("i2v", "i2v-clip", "flf")
    vae = _vae(rng, expands, adds, changed.get("vae", {}))
    width, ratio = vae.config.z_dim, vae.config.scale_factor_temporal
    sizes = {
        "patch_size": (1, 2, 2) if expands else rng.choice([(1, 2, 2), (1, 1, 1), (1, 2, 1), *[(2, 2, 2)] * (ratio == 4)]),
        "num_attention_heads": rng.choice([1, 3]),
        "attention_head_dim": rng.choice([12, 16, 20]),
        "in_channels": 2 * width + ratio if adds else width,
        "out_channels": width,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 1,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        **({"image_dim": 24, "added_kv_proj_dim": 0} if sees else {}),
        **({"pos_embed_seq_len": 2 * PICTURE_TOKENS} if kind == "flf" else {}),
        **changed.get("transformer", {}),
    }
    if sees:
        sizes["added_kv_proj_dim"] = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    has_two = kind in ("t2v", "i2v")
    scheduler, config = SAMPLERS[sampler]
    parts = {
        "tokenizer": letters(),
        "text_encoder": UMT5EncoderModel(UMT5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=100)),
        "vae": vae,
        "transformer": _random(WanTransformer3DModel(**sizes)),
        "transformer_2": _random(WanTransformer3DModel(**{**sizes, **changed.get("second", {})})) if has_two else None,
        "scheduler": scheduler(**{**config, **changed.get("scheduler", {})}),
        **({"image_encoder": _encoder(), "image_processor": CLIPImageProcessor(size=20, crop_size=16)} if sees else {}),
    }
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    made: Any = WanPipeline if kind in ("t2v", "one", "ti2v") else WanImageToVideoPipeline
    boundary = changed.get("boundary_ratio", rng.choice([0.3, 0.7, 0.9]) if has_two else None)
    return made(**parts, boundary_ratio=boundary, expand_timesteps=expands)


def photo(seed: int, width: int, height: int) -> Image.Image:
    draws = np.random.default_rng(seed)
    return Image.fromarray(draws.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _vae(rng: random.Random, is_residual: bool, adds: bool, changed: Mapping[str, Any]) -> Any:
    downs = rng.choice([[False, True, True], [True, True], [False, True]])
    width = rng.choice([4, 6, 16])
    draws = torch.Generator().manual_seed(rng.getrandbits(32))
    patch = 2 if is_residual else 1
    sizes = {
        "base_dim": 4,
        "z_dim": width,
        "dim_mult": [1] * (len(downs) + 1),
        "num_res_blocks": 1,
        "temperal_downsample": downs,
        "latents_mean": torch.randn(width, generator=draws).tolist(),
        "latents_std": (torch.rand(width, generator=draws) + 0.5).tolist(),
        "scale_factor_temporal": 2 ** sum(downs),
        "scale_factor_spatial": 2 ** len(downs) * patch,
        **({"is_residual": True, "patch_size": patch, "in_channels": 12, "out_channels": 12} if is_residual else {}),
        **changed,
    }
    return _random(AutoencoderKLWan(**sizes))


def _encoder() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8))


def _random(model: Any) -> Any:
    """Also what begins as nothing."""
    for each in _nothing(model):
        torch.nn.init.normal_(each, std=0.2)
    return model


def _nothing(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (each for each in model.parameters() if not each.any())
