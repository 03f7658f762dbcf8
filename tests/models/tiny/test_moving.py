"""Checkpoints of films and sounds with random weights: the same bytes for the same order, what pipelines of diffusers load and draw."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers.models.t5 import T5Tokenizer

from helpers import lengths
from helpers.drawings import MOVING, checkpoint
from helpers.painting import changed
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.tiny.diffusers.moving import MOVING_DESIGNS, SIZES
from omnistage.models.tiny.makers import CheckpointOrder, MakeError, make_tiny

FILMS = [name for name in MOVING if name != "stable-audio"]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of a VAE's of sound


def test_all_of_them_can_be_made() -> None:
    assert set(MOVING) == set(MOVING_DESIGNS)


@pytest.mark.parametrize("name", MOVING)
def test_the_same_order_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_tiny(name, tmp_path / "again", CheckpointOrder())
    make_tiny(name, tmp_path / "other", CheckpointOrder(seed=1))
    assert torch.equal(state, torch.get_rng_state())
    made = _files(checkpoint(name))
    assert made == _files(tmp_path / "again")
    other = _files(tmp_path / "other")
    assert {file for file, digest in made.items() if digest != other[file]} == {file for file in made if file.endswith(".safetensors")}
    assert sum(path.stat().st_size for path in checkpoint(name).rglob("*")) < 4 << 20


@pytest.mark.parametrize("name", MOVING)
def test_the_small_ones_have_a_transformer_of_eight_million_weights(name: str, tmp_path: Path) -> None:
    make_tiny(name, tmp_path / "made", CheckpointOrder(size="small"))
    counts = {path.parent.name: _count(path) for path in (tmp_path / "made").rglob("*.safetensors")}
    assert all(8e6 < count < 9e6 for part, count in counts.items() if part.startswith("transformer"))
    assert counts["vae"] < 3e6 and counts["text_encoder"] < 1e6


def test_a_type_can_be_asked_for_and_another_vocabulary_cannot(tmp_path: Path) -> None:
    make_tiny("wan2.2-t2v", tmp_path / "made", CheckpointOrder(dtype="bfloat16"))
    pipe: Any = load_pipeline(tmp_path / "made", torch.bfloat16)
    assert {part.dtype for part in (pipe.transformer, pipe.transformer_2, pipe.vae, pipe.text_encoder)} == {torch.bfloat16}
    with pytest.raises(MakeError, match="tokenizer 'qwen': a checkpoint of stable-audio can have built"):
        make_tiny("stable-audio", tmp_path / "none", CheckpointOrder(tokenizer="qwen"))


@pytest.mark.parametrize("name", MOVING)
def test_a_word_that_is_known_is_one_token_and_each_prompt_has_its_own(name: str) -> None:
    tokenizer = T5Tokenizer.from_pretrained(checkpoint(name) / "tokenizer", local_files_only=True)
    assert len(tokenizer("a red circle").input_ids) == 4
    texts = ["a cat", "a dog", "two dogs on a red chair, at night", "Übung", "写着"]
    rows = [tuple(tokenizer(text).input_ids) for text in texts]
    assert len(set(rows)) == len(texts) and all(row[-1] == tokenizer.eos_token_id for row in rows)
    assert tokenizer.decode(rows[2], skip_special_tokens=True) == texts[2]


@lengths.drawn_cells(1, "size", ["tiny", "odd"])
@lengths.drawn_cells(2, "name", FILMS)
def test_a_film_depends_on_words_and_seed(name: str, size: str) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(checkpoint(name, size), local_files_only=True)
    first, words, seed, again = (_film(pipe, *of) for of in (("a cat", 0), ("a dog", 0), ("a cat", 1), ("a cat", 0)))
    assert first.shape == (9, 64, 64, 3) and np.array_equal(first, again)
    assert np.abs(first - words).max() > 1e-3 and np.abs(first - seed).max() > 0.1 and first.std((1, 2)).min() > 0.05


@pytest.mark.parametrize("size", ["tiny", "odd"])
def test_one_folder_serves_words_and_a_picture(size: str) -> None:
    words: Any = load_pipeline(checkpoint("wan2.2-ti2v", size), torch.float32)
    pipe = diffusers.WanImageToVideoPipeline(**{part: words.components[part] for part in words.components}, expand_timesteps=True)
    red, blue = (_film(pipe, "a cat", 0, Image.new("RGB", (64, 64), colour)) for colour in ((200, 30, 40), (20, 40, 220)))
    assert np.abs(red[0].mean((0, 1)) - blue[0].mean((0, 1))).max() > 0.05


@pytest.mark.parametrize("name", FILMS)
def test_odd_ones_are_of_other_proportions(name: str) -> None:
    shapes = []
    for size in SIZES:
        pipe: Any = load_pipeline(checkpoint(name, size), torch.float32)
        shapes.append((pipe.vae_scale_factor_spatial, pipe.vae.config.z_dim, pipe.transformer.config.attention_head_dim % 8))
        assert (pipe.config.boundary_ratio is None) == pipe.config.expand_timesteps == (pipe.transformer_2 is None)
    tiny, small, odd = shapes
    assert tiny[:2] == small[:2] and tiny[0] != odd[0] and tiny[1] != odd[1]


@pytest.mark.parametrize("size", ["tiny", "odd"])
def test_sound_has_the_sampler_of_the_published_one_and_is_not_clipped(size: str, tmp_path: Path, seed: int) -> None:
    folder = checkpoint("stable-audio", size)
    assert json.loads((folder / "model_index.json").read_text())["scheduler"] == ["diffusers", "CosineDPMSolverMultistepScheduler"]
    said = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert (said["prediction_type"], said["solver_order"], said["sigma_schedule"]) == ("v_prediction", 2, "exponential")
    keys = ("sigma_min", "sigma_max", "solver_order", "prediction_type", "sigma_schedule")
    config = {key: said[key] for key in keys}
    pipe: Any = load_pipeline(
        changed("stable-audio", tmp_path / "edm", scheduler="EDMDPMSolverMultistepScheduler", config=config, size=size), torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    first, words = (
        pipe(prompt, num_inference_steps=3, audio_end_in_s=1.0, generator=torch.Generator().manual_seed(seed), output_type="np").audios[0]
        for prompt in ("a cat", "a dog")
    )
    channels = 2 if size == "tiny" else 1
    assert first.shape == (channels, pipe.vae.config.sampling_rate) and first.std() > 0.01 and np.abs(first).max() < 1
    assert np.abs(first - words).max() > 1e-3


def _film(pipe: Any, prompt: str, seed: int, image: Image.Image | None = None) -> Any:
    """[frames, height, width, 3], 0 to 1."""
    given: dict[str, Any] = {"prompt_embeds": _embedded(pipe, prompt), "negative_prompt_embeds": _embedded(pipe, "")}
    if isinstance(pipe, diffusers.WanImageToVideoPipeline):
        given["image"] = image or Image.new("RGB", (64, 64), (90, 120, 200))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    return pipe(**given, num_frames=9, width=64, height=64, num_inference_steps=3, generator=generator, output_type="np").frames[0]


def _embedded(pipe: Any, prompt: str) -> torch.Tensor:
    """As the pipelines do it, which want another package to clean what needs no cleaning."""
    tokens = pipe.tokenizer(prompt, padding="max_length", max_length=64, return_tensors="pt")
    with torch.no_grad():
        rows: torch.Tensor = pipe.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    cleared: torch.Tensor = rows * tokens.attention_mask[..., None]
    return cleared


def _files(folder: Path) -> dict[str, str]:
    """Path of each file in the folder -> digest of its bytes."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def _count(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.offset_keys())
