"""Wan step by step against the pipelines of Diffusers on the same modules: latents to 1e-5 of the largest, frames to a level."""

from __future__ import annotations

import random
from dataclasses import replace
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import hooks  # type: ignore[import-untyped]

from helpers import lengths
from helpers.painting import CLOSE, apart
from helpers.wans import KINDS, SAMPLERS, Wan, photo, pipeline, wan
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.options import NOT_SET, Defaults, DiffusersOptions
from omnistage.models.diffusers.placement import MemoryPlan, is_tiled
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.diffusers.wan import WanPainter
from omnistage.models.interface import BadRequest
from omnistage.models.media.terms import BadMedia
from omnistage.models.memory import TensorCache
from omnistage.models.options import LoadOptions

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # Diffusers with NumPy 2.


def size(both: Wan, rng: random.Random) -> dict[str, int]:
    """The size of a small film, with sides that differ where they are small."""
    multiple, limits = both.painter.limits.multiple, both.painter.limits
    sides = (multiple, 2 * multiple) if multiple >= limits.min_side else (2 * multiple, 4 * multiple)
    least = (limits.frames - 1) % limits.frame_multiple + 1
    return {"width": rng.choice(sides), "height": sides[0], "frames": least + limits.frame_multiple * rng.choice([1, 2])}


def plans(both: Wan, seed: int, count: int = 3, pictures: int | None = None) -> list[DrawingPlan]:
    """Plans of one size, but with different words, pictures, seeds, steps and guidance, the first without guidance."""
    rng = random.Random(seed)
    shape, made = size(both, rng), []
    for number in range(count):
        images = rng.randint(*both.painter.limits.images) if pictures is None else pictures
        guidance = 1.0 if not number else rng.uniform(1.5, 6.0)
        asked: dict[str, Any] = {
            "steps": rng.randint(2, 5),
            "guidance_scale": guidance,
            "negative_prompt": "rain" if number == 2 else "",
            "flow_shift": rng.choice([0.0, rng.uniform(1.0, 8.0)]),
            "seed": rng.getrandbits(64),
        }
        if both.painter.limits.second_guidance:
            asked["guidance_scale_2"] = rng.choice([None, 0.0, 1.0, 4.5])
        photos = [photo(seed + 9 * number + n, rng.randint(20, 90), rng.randint(20, 90)) for n in range(images)]
        made.append(both.plan(rng.choice(("a dog", "two cats run", "x")), photos, **asked, **shape))
    return made


def check(both: Wan, plan: DrawingPlan) -> None:
    [canvas] = both.drawn(plan)
    latents, frames = both.published(plan)
    assert apart(both.painter.finished(canvas), latents) <= CLOSE
    made = both.frames(canvas)
    assert made.shape == frames.shape == (plan.frames, plan.height, plan.width, 3)
    assert np.abs(made.astype(int) - frames).max() <= 1


@lengths.drawn_cells(2, "sampler", SAMPLERS)
@lengths.drawn_cells(3, "kind", KINDS)
def test_a_film_is_that_of_the_pipeline(kind: str, sampler: str, seed: int) -> None:
    both = wan(kind, seed, sampler)
    for plan in plans(both, seed, 2):
        check(both, plan)


def test_one_folder_of_ti2v_draws_with_a_picture_and_without(seed: int) -> None:
    both = wan("ti2v", seed)
    (without,), (beside,) = plans(both, seed, 1, pictures=0), plans(both, seed, 1, pictures=1)
    check(both, without)
    check(both, beside)


@lengths.drawn_cells(1, "kind", ["t2v", "i2v"])
@lengths.drawn_cells(2, "boundary", [0.0, 0.5, 1.0, None])
def test_each_expert_has_the_steps_that_the_pipeline_gives_it(kind: str, boundary: float | None, seed: int) -> None:
    both = wan(kind, seed, "euler", boundary_ratio=boundary)
    assert both.painter.limits.second_guidance == (boundary is not None)
    for plan in plans(both, seed):
        check(both, plan)


