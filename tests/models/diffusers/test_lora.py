"""LoRA files: they change what the pipeline of Diffusers would change with them, and what does not fit is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.artists import draw, model_of
from helpers.drawings import checkpoint, writable
from helpers.painting import CLOSE, PipelinePair, apart, pair, pipeline_of
from helpers.stable_diffusion import SIDE, stable_diffusion
from helpers.wans import pipeline, wan
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.lora import METADATA, Lora, add_loras, read_loras
from omnistage.models.reports import LoadError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # of a scheduler's
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),  # of peft, of a second file
]

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


def with_loras(name: str, folder: Path, loras: list[Lora]) -> PipelinePair:
    """A painter with them as they are loaded here, beside the pipeline with them as Diffusers loads them."""
    made, reference = pair(name, folder), pipeline_of(folder)
    add_loras(made.pipe, loras)
    for number, lora in enumerate(loras):
        reference.load_lora_weights(lora.path.parent, weight_name=lora.path.name, adapter_name=f"their_{number}")
    reference.set_adapters([f"their_{number}" for number in range(len(loras))], [lora.scale for lora in loras])
    return replace(made, pipe=reference)


# Parity --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen-image", "z-image"])
def test_pictures_are_those_of_the_pipeline_with_the_same_files(name: str, tmp_path: Path, seed: int) -> None:
    """Alone and together."""
    folder = writable(name, tmp_path / name)
    base = pair(name)
    said = {"r": 3, "lora_alpha": 6, "target_modules": ["to_q"], "init_lora_weights": "pissa"}
    one = random_lora(base.pipe, "transformer", tmp_path / "one.safetensors", seed=seed)
    other = random_lora(base.pipe, "transformer", tmp_path / "other.safetensors", rank=3, seed=seed + 1)
    both = with_loras(name, folder, [Lora(one, 0.5), Lora(other, -0.3)])
    plans = [both.plan("two small houses", steps=3, seed=seed + n, guidance_scale=3.0) for n in range(2)]
    together, alone = both.drawn(*plans), both.drawn(*plans, together=False)
    for plan, joined, single in zip(plans, together, alone, strict=True):
        latents, _ = both.published(plan)
        assert apart(joined.latents, latents) <= CLOSE and apart(single.latents, latents) <= CLOSE
        assert apart(latents, base.drawn(plan)[0].latents) > 1e-2
    scaled = random_lora(base.pipe, "transformer", tmp_path / "scaled.safetensors", rank=3, seed=seed + 1, said=said)
    doubled: Any = load_pipeline(folder, torch.float32)
    add_loras(doubled, [Lora(scaled)])
    layers = [module for module in doubled.transformer.modules() if "lora_0" in getattr(module, "lora_A", {})]
    assert layers and all(layer.scaling["lora_0"] == 2.0 for layer in layers), "alpha over rank"


def test_a_pipeline_of_two_experts_is_told_which_of_them_a_file_changes(tmp_path: Path, seed: int) -> None:
    """As Diffusers changes them by its own option."""
    reference: Any = load_pipeline(checkpoint("wan2.2-t2v"), torch.float32)
    one, two = (random_lora(reference, "transformer", tmp_path / f"{n}.safetensors", seed=seed + n) for n in range(2))
    made: Any = load_pipeline(checkpoint("wan2.2-t2v"), torch.float32)
    for text, told in [(str(one), f"{one}@transformer or {one}@transformer_2"), (f"{one}@transformer,{two}", "two models")]:
        with pytest.raises(LoadError, match=told):
            add_loras(made, read_loras(text))
    with pytest.raises(LoadError, match="has no transformer_2"):
        add_loras(load_pipeline(checkpoint("z-image"), torch.float32), read_loras(f"{one}@transformer_2"))
    add_loras(made, read_loras(f"{one}@transformer=0.5,{two}@transformer_2,{one}@transformer_2=0.2"))
    reference.load_lora_weights(str(tmp_path), weight_name=one.name, adapter_name="a")
    reference.load_lora_weights(str(tmp_path), weight_name=two.name, adapter_name="b", load_into_transformer_2=True)
    reference.load_lora_weights(str(tmp_path), weight_name=one.name, adapter_name="c", load_into_transformer_2=True)
    reference.set_adapters(["a", "b", "c"], [0.5, 1.0, 0.2])
    frames = []
    for pipe in (reference, made, load_pipeline(checkpoint("wan2.2-t2v"), torch.float32)):
        pipe.set_progress_bar_config(disable=True)
        said = {"num_frames": 5, "width": 32, "height": 32, "num_inference_steps": 4, "output_type": "np"}
        frames.append(pipe("a dog", generator=torch.Generator().manual_seed(seed), **said).frames)
    assert np.abs(frames[0] - frames[1]).max() <= CLOSE and np.abs(frames[0] - frames[2]).max() > 1e-3


def test_a_file_for_each_expert_as_wan_publishes_them_is_read_with_its_biases(tmp_path: Path, seed: int) -> None:
    """As Diffusers reads them, and draws with them."""
    sizes: dict[str, Any] = {"transformer": {"patch_size": (1, 2, 2)}, "boundary_ratio": 0.7}
    made, theirs, bare_ones = (wan("t2v", seed, "euler", **sizes) for _ in range(3))
    layers = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
    files = []
    for number, part in enumerate(("high", "low")):
        plain = random_lora(made.pipe, "transformer", tmp_path / f"{part}_plain.safetensors", layers=layers, seed=seed + number)
        files.append(tmp_path / f"{part}_noise.safetensors")
        save_file(of_wan(load_file(plain)), files[-1])
        theirs.pipe.load_lora_weights(
            str(tmp_path), weight_name=files[-1].name, adapter_name=part, **({"load_into_transformer_2": True} if number else {})
        )
    theirs.pipe.set_adapters(["high", "low"], [0.4, 0.7])
    add_loras(made.pipe, read_loras(f"{files[0]}@transformer=0.4,{files[1]}@transformer_2=0.7"))
    plan = made.plan("a dog", width=32, height=32, frames=made.painter.limits.frame_multiple + 1, steps=4, seed=seed)
    theirs.sent[plan.sources] = ()
    [canvas] = made.drawn(plan)
    latents, _ = theirs.published(plan)
    assert apart(canvas.latents, latents) <= CLOSE
    assert apart(latents, bare_ones.drawn(plan)[0].latents) > 1e-3
    biases = [value for name, value in made.pipe.transformer_2.named_parameters() if "lora_B" in name and name.endswith("bias")]
    assert len(biases) == 10 and all(bias.any() for bias in biases)


@pytest.mark.parametrize("name", ["blocks.0.self_attn.norm_q.diff", "time_projection.1.diff_b", "patch_embedding.diff"])
def test_weights_of_a_wan_that_the_loader_leaves_out_are_refused_by_name(name: str, tmp_path: Path, seed: int) -> None:
    """Unless they are nothing."""
    pipe = pipeline("one", seed, transformer={"patch_size": (1, 2, 2)})
    weights = of_wan(load_file(random_lora(pipe, "transformer", tmp_path / "plain.safetensors")))
    file = tmp_path / "a.safetensors"
    save_file(weights | {f"diffusion_model.{name}": torch.ones(7)}, file)
    with pytest.raises(BadCheckpoint, match=re.escape(name)):
        add_loras(pipe, [Lora(file)])
    if name != "patch_embedding.diff":
        save_file(weights | {f"diffusion_model.{name}": torch.zeros(7)}, file)
        add_loras(pipeline("one", seed, transformer={"patch_size": (1, 2, 2)}), [Lora(file)])


async def test_scale_nothing_is_the_base_model_and_each_scale_has_a_revision(tmp_path: Path, seed: int) -> None:
    folder = checkpoint("z-image")
    file = random_lora(pair("z-image").pipe, "transformer", tmp_path / "a.safetensors")
    drawings, revisions = [], []
    for lora in ("", f"{file}=0", str(file)):
        async with model_of(folder, width=64, height=64, steps=2, lora=lora) as model:
            drawings.append((await draw(model, "a hill", seed=seed)).pixels)
            revisions.append(model.info.revision)
            assert ("LoRA" in model.info.settings) == bool(lora)
    base, nothing, whole = drawings
    assert np.array_equal(base, nothing) and not np.array_equal(base, whole)
    assert len(set(revisions)) == 3


async def test_whole_calls_draw_with_it_too(tmp_path: Path, seed: int) -> None:
    folder = stable_diffusion()
    pipe = pipeline_of(folder)
    file = random_lora(pipe, "unet", tmp_path / "a.safetensors")
    encoder = random_lora(pipe, "unet", tmp_path / "b.safetensors", seed=1)
    pipe.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="one")
    pipe.load_lora_weights(tmp_path, weight_name=encoder.name, adapter_name="two")
    pipe.set_adapters(["one", "two"], [1.0, 0.5])
    said = {"num_inference_steps": 2, "width": SIDE, "height": SIDE, "guidance_scale": 7.5}
    expected = np.asarray(pipe("a dog", generator=torch.Generator().manual_seed(seed), **said).images[0])
    async with model_of(folder, steps=2, lora=f"{file},{encoder}=0.5") as model:
        assert np.array_equal((await draw(model, "a dog", seed=seed)).pixels[0], expected)


def both_parts(folder: Path, seed: int) -> Weights:
    """Weights for the UNet and the text encoder of a Stable Diffusion. folder: to save them in."""
    pipe = load_pipeline(stable_diffusion(), torch.float32)
    parts = {"unet": ("to_q", "to_out.0"), "text_encoder": ("q_proj", "out_proj", "fc1")}
    files = [random_lora(pipe, part, folder / f"{part}.safetensors", layers=layers, seed=seed) for part, layers in parts.items()]
    return {name: value for file in files for name, value in load_file(file).items()}


Change = Callable[[Weights], Weights]


def loaded(folder: Path, weights: Weights, file: Path) -> Weights:
    """The changes of a file's weights, which equal those that the loader of Diffusers makes by itself."""
    save_file(weights, file)
    ours, theirs = load_pipeline(folder, torch.float32), load_pipeline(folder, torch.float32)
    add_loras(ours, [Lora(file)])
    theirs.load_lora_weights(file.parent, weight_name=file.name, adapter_name="theirs")
    made, expected = changes(ours), changes(theirs)
    assert made.keys() == expected.keys() and all(torch.equal(made[layer], expected[layer]) for layer in made)
    return made


