"""Folders of pipelines: what is whole is loaded as Diffusers loads it; of anything else is said what is wrong and where, and none of it is
run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from helpers.drawings import NAMES, checkpoint, writable
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers import folder as folders
from omnistage.models.diffusers.folder import LIBRARIES, load_processor, mute_libraries, read_index

load_pipeline: Callable[[Path, torch.dtype], Any] = folders.load_pipeline
"""Untyped: a pipeline has its parts as attributes, of which its class knows nothing."""

Damage = Callable[[Path], object]

WEIGHTS = "diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder/model.safetensors"
RAN = "a file of a checkpoint was run"


def test_every_pipeline_is_what_diffusers_itself_loads(subtests: pytest.Subtests, capfd: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        with subtests.test(name):
            folder = checkpoint(name)
            found = load_pipeline(folder, torch.float32)
            assert capfd.readouterr() == ("", "")
            parts = read_index(folder).components
            processors = {part: load_processor(folder / part) for part, (_, kind) in parts.items() if kind == "Qwen2VLProcessor"}
            with mute_libraries():
                wanted = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True, **processors)
            assert type(found) is type(wanted) and found.components.keys() == wanted.components.keys() == parts.keys()
            for part, model in found.components.items():
                assert type(model) is type(wanted.components[part])
                if isinstance(model, torch.nn.Module):
                    _assert_equal(model.state_dict(), wanted.components[part].state_dict())
                    assert not model.training


def test_weights_are_of_the_type_that_is_asked_for() -> None:
    pipeline = load_pipeline(checkpoint("z-image"), torch.bfloat16)
    assert {value.dtype for model in _models(pipeline) for value in model.parameters()} == {torch.bfloat16}


def test_shards_are_read_too(tmp_path: Path) -> None:
    folder = writable("z-image", tmp_path / "made")
    _split(folder / "transformer")
    sharded = load_pipeline(folder, torch.float32)
    _assert_equal(sharded.transformer.state_dict(), load_pipeline(checkpoint("z-image"), torch.float32).transformer.state_dict())


@pytest.mark.parametrize("kind", ["Qwen2VLProcessor", "Qwen2_5_VLProcessor", "AutoProcessor"])
def test_processors_of_all_names_and_layouts_are_read(kind: str, tmp_path: Path) -> None:
    folder = writable("longcat-image-edit", tmp_path / "made")
    _edit(folder / "model_index.json", text_processor=["transformers", kind])
    wanted = load_processor(folder / "text_processor")
    shutil.rmtree(folder / "text_processor")
    wanted.save_pretrained(folder / "text_processor")
    assert not (folder / "text_processor" / "preprocessor_config.json").exists()
    found = load_pipeline(folder, torch.float32).text_processor
    assert found.image_processor.to_dict() == wanted.image_processor.to_dict()
    assert found.tokenizer.get_vocab() == wanted.tokenizer.get_vocab() and found.chat_template == wanted.chat_template


def test_a_tokenizer_may_come_as_a_vocabulary_and_merges(tmp_path: Path) -> None:
    folder = writable("z-image", tmp_path / "made")
    (folder / "tokenizer" / "tokenizer.json").unlink()
    text = "A red circle <|im_end|> 写着 <think> it's\n"
    whole = load_pipeline(checkpoint("z-image"), torch.float32).tokenizer(text).input_ids
    assert load_pipeline(folder, torch.float32).tokenizer(text).input_ids == whole


def test_the_libraries_speak_as_before_afterwards() -> None:
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in LIBRARIES]
    load_pipeline(checkpoint("qwen-image"), torch.float32)
    with pytest.raises(ZeroDivisionError), mute_libraries():
        assert all(library.get_verbosity() == logging.CRITICAL for library in LIBRARIES)
        raise ZeroDivisionError
    assert before == [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in LIBRARIES]


def _without_a_weight_of_a_shard(folder: Path) -> None:
    _split(folder / "transformer")
    _weights(folder / "transformer" / "part-1.safetensors", lambda weights: weights.pop(sorted(weights)[0]))


def _pickled(folder: Path) -> None:
    path = folder / "vae" / WEIGHTS
    torch.save(load_file(path), path.with_name("diffusion_pytorch_model.bin"))
    path.unlink()


def _with_more_words(folder: Path) -> None:
    config, name = folder / "text_encoder" / "config.json", "embed_tokens.weight"
    rows = json.loads(config.read_text())["vocab_size"] - 128
    _edit(config, vocab_size=rows, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    _weights(folder / ENCODER, lambda weights: weights.update({name: weights[name][:rows].clone()}))


def _with_shards_elsewhere(folder: Path) -> None:
    _split(folder / "transformer")
    path = folder / "transformer" / f"{WEIGHTS}.index.json"
    table = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": table | {sorted(table)[0]: "../vae/" + WEIGHTS}}))


def _configured(part: str, **values: Any) -> Damage:
    """Edits the config of a part."""
    return lambda folder: _edit(folder / part / "config.json", **values)


def _rewritten(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def _lacking(*files: str) -> Damage:
    def remove(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return remove


DAMAGES: dict[str, tuple[Damage, str]] = {
    "without a weight": (
        lambda folder: _weights(folder / "transformer" / WEIGHTS, lambda weights: [weights.pop(name) for name in sorted(weights)[:5]]),
        r"transformer lacks all_final_layer\S+, all_final_layer\S+, \S+, … \(5 in all\) of a ZImageTransformer2DModel",
    ),
    "without a weight of the encoder": (
        lambda folder: _weights(folder / ENCODER, lambda weights: weights.pop("norm.weight")),
        r"text_encoder lacks norm\.weight of a Qwen3Model",
    ),
    "without a weight of a shard": (
        _without_a_weight_of_a_shard,
        r"part-1\.safetensors lacks \S+, which diffusion_pytorch_model.safetensors.index.json says it has",
    ),
    "with more layers": (_configured("transformer", n_layers=4), r"transformer lacks layers\.2\.\S+, \S+, \S+, … \(\d+ in all\)"),
    "with more layers of the encoder": (
        _configured("text_encoder", num_hidden_layers=5, layer_types=["full_attention"] * 5),
        r"text_encoder lacks layers\.3\.\S+, \S+, \S+, … \(22 in all\)",
    ),
    "with fewer layers": (
        _configured("transformer", n_layers=1),
        r"transformer has more layers than its config\.json wants: layers\.1\.\S+, ",
    ),
    "with fewer layers of the encoder": (
        _configured("text_encoder", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        r"text_encoder has more layers than its config\.json wants: \S*layers\.2\.\S+, ",
    ),
    "with no layers": (
        _configured("transformer", n_layers=0),
        r"transformer has more layers than its config\.json wants: layers\.0\.\S+, ",
    ),
    "wider": (
        _configured("transformer", dim=128, n_heads=4, n_kv_heads=4),
        r"transformer has weights of other shapes than its config\.json wants: \S+ is \[64\], not \[128\], .*in all\)",
    ),
    "with a wider encoder": (
        _configured("text_encoder", intermediate_size=96),
        r"text_encoder has weights of other .*: layers.0.mlp.down_proj.weight is \[32, 64\], not \[32, 96\], ",
    ),
    "cut": (_rewritten(f"vae/{WEIGHTS}", lambda data: data[:-100]), r"vae/diffusion_pytorch_model\.safetensors is damaged"),
    "of no length": (_rewritten(ENCODER, lambda data: b""), r"text_encoder/model\.safetensors is damaged"),
    "pickled": (_pickled, r"vae/diffusion_pytorch_model\.safetensors is missing: weights are read from safetensors only"),
    "without a part": (lambda folder: shutil.rmtree(folder / "tokenizer"), r"/tokenizer is missing"),
    "without a vocabulary": (_rewritten("tokenizer/tokenizer.json", lambda data: b"{"), r"/tokenizer cannot be loaded"),
    "without any words": (
        _lacking(*(f"tokenizer/{file}" for file in ("tokenizer.json", "vocab.json", "merges.txt"))),
        r"tokenizer/vocab\.json is missing, and so is tokenizer\.json",
    ),
    "with more words": (_with_more_words, r"/tokenizer has 824 tokens, and the text encoder knows 704 only"),
    "without a config": (_lacking("scheduler/scheduler_config.json"), r"scheduler/scheduler_config\.json is missing"),
    "with a damaged config": (_rewritten("vae/config.json", lambda data: b'{"block_out_channels": ['), r"vae/config\.json is not JSON"),
    "with values of no sense": (_configured("vae", block_out_channels="many"), r"/vae cannot be loaded"),
    "with code of a hub": (
        _configured("text_encoder", attn_implementation="somebody/kernel"),
        r"text_encoder/config\.json: 'attn_implementation' is 'somebody/kernel'",
    ),
    "with shards elsewhere": (
        _with_shards_elsewhere,
        r"index\.json: '\S+' is in '\.\./vae/\S+', which is no safetensors file beside it",
    ),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused(damage: Damage, named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = writable("z-image", tmp_path / "made")
    damage(folder)
    with pytest.raises(BadCheckpoint, match=named) as caught:
        load_pipeline(folder, torch.float32)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"_class_name": "NoPipeline"}, r"'_class_name' is 'NoPipeline', which is no pipeline"),
        ({"_class_name": "AutoencoderKL"}, r"'AutoencoderKL', which is no pipeline"),
        ({"_class_name": "DiffusionPipeline"}, r"DiffusionPipeline does not draw by itself"),
        ({"_class_name": ["code", "Mine"]}, r"\['code', 'Mine'\], which is no pipeline"),
        ({"_class_name": None}, r"None, which is no pipeline"),
        ({"_class_name": "__builtins__"}, r"which is no pipeline"),
        ({"vae": ["evil", "Vae"]}, r"'vae' is of 'evil': of diffusers and transformers only classes"),
        ({"vae": ["subprocess", "Popen"]}, r"'vae' is of 'subprocess'"),
        (
            {"vae": ["stable_diffusion", "StableDiffusionPipeline"]},
            r"'vae' is 'StableDiffusionPipeline', which is no class of stable_diffusion",
        ),
        ({"vae": ["diffusers", "NoVae"]}, r"'vae' is 'NoVae', which is no class of diffusers"),
        ({"vae": ["diffusers", "DiffusionPipeline"]}, r"'DiffusionPipeline', which is no class of diffusers \S+ that can be a part"),
        ({"vae": ["diffusers", "utils"]}, r"'utils', which is no class"),
        ({"tokenizer": ["transformers", "Trainer"]}, r"'Trainer', which is no class of transformers"),
        ({"tokenizer": ["transformers", "AutoModel"]}, r"'AutoModel', which is no class of transformers"),
        ({"vae": ["diffusers"]}, r"'vae' is \['diffusers'\], not a library and a class"),
        ({"vae": ["diffusers", 7]}, r"not a library and a class"),
        ({"vae": []}, r"not a library and a class"),
        ({"vae": [None, None]}, r"lacks 'vae', which a ZImagePipeline has"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, r"lacks 'scheduler', which a ZImagePipeline has"),
        ({"../vae": ["diffusers", "AutoencoderKL"]}, r"'\.\./vae' is no part of a ZImagePipeline"),
        ({"vae": None}, r"lacks 'vae'"),
    ],
)
def test_an_index_that_names_anything_else_is_refused(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    index = json.loads((checkpoint("z-image") / "model_index.json").read_text()) | values
    if values == {"vae": None}:
        del index["vae"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=named) as caught:
        read_index(tmp_path)
    assert str(tmp_path / "model_index.json") in str(caught.value)


def test_parts_that_may_be_left_out_and_other_values_are_kept(tmp_path: Path) -> None:
    parts: dict[str, list[str | None]] = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", "boundary_ratio": 0.9, **parts}))
    index = read_index(tmp_path)
    assert index.class_name == "WanPipeline"
    assert index.components == {part: tuple(value) for part, value in parts.items() if part != "transformer"}
    assert index.values == {"transformer": None, "transformer_2": None, "boundary_ratio": 0.9}


@pytest.mark.parametrize(("text", "named"), [(None, "is missing"), ("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_an_index_must_be_there_and_whole(text: str | None, named: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=f"model_index.json {named}"):
        read_index(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = writable("z-image", tmp_path / "made")
    code = f"raise SystemExit({RAN!r})\n"
    for part, key in (("tokenizer", "AutoTokenizer"), ("text_encoder", "AutoModel"), ("transformer", "AutoModel")):
        (folder / part / "code.py").write_text(code)
        file = "tokenizer_config.json" if part == "tokenizer" else "config.json"
        _edit(folder / part / file, auto_map={key: ["code.Mine", "code.Mine"] if part == "tokenizer" else "code.Mine"})
    for name in ("pipeline.py", "vae.py", "ZImagePipeline.py", "evil.py"):
        (folder / name).write_text(code)
    load_pipeline(folder, torch.float32)
    _edit(folder / "model_index.json", vae=["evil", "Vae"])
    with pytest.raises(BadCheckpoint, match="of 'evil'"):
        load_pipeline(folder, torch.float32)
    _edit(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"], _class_name=["pipeline", "Mine"])
    with pytest.raises(BadCheckpoint, match="no pipeline"):
        load_pipeline(folder, torch.float32)


def test_the_processor_makes_a_token_of_each_merged_patch() -> None:
    processor: Any = load_processor(checkpoint("qwen-image-edit") / "processor")
    pictures = [Image.fromarray(np.full((56, size, 3), size, np.uint8)) for size in (56, 112)]
    text = "one <|vision_start|><|image_pad|><|vision_end|> and another <|vision_start|><|image_pad|><|vision_end|>"
    batch = processor(text=[text], images=pictures, padding=True, return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    assert batch["pixel_values"].shape == (16 + 32, 3 * 2 * 14 * 14)
    assert (batch["input_ids"] == processor.image_token_id).sum() == (16 + 32) // 4
    assert batch["mm_token_type_ids"].tolist() == (batch["input_ids"] == processor.image_token_id).long().tolist()
    assert processor.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["one  and another "]
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_processor_pads_prompts_as_its_tokenizer_does() -> None:
    folder = checkpoint("longcat-image") / "text_processor"
    texts = ["short", "a longer prompt"]
    batch = load_processor(folder)(text=texts, padding=True, return_tensors="pt")
    wanted = Qwen2Tokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], wanted["input_ids"]) and torch.equal(batch["attention_mask"], wanted["attention_mask"])


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]) for name, value in found.items())


def _models(pipeline: Any) -> list[torch.nn.Module]:
    return [model for model in pipeline.components.values() if isinstance(model, torch.nn.Module)]


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = {name: value.clone() for name, value in load_file(path).items()}
    change(weights)
    path.unlink()
    save_file(weights, path, {"format": "pt"})


def _split(folder: Path) -> None:
    """Make two shards and an index of a part's only file."""
    path = folder / WEIGHTS
    weights = {name: value.clone() for name, value in load_file(path).items()}
    table = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(table.values()):
        save_file({name: value for name, value in weights.items() if table[name] == file}, folder / file, {"format": "pt"})
    path.unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {"total_size": path.name}, "weight_map": table}))