@pytest.mark.parametrize(("kind", "side", "rate_hz"), [("t2v", 16, 16.0), ("ti2v", 32, 24.0), ("i2v-clip", 16, 16.0)])
def test_what_is_not_asked_for_is_as_published(kind: str, side: int, rate_hz: float, seed: int) -> None:
    vae = {"temperal_downsample": [False, True, True], "dim_mult": [1] * 4, "scale_factor_temporal": 4, "scale_factor_spatial": side // 2}
    both = wan(kind, seed, vae=vae, transformer={"patch_size": (1, 2, 2), "rope_max_seq_len": 1024})
    plan, said = both.plan("a dog", [photo(seed, 832, 480)] * both.painter.limits.images[0]), signature(type(both.pipe).__call__).parameters
    assert (plan.width, plan.height, plan.frames) == tuple(said[name].default for name in ("width", "height", "num_frames"))
    assert (plan.steps, plan.guidance) == (said["num_inference_steps"].default, said["guidance_scale"].default)
    assert (plan.rate_hz, plan.flow_shift, both.painter.limits.multiple) == (rate_hz, 0.0, side)


def test_the_second_scale_of_guidance_alone_turns_none_on(seed: int) -> None:
    both = wan("t2v", seed, "euler", boundary_ratio=0.9)
    shape = size(both, random.Random(seed))
    plan = both.plan("a dog", (), **shape, steps=4, guidance_scale=1.0, guidance_scale_2=7.0, seed=seed)
    assert plan.negative is None
    check(both, plan)


@lengths.drawn_cells(3, "kind", KINDS)
def test_films_together_are_those_alone(kind: str, seed: int) -> None:
    """All at once; each a step later; with guidance and without, with a picture and without where that can be."""
    both = wan(kind, seed)
    asked = plans(both, seed, 4)
    alone = [both.drawn(plan)[0].latents for plan in asked]
    for late in (0, 1):
        for canvas, latents in zip(both.drawn(*asked, late=late), alone, strict=True):
            assert apart(canvas.latents, latents) <= CLOSE


def test_films_of_one_expert_share_a_pass(seed: int) -> None:
    both = wan("ti2v", seed)
    asked = [*plans(both, seed, 2, pictures=0), *plans(both, seed, 2, pictures=1)]
    passes: list[int] = []
    both.pipe.transformer.register_forward_pre_hook(lambda _, __, named: passes.append(len(named["hidden_states"])), with_kwargs=True)
    both.drawn(*(replace(plan, steps=2) for plan in asked), late=0)
    assert passes == [6, 6]  # Two of four have guidance.


@pytest.mark.parametrize("sampler", SAMPLERS)
@lengths.drawn_cells(2, "kind", ["t2v", "ti2v", "i2v"])
def test_a_film_goes_on_after_any_step_with_the_same_bits(kind: str, sampler: str, seed: int) -> None:
    """Also where the other expert has the next one."""
    both = wan(kind, seed, sampler, boundary_ratio=None if kind == "ti2v" else 0.8)
    [plan] = plans(both, seed, 1, pictures=both.painter.limits.images[1])
    plan = replace(plan, steps=5, flow_shift=0.0)
    [whole] = both.drawn(plan)
    groups = set()
    with torch.inference_mode():
        for last in range(1, 5):
            canvas, other = both.begun(plan), both.begun(plan)
            for _ in range(last):
                both.painter.forward([canvas])
                both.painter.advance(canvas)
            state = canvas.sampler.keep(canvas.latents)
            assert len(state.history) <= both.painter.memory.tensors
            both.painter.go_on(other, state)
            groups.add(both.painter.group(other))
            while not other.is_drawn:
                both.painter.forward([other])
                both.painter.advance(other)
            assert torch.equal(other.latents, whole.latents)
    assert len(groups) == (1 if kind == "ti2v" else 2)


# Pictures ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ti2v", "i2v", "i2v-clip"])
def test_a_film_has_the_shape_of_its_picture_where_no_size_is_asked_for(kind: str, seed: int) -> None:
    both = wan(kind, seed)
    limits = both.painter.limits
    for width, height in ((160, 90), (90, 160), (70, 70)):
        plan = both.plan("a dog", [photo(seed, width, height)], frames=limits.frames)
        assert plan.width % limits.multiple == plan.height % limits.multiple == 0
        usual = limits.width * limits.height
        assert 0.8 * usual <= plan.width * plan.height <= 1.1 * usual
        assert abs(plan.width / plan.height - width / height) < 0.3
        asked = both.plan("a dog", [photo(seed, width, height)], width=limits.multiple * 4)
        assert asked.width == limits.multiple * 4 and abs(asked.height - asked.width * height / width) <= limits.multiple / 2


@pytest.mark.parametrize("kind", ["ti2v", "i2v"])
def test_a_picture_of_which_too_large_a_film_would_come_is_refused_before_it_is_resized(kind: str, seed: int) -> None:
    both = wan(kind, seed)
    width = both.painter.limits.multiple * 8
    both.pipe.video_processor.resize = None
    with pytest.raises(BadMedia, match=f"a film of {width}x.* less long"):
        both.plan("a dog", [photo(seed, 1, 9000)], width=width)


def test_two_pictures_of_different_shapes_are_refused_unless_a_size_is_asked_for(seed: int) -> None:
    both = wan("i2v", seed)
    photos = [photo(seed, 90, 60), photo(seed, 60, 90)]
    with pytest.raises(BadRequest, match="two shapes, 90x60 and 60x90: give two of one, or width and height") as refused:
        both.plan("a dog", photos)
    assert refused.value.field == "diffusion.images"
    side = 2 * both.painter.limits.multiple
    check(both, both.plan("a dog", photos, width=side, height=side, frames=size(both, random.Random(seed))["frames"], steps=2))


@pytest.mark.parametrize("kind", ["ti2v", "i2v", "flf"])
def test_pictures_that_are_asked_again_are_encoded_once_for_each_size_and_length(kind: str, seed: int) -> None:
    both = wan(kind, seed)
    encoded: list[Any] = []
    vae = both.pipe.vae
    vae.quant_conv.register_forward_pre_hook(lambda _, given: encoded.append(given))
    [plan] = plans(both, seed, 1, pictures=both.painter.limits.images[1])
    first, again = both.drawn(plan)[0], both.drawn(replace(plan, prompt="another"))[0]
    assert len(encoded) == 1 and first.conditions.images is not None and again.conditions.images is not None
    assert torch.equal(first.conditions.images, again.conditions.images)
    longer = replace(plan, frames=plan.frames + both.painter.limits.frame_multiple)
    both.drawn(longer)
    assert len(encoded) == 2
    [canvas] = both.drawn(plan)
    assert torch.equal(canvas.latents, first.latents)
    check(both, plan)


# Decoding ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t2v", "ti2v"])
def test_films_that_are_decoded_in_turns_are_those_decoded_whole_bit_for_bit(kind: str, seed: int) -> None:
    both = wan(kind, seed)
    canvases = both.drawn(*plans(both, seed, 2))
    vae, whole = both.pipe.vae, []
    with torch.inference_mode():
        for canvas in canvases:
            latents = both.painter.finished(canvas)
            mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
            whole.append(vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0])
        decoding = [both.painter.decoded(both.painter.finished(canvas)) for canvas in canvases]
        frames: list[list[torch.Tensor]] = [[], []]
        for live in zip_longest(*decoding):
            for parts, part in zip(frames, live, strict=True):
                parts += [] if part is None else [part]
    for parts, film in zip(frames, whole, strict=True):
        assert len(parts) > 1 and parts[0].shape[2] == 1
        assert torch.equal(torch.cat(parts, dim=2), film)


