"""Makes the default model from the files of two packages, once; the store keeps the result. The packages `gguf` and `onnx` are needed here
alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader


BOS, EOS = 1, 2
"""`<|im_start|>` and `<|im_end|>`."""

_UNUSED = {
    "audio_token_index": 5,
    "image_token_index": 6,
    "video_token_index": 7,
    "audio_start_token_id": 8,
    "audio_end_token_id": 9,
    "vision_start_token_id": 10,
    "vision_end_token_id": 11,
}
"""Special tokens for source code that a chat never holds; they stand for the multimodal tokens that the configuration must name."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""

_WEIGHTS_SHARE = 0.6
"""Share of the conversion's time that reading the weights takes, for progress."""


def convert_thinker(gguf: Path, out: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write SmolLM2-135M-Instruct (a Llama) in the form of a Qwen2.5-Omni Thinker: config.json, generation_config.json, model.safetensors
    (bfloat16), tokenizer.json and tokenizer_config.json into `out`. gguf: SmolLM2-135M-Instruct, any quantisation. out: an existing, empty
    folder. progress: called with 0 to 1. Raises ValueError for a file that is not a Llama, or whose tensors are not a Llama's.

    A Llama layer is a Qwen2 layer whose query, key and value biases are zero, and for plain text the three sections of multimodal rotary
    positions are equal, so the results are the same as the Llama's. The result loads with Transformers'
    `Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained`; audio and vision encoders are present in their smallest form and
    unused."""
    from gguf import GGUFReader

    report = progress or (lambda share: None)
    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise ValueError(f"{gguf.name} holds a {facts.get('general.architecture')!r} model, expected 'llama'")
    weights = _read_weights(reader, facts, lambda share: report(share * _WEIGHTS_SHARE))
    _write_model(facts, weights, out)
    report(0.9)
    _write_tokenizer(facts, out)
    report(1.0)


def _read_weights(reader: GGUFReader, facts: dict[str, Any], report: Callable[[float], None]) -> dict[str, torch.Tensor]:
    """All weights in bfloat16, by their names in Transformers, with zero biases added. facts: the metadata of the file."""
    from gguf.quants import dequantize

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(reader.tensors):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            kind = parts[2]
            if kind in heads:
                values = _undo_interleaving(values, heads[kind])
            name = f"layers.{parts[1]}.{_LAYER_NAMES[kind]}.weight"
            if kind in ("attn_q", "attn_k", "attn_v"):
                weights[name.replace(".weight", ".bias")] = torch.zeros(values.shape[0], dtype=torch.bfloat16)
        else:
            name = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}[tensor.name]
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
        report((index + 1) / len(reader.tensors))
    return weights


def _undo_interleaving(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows [heads * head_size, hidden] of a query or key matrix: llama.cpp stores the two components that a rotation turns
    together next to each other, Transformers half a head apart."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_model(facts: dict[str, Any], weights: dict[str, torch.Tensor], out: Path) -> None:
    """Write the model with these weights of its decoder. facts: the metadata of the GGUF file."""
    from transformers import GenerationConfig, Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    hidden = facts["llama.embedding_length"]
    turning = facts["llama.rope.dimension_count"] // 2
    time_section = turning // 4
    height_section = (turning - time_section) // 2
    text = {
        "vocab_size": weights["embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": facts["llama.rope.freq_base"],
            "mrope_section": [time_section, height_section, turning - time_section - height_section],
        },
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    audio = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]}
    settings: dict[str, Any] = {
        "text_config": text,
        "audio_config": audio | {"output_dim": hidden},
        "vision_config": vision | {"out_hidden_size": hidden},
        "tie_word_embeddings": True,
        "dtype": torch.bfloat16,
        **_UNUSED,
    }
    config = Qwen2_5OmniThinkerConfig(**settings)
    # The unused encoders get fixed numbers, so that two conversions give the same file.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5OmniThinkerForConditionalGeneration(config).bfloat16()
    model.model.language_model.load_state_dict(weights, strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS)  # type: ignore[no-untyped-call]
    disable_progress_bar()  # type: ignore[no-untyped-call]  # The caller shows its own progress.
    model.save_pretrained(out)


def _write_tokenizer(facts: dict[str, Any], out: Path) -> None:
    """Write the files of the tokenizer. facts: the metadata of the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # The two steps that the file calls "smollm": every digit alone, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[BOS],
        "eos_token": tokens[EOS],
        "pad_token": tokens[EOS],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The voice ---------------------------------------------------------------------------------------------------------------------------


GraphWeights = dict[str, NDArray[np.float32]]

TALKER = ("pn.", "m.text.")
DECODER = ("m.dec", "m.head.")


def convert_voice(graph: Path, vocabulary: Path, talker: Path, code2wav: Path) -> None:
    """Write config.json and model.safetensors of both stages into the existing empty folders. graph: `hibari/assets/hibari.onnx`.
    vocabulary: `hibari/assets/vocab.json`, phoneme letter -> id. Raises ValueError if the graph has unexpected weights."""
    from safetensors.numpy import save_file

    weights = read_graph(graph)
    source = hashlib.sha256(graph.read_bytes()).hexdigest()
    symbols = json.loads(vocabulary.read_text(encoding="utf-8"))
    voice = {"heads": 2, "embeddings": len(weights["m.text.emb.weight"]), "symbols": symbols}
    parts = {
        talker: (TALKER, {"model_type": "hibari-talker", "source_sha256": source, **voice}),
        code2wav: (DECODER, {"model_type": "hibari-code2wav", "source_sha256": source}),
    }
    for folder, (prefixes, config) in parts.items():
        tensors = {_own_name(name): value for name, value in weights.items() if name.startswith(prefixes)}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    unused = [name for name in weights if not name.startswith(TALKER + DECODER)]
    if unused:
        raise ValueError(f"{graph.name} holds weights that belong to neither stage: {unused[:5]}. Fetch the pinned version of the package.")


def read_graph(path: Path) -> GraphWeights:
    """All weights of the graph as float32 under their training names. Matrices that were quantised to int8 are put back to [out, in]."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {name: np.array(value, np.float32) for name, value in stored.items() if name.startswith(("m.", "pn."))}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "MatMulInteger":
            continue
        quantised, zero = stored[node.input[1]], stored[node.input[3]]
        scale = stored[node.input[1].replace("_quantized", "_scale")]
        matrix = (quantised.astype(np.float32) - zero.astype(np.float32)) * scale
        # A matrix has no name, but the bias that is added to its product has a name: MatMulInteger > Cast > Mul (scales) > Add
        # (bias).
        product = node
        for _ in range(3):
            product = readers[product.output[0]][0]
        bias = next(name for name in product.input if name in weights)
        weights[bias.replace("bias", "weight")] = np.ascontiguousarray(matrix.T)
    return weights


def _own_name(name: str) -> str:
    """The name of a weight in its stage: names of the decoder lose "m.", because Code2Wav has nothing but the decoder."""
    return name.removeprefix("m.") if name.startswith(DECODER) else name