@lengths.drawn_cells(1, ("spelled", "scale"), [(kohya, 2.0), (old, 1.0), (older, 1.0)], ids=["kohya", "old", "older"])
def test_each_spelling_of_a_file_for_a_unet_and_its_text_encoder_is_read(spelled: Change, scale: float, tmp_path: Path, seed: int) -> None:
    folder = stable_diffusion()
    weights = both_parts(tmp_path, seed)
    if spelled is older:  # which had none of the other layers
        weights = {name: value for name, value in weights.items() if ".fc1." not in name}
    plain, made = (loaded(folder, each, tmp_path / "a.safetensors") for each in (weights, spelled(weights)))
    assert len(made) * 2 == len(weights) and {layer.partition(".")[0] for layer in made} == {"unet", "text_encoder"}
    assert made.keys() == plain.keys() and all(torch.allclose(made[layer], scale * plain[layer]) for layer in made)


@pytest.mark.parametrize("name", ["qwen-image", "z-image"])
def test_each_spelling_of_a_file_for_a_transformer_is_read(name: str, tmp_path: Path, seed: int) -> None:
    folder, file = checkpoint(name), tmp_path / "a.safetensors"
    weights = load_file(random_lora(pair(name).pipe, "transformer", file, seed=seed))
    plain = loaded(folder, weights, file)
    for spelled, scale in ((kohya, 2.0), (of_comfy, 1.0)):
        made = loaded(folder, spelled(weights), file)
        assert made.keys() == plain.keys() and all(torch.allclose(made[layer], scale * plain[layer]) for layer in made)