def test_a_vae_that_is_elsewhere_is_fetched_before_it_decodes(seed: int) -> None:
    """As its own `decode` does it, where whole models are moved to an accelerator and back."""
    both, fetched = wan("t2v", seed), list[torch.nn.Module]()

    class Fetching(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
            fetched.append(module)
            return arguments, named

    hooks.add_hook_to_module(both.pipe.vae, Fetching())
    [plan] = plans(both, seed, 1)
    [canvas] = both.drawn(plan)
    assert not fetched
    assert len(both.frames(canvas)) == plan.frames
    assert fetched == [both.pipe.vae]


def test_a_film_of_large_frames_is_decoded_whole_in_tiles_where_that_was_chosen(seed: int) -> None:
    """Tiles are of the whole film; so is the first frame."""
    both = wan("t2v", seed)
    chosen = DiffusersOptions(vae_tiling_above=32 * 32)
    options = LoadOptions(Path(), device="cpu", dtype="float32")
    vae = both.pipe.vae
    vae.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32, tile_sample_stride_height=16, tile_sample_stride_width=16)
    vae.disable_tiling()
    plain = vae.decode
    MemoryPlan.of(chosen, options, torch.float32).placed(both.pipe)
    side, frames = 4 * both.painter.limits.multiple, size(both, random.Random(seed))["frames"]
    large, small = (both.plan("a dog", width=each, height=32, frames=frames, steps=1, seed=seed) for each in (side, 32))
    for plan, tiled in ((large, True), (small, False)):
        [canvas] = both.drawn(plan)
        with torch.inference_mode():
            mean, std = both.painter._spread(canvas.latents)
            latents = canvas.latents / (1.0 / std) + mean
            made = torch.cat(list(both.painter.decoded(canvas.latents)), dim=2)
            if tiled:
                assert not torch.equal(made, plain(latents).sample)
                vae.enable_tiling()
            assert torch.equal(made, plain(latents).sample)
            vae.disable_tiling()


