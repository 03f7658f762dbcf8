"""Trains the picture model's transformer and text encoder together, by flow matching on the latents of a trained VAE.

The model follows its prompts only with: a VAE that keeps colours (30 dB and more); a weight on the latents of the shapes, since most of a
picture is background; an empty caption for a part of the pictures, for guidance; many phrasings of one scene.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import typer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from tools.pictures.scenes import Scene, caption, draw_scene
from tools.pictures.vae import encode, tensors

VOCABULARY = 512
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern by which Qwen2 cuts text into words before it makes tokens of them."""
WIDTH, LAYERS, HEADS = 128, 4, 4
AXES = (8, 12, 12)
SHIFT = 3.0
"""The shift of the noise levels towards more noise, in training and in drawing."""
NULL = 0.1
"""Share of the pictures whose caption is left out in training."""
SHAPE_WEIGHT = 4.0
EMA = 0.999
SCENES = 24_000


def new_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A tokenizer of bytes that cuts text as Qwen2's does. It is trained on captions: a word of a caption is one token, any other text
    takes more."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([caption(rng, draw_scene(rng)) for _ in range(20_000)], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    loaded = Qwen2Tokenizer(vocab=state["vocab"], merges=merges, model_max_length=512)  # type: ignore[arg-type]
    loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    loaded.chat_template = TEMPLATE
    return loaded