def test_layers_of_different_scales_are_scaled_as_the_file_says(tmp_path: Path, seed: int) -> None:
    """By Diffusers alone they would all be scaled like most: it does not find those of attention."""
    folder, file = stable_diffusion(), tmp_path / "a.safetensors"
    weights = both_parts(tmp_path, seed)
    plain = loaded(folder, weights, file)
    alphas = {layer: 2.0 + number for number, layer in enumerate(sorted(plain)) if layer.startswith("unet")}
    save_file(kohya(weights, alphas), file)
    pipe = load_pipeline(folder, torch.float32)
    add_loras(pipe, [Lora(file)])
    made = changes(pipe)
    assert len(set(alphas.values())) > 2
    assert all(torch.allclose(made[layer], alphas.get(layer, 8.0) / 4 * plain[layer], atol=1e-4) for layer in plain)
    save_file(kohya(weights, {next(layer for layer in plain if layer.startswith("text_encoder")): 1.0}), file)
    with pytest.raises(BadCheckpoint, match="does not scale layers of CLIPTextModel by what it says, alpha 1, 8"):
        add_loras(load_pipeline(folder, torch.float32), [Lora(file)])


async def test_a_file_beside_the_weights_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = writable("z-image", tmp_path / "z")
    file = random_lora(pair("z-image").pipe, "transformer", folder / "pytorch_lora_weights.safetensors")
    (folder / "other.safetensors").write_bytes(b"damaged")
    pickled, strange = folder / "transformer" / "pytorch_LoRA_weights.bin", folder / "style.safetensors"
    pickled.write_bytes(b"")
    save_file({"lycoris_layers_0_attention_to_q.hada_w1_a": torch.ones(4, 4)}, strange)
    with caplog.at_level(logging.WARNING):
        async with model_of(folder, width=64, height=64, steps=2) as model:
            told = model.info.settings["LoRA beside the weights, without effect"]
    assert f"{file}: to draw with it, give --lora FILE" in told and "--lora FILE" in caplog.text
    assert f"{pickled}: only safetensors are read" in told and f"{strange}: LoHa and LoKr are not read" in told and "other" not in told
    async with model_of(folder, width=64, height=64, steps=2, lora=str(file)) as model:
        assert str(file) not in model.info.settings["LoRA beside the weights, without effect"]