@pytest.mark.parametrize("above", [NOT_SET, 1 << 20])
def test_on_a_gpu_films_are_decoded_in_tiles_only_where_that_was_chosen(above: int, seed: int) -> None:
    """Pictures are by default."""
    both, chosen = wan("t2v", seed), DiffusersOptions(vae_tiling_above=above)
    memory = MemoryPlan.of(chosen, LoadOptions(Path(), device="cuda", dtype="float32"), torch.float32)
    memory._tile(both.pipe)
    side = both.painter.pipe.vae_scale_factor_spatial
    large, small = (torch.empty(1, 4, 1, pixels // side, 1024 // side) for pixels in (1056, 1024))
    assert (is_tiled(both.pipe.vae, large), is_tiled(both.pipe.vae, small)) == (above != NOT_SET, False)


# Refusals ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        ("t2v", {"second": {"num_attention_heads": 2}}, ""),  # Settings that steps do not depend on may differ.
        ("t2v", {"second": {"patch_size": (1, 4, 4)}, "transformer": {"patch_size": (1, 2, 2)}}, "patch_size .* give two that go together"),
        ("t2v", {"transformer": {"in_channels": 5}}, "in_channels is 5"),
        ("t2v", {"transformer": {"out_channels": 5}}, "out_channels is 5"),
        ("i2v", {"transformer": {"in_channels": 5}}, "in_channels is 5, and WanImageToVideoPipeline"),
        ("ti2v", {"transformer": {"patch_size": (1, 1, 1)}}, "expand_timesteps is for"),
        ("one", {"boundary_ratio": 0.5}, "transformer_2, which is left out"),
        ("i2v", {"vae": {"scale_factor_temporal": 8}}, "encodes 4 frames together"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(kind: str, changed: dict[str, Any], told: str, seed: int) -> None:
    if not told:
        wan(kind, seed, **changed)
        return
    with pytest.raises(BadCheckpoint, match=told):
        wan(kind, seed, **changed)


def test_a_pipeline_without_its_first_transformer_is_refused(seed: int) -> None:
    pipe = pipeline("t2v", seed)
    pipe.transformer = None
    with pytest.raises(BadCheckpoint, match="transformer is left out"):
        WanPainter(pipe, TensorCache(0), TensorCache(0), Defaults(DiffusersOptions()))


@pytest.mark.parametrize(
    ("kind", "asked", "field", "told"),
    [
        ("one", {"guidance_scale_2": 3.0}, "guidance_scale_2", "knows none"),
        ("one", {"guidance_scale_2": 0.0}, "guidance_scale_2", "knows none"),
        ("t2v", {"guidance_scale_2": float("nan")}, "guidance_scale_2", "takes 0 to 30"),
        ("t2v", {"guidance_scale_2": 31.0}, "guidance_scale_2", "takes 0 to 30"),
        ("t2v", {"guidance_scale_2": -1.0}, "guidance_scale_2", "takes 0 to 30"),
        ("t2v", {"frames": 1 << 20}, "frames", "at most"),
        ("t2v", {"width": 8}, "width", "multiples of"),
        ("t2v", {"begin_s": 1.0}, "begin_s", "knows none"),
        ("t2v", {"sigmas": (1.0, 0.5)}, "sigmas", "takes none"),
        ("t2v", {"images": 1}, "images", "draws from none"),
        ("i2v", {"images": 0}, "images", "edits 1 to 2 pictures, and none came"),
        ("i2v-clip", {"images": 2}, "images", "edits one picture, and 2 came"),
        ("i2v", {"images": 2, "frames": 1}, "frames", "no film from one picture to another"),
        ("flf", {"images": 1}, "images", "edits 2 to 2 pictures, and 1 came"),
        ("ti2v", {"images": 2}, "images", "and 2 came"),
    ],
)
def test_what_no_film_can_be_is_refused(kind: str, asked: dict[str, Any], field: str, told: str, seed: int) -> None:
    both = wan(kind, seed, transformer={"patch_size": (1, 2, 2)})
    images = [photo(seed + n, 40, 40) for n in range(asked.pop("images", both.painter.limits.images[0]))]
    with pytest.raises(BadRequest, match=told) as refused:
        both.plan("a dog", images, **asked)
    assert refused.value.field == f"diffusion.{field}"


def test_a_shift_that_the_scheduler_does_not_know_is_refused(seed: int) -> None:
    both = wan("t2v", seed, scheduler={"use_karras_sigmas": True, "use_flow_sigmas": False})
    with pytest.raises(BadRequest, match="knows none"):
        both.plan("a dog", flow_shift=3.0)