def new_text_encoder(vocabulary: int) -> Qwen3Model:
    """A text encoder to be trained. Its last layer is never used, because pipelines of this form take the hidden rows before it."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
        )
    )


def new_transformer(channels: int) -> ZImageTransformer2DModel:
    """A transformer to be trained. channels: of the latents."""
    return ZImageTransformer2DModel(
        in_channels=channels,
        dim=WIDTH,
        n_layers=LAYERS,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=WIDTH,
        axes_dims=list(AXES),
        axes_lens=[1024, 128, 128],
    )


class PainterNet(nn.Module):
    """Text encoder and transformer, which are trained together."""

    def __init__(self, tokenizer: Qwen2Tokenizer, text_encoder: Qwen3Model, transformer: ZImageTransformer2DModel) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.transformer = transformer

    @classmethod
    def new(cls, channels: int, seed: int) -> PainterNet:
        """Models with random weights. channels: of the latents."""
        tokenizer = new_tokenizer(seed)
        return cls(tokenizer, new_text_encoder(len(tokenizer)), new_transformer(channels))

    @classmethod
    def load(cls, folder: Path) -> PainterNet:
        """The models of a saved pipeline, to be trained further."""
        pipe = ZImagePipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, use_safetensors=True)
        return cls(pipe.tokenizer, pipe.text_encoder.train(), pipe.transformer.train())

    def embeddings(self, captions: list[str]) -> list[Tensor]:
        """The embeddings of captions, [tokens, width] for each, as the pipeline makes them."""
        texts = [self.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) for text in captions]
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        hidden = self.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True).hidden_states[-2]
        return [rows[token_mask.bool()] for rows, token_mask in zip(hidden, tokens.attention_mask, strict=True)]

    def velocity(self, latents: Tensor, sigmas: Tensor, embeddings: list[Tensor]) -> Tensor:
        """The predicted velocity from picture to noise, [n, channels, 16, 16]. latents: noisy, of the same shape. sigmas: [n], their noise
        levels in 0..1. embeddings: of n captions."""
        velocities = self.transformer(list(latents[:, :, None]), 1 - sigmas, embeddings, return_dict=False)[0]
        return -torch.stack(velocities)[:, :, 0].float()


def draw_encoded(vae: AutoencoderKL, rng: random.Random, count: int) -> tuple[list[Scene], Tensor, Tensor]:
    """Random scenes, their latents in the transformer's scale, [count, channels, 16, 16], and weights of the latents, [count, 1, 16, 16],
    which are higher at shapes. Pictures are encoded in bfloat16, which is exact enough."""
    scenes = [draw_scene(rng) for _ in range(count)]
    latents, weights = [], []
    for first in range(0, count, 64):
        part = scenes[first : first + 64]
        pictures, shapes = tensors(part)
        with torch.autocast("cpu", torch.bfloat16):
            codes = encode(vae, pictures).float()
        latents.append((codes - vae.config.shift_factor) * vae.config.scaling_factor)
        weights.append(1 + SHAPE_WEIGHT * functional.max_pool2d(functional.max_pool2d(shapes, 8), 3, 1, 1))
    return scenes, torch.cat(latents), torch.cat(weights)


def batches(rng: random.Random, count: int, size: int) -> Iterator[list[int]]:
    """Yield lists of `size` numbers below `count`, without end: all numbers in random order, again and again."""
    while True:
        order = list(range(count))
        rng.shuffle(order)
        for first in range(0, count - size + 1, size):
            yield order[first : first + size]


def train(
    vae_folder: Path,
    out: Path,
    minutes: float = 80,
    batch: int = 48,
    rate: float = 1.5e-3,
    seed: int = 0,
    begin: Path | None = None,
    threads: int = 1,
) -> None:
    """Train for `minutes` of processor time, and save a running mean of the weights as a pipeline in `out`. batch: number of scenes in one.
    rate: the highest learning rate. begin: a saved pipeline to train further, with its words; None: begin with random weights. threads:
    more than one only on a machine that does nothing else, as their time is added up."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = AutoencoderKL.from_pretrained(vae_folder).eval().to(memory_format=torch.channels_last)
    painter = PainterNet.new(vae.config.latent_channels, seed) if begin is None else PainterNet.load(begin)
    average = copy.deepcopy(painter).requires_grad_(False)
    scenes, latents, weights = draw_encoded(vae, rng, SCENES)
    print(f"{len(scenes)} scenes, latents mean {latents.mean():.3f} std {latents.std():.3f}", flush=True)
    optimizer = torch.optim.AdamW(painter.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    begin_s, step, printed_s, saved_s, losses = time.process_time(), 0, 0.0, 0.0, []
    for numbers in batches(rng, len(scenes), batch):
        done_share = (time.process_time() - begin_s) / 60 / minutes
        if done_share >= 1:
            break
        for group in optimizer.param_groups:
            # The rate rises for 200 steps, and falls along a cosine.
            group["lr"] = rate * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * done_share))
        captions = ["" if rng.random() < NULL else caption(rng, scenes[number]) for number in numbers]
        clean, weight = latents[numbers], weights[numbers]
        level = torch.sigmoid(torch.randn(len(numbers)))  # The noise levels of the pictures: three in ten are uniform, all are shifted.
        level = torch.where(torch.rand(len(numbers)) < 0.3, torch.rand(len(numbers)), level)
        level = SHIFT * level / (1 + (SHIFT - 1) * level)
        noise = torch.randn_like(clean)
        mixed = clean + level[:, None, None, None] * (noise - clean)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = painter.velocity(mixed, level, painter.embeddings(captions))
        loss = (weight * (velocity - (noise - clean)).square()).mean() / weight.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(painter.parameters(), 1.0)
        optimizer.step()
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(painter.parameters()), 1 - min(EMA, step / (step + 10)))
        losses.append(loss.item())
        if time.process_time() - printed_s > 60:
            printed_s = time.process_time()
            print(f"{step} {100 * done_share:.0f}% loss {sum(losses) / len(losses):.4f}", flush=True)
            losses.clear()
        if time.process_time() - saved_s > 600:
            saved_s = time.process_time()
            save(vae, average, out.with_name(out.name + "-part"))
    save(vae, average, out)
    (out / "training.json").write_text(json.dumps({"steps": step, "batch": batch, "cpu_minutes": minutes, "seed": seed}, indent=1) + "\n")


def save(vae: AutoencoderKL, painter: PainterNet, out: Path) -> None:
    """Save the models as a pipeline, in bfloat16."""
    painter = copy.deepcopy(painter)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT)
    parts = (scheduler, copy.deepcopy(vae), painter.text_encoder, painter.tokenizer, painter.transformer)
    ZImagePipeline(*parts).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    typer.run(train)