# Refusals ------------------------------------------------------------------------------------------------------------------------------


def elsewhere(weights: Weights) -> Weights:
    """With one layer that the model does not have."""
    return {name.replace(".layers.1.", ".layers.77."): value for name, value in weights.items()}


def halved(weights: Weights) -> Weights:
    """The rank of one side alone."""
    return {name: value if "lora_B" in name else value[:2].contiguous() for name, value in weights.items()}


@lengths.drawn_cells(
    6,
    ("change", "told"),
    [
        (
            lambda weights: {f"other.{name}": value for name, value in weights.items()},
            r"begin with none of transformer\., .*: other\.transf",
        ),
        (bare, r"begin with none of transformer\., .*: context_refiner\.0"),
        (of_peft, r"begin with none of transformer\., .*: base_model\.model\.context_refiner\.0"),
        (elsewhere, "another model"),
        (lambda weights: {name: value[:, :-1].contiguous() for name, value in weights.items()}, "do not fit each other"),
        (halved, r"do not fit each other, .*of 2x64 and .* of 64x4"),
        (lambda weights: {name.replace("lora_", "part_"): value for name, value in weights.items()}, "is no LoRA"),
        (lambda weights: {**weights, "transformer.layers.0.attention.to_q.dora_scale": torch.ones(64, 1)}, r"left out: .*to_q\.dora_scale"),
        (lambda weights: {**weights, "transformer.norm.weight": torch.ones(64)}, r"left out: transformer\.norm\.weight"),
        (lambda weights: {**weights, "transformer.layers.0.attention.to_q.lokr_w1": torch.ones(4, 4)}, "LoKr are not read"),
        (lambda weights: {name: value * torch.nan for name, value in weights.items()}, "not finite"),
        (lambda weights: {name: value.to(torch.float8_e5m2) for name, value in weights.items()}, "F8_E5M2"),
    ],
    ids=["part", "no part", "peft", "no layer", "width", "rank", "names", "lengths", "weight", "kind", "numbers", "packed"],
)
def test_what_does_not_fit_is_refused_by_name(change: Callable[[Weights], Weights], told: str, tmp_path: Path) -> None:
    file = random_lora(pair("z-image").pipe, "transformer", tmp_path / "a.safetensors")
    save_file(change(load_file(file)), file)
    with pytest.raises(BadCheckpoint, match=told) as refused:
        add_loras(load_pipeline(checkpoint("z-image"), torch.float32), [Lora(file)])
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_a_layer_without_one_of_its_sides_is_refused(part: str, side: str, tmp_path: Path) -> None:
    """Peft would draw it at random."""
    file = tmp_path / "a.safetensors"
    weights = both_parts(tmp_path, 0)
    lacking = next(name for name in weights if name.startswith(part) and f".lora_{side}." in name)
    save_file({name: value for name, value in weights.items() if name != lacking}, file)
    with pytest.raises(BadCheckpoint, match=f"is missing: {re.escape(lacking)}; save it anew"):
        add_loras(load_pipeline(stable_diffusion(), torch.float32), [Lora(file)])


def narrower(side: str) -> Change:
    """One side for layers that are one value narrower."""

    def change(weights: Weights) -> Weights:
        names = [name for name in weights if re.search(rf"lora_{side}\.|{'down' if side == 'A' else 'up'}\.", name)]
        return weights | {name: (weights[name][:, :-1] if side == "A" else weights[name][:-1]).contiguous() for name in names}

    return change


def reshaped(weights: Weights) -> Weights:
    return {name: value.flatten() for name, value in weights.items()}


def without(side: str) -> Change:
    """A file of one side alone."""
    sides = {"A": ("lora_B.", ".lora_up."), "B": ("lora_A.", ".lora_down.")}[side]
    return lambda weights: {name: value for name, value in weights.items() if any(one in name for one in sides)}


BROKEN: list[tuple[str, Change, str]] = [
    ("no A", without("A"), r"is missing: \S*context_refiner\S*(A|down)\.weight, "),
    ("no B", without("B"), r"is missing: \S*context_refiner\S*(B|up)\.weight, "),
    ("narrow A", narrower("A"), r"to_q\.lora_A\.weight is for 63 values, and the layer takes 64; is it"),
    ("narrow B", narrower("B"), r"to_q\.lora_B\.weight is for 63 values, and the layer gives 64; is it"),
    ("flat", reshaped, r"do not fit each other, \S*(A|down)\.weight of 256 and \S*(B|up)\.weight of 256; save"),
    ("scale", lambda weights: {**weights, "transformer.norm.alpha": torch.tensor(1.0)}, r"norm\.alpha is not one number, or of a layer"),
    ("scales", lambda weights: {**weights, f"{min(weights).partition('.lora_')[0]}.alpha": torch.ones(3)}, r"alpha is not one number"),
]


@pytest.mark.parametrize("spelled", [kohya, of_comfy, dict], ids=["kohya", "comfy", "peft"])
@pytest.mark.parametrize(("change", "pattern"), [pytest.param(*one[1:], id=one[0]) for one in BROKEN])
def test_a_broken_file_is_refused_in_words_of_ours(change: Change, pattern: str, spelled: Change, tmp_path: Path) -> None:
    """In each spelling the loader of Diffusers, or torch, would stop with an error that is about their own code."""
    file = random_lora(pair("z-image").pipe, "transformer", tmp_path / "a.safetensors")
    save_file(change(spelled(load_file(file))), file)
    with pytest.raises(BadCheckpoint, match=pattern) as refused:
        add_loras(load_pipeline(checkpoint("z-image"), torch.float32), [Lora(file)])
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(alpha: float, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    weights = both_parts(tmp_path, 0)
    save_file(kohya(weights, dict.fromkeys((name.partition(".lora_")[0] for name in weights), alpha)), file)
    with pytest.raises(BadCheckpoint, match=f"by what it says, alpha {alpha}"):
        add_loras(load_pipeline(stable_diffusion(), torch.float32), [Lora(file)])


@pytest.mark.parametrize(
    "said",
    [
        {"r": 1 << 40},
        {"r": 5},
        {"lora_alpha": float("nan")},
        {"target_modules": "(a+)+$"},
        {"rank_pattern": {"(a+)+$": 4}},
        {"use_dora": "x"},
    ],
    ids=str,
)
def test_what_a_file_says_of_itself_is_looked_at(said: dict[str, Any], tmp_path: Path) -> None:
    file = random_lora(pair("z-image").pipe, "transformer", tmp_path / "a.safetensors", said={"r": 4, "lora_alpha": 4, **said})
    with pytest.raises(BadCheckpoint, match="fits none of its weights"):
        add_loras(load_pipeline(checkpoint("z-image"), torch.float32), [Lora(file)])


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"lora": "a.bin"}, "nothing else is read"),
        ({"lora": "missing.safetensors"}, "nothing else is read"),
        ({"lora": "a.safetensors=much"}, "give FILE or FILE=SCALE"),
        ({"lora": "a.safetensors=nan"}, "give FILE or FILE=SCALE"),
        ({"lora": "a.safetensors,a.safetensors=2"}, "each once"),
        ({"lora": "a.safetensors", "storage": "float8_e5m2"}, "exclude each other"),
    ],
)
async def test_options_that_are_none_are_refused(chosen: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        async with model_of(checkpoint("z-image"), **chosen):
            pass


async def test_a_pipeline_that_takes_none_says_so(tmp_path: Path) -> None:
    file = random_lora(pair("z-image").pipe, "transformer", tmp_path / "a.safetensors")
    with pytest.raises(LoadError, match=r"LongCatImagePipeline of diffusers takes none"):
        async with model_of(checkpoint("longcat-image"), lora=str(file)):
            pass


def test_files_and_scales_are_read(tmp_path: Path) -> None:
    strange = tmp_path / "a=1.safetensors"
    strange.touch()
    assert read_loras(f"{strange},b.safetensors=-0.5") == (Lora(strange), Lora(Path("b.safetensors"), -0.5))
    assert read_loras("") == ()
