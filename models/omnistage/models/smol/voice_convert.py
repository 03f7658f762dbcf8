"""Converts the voice: the quantised ONNX graph of hibari-tts becomes the float32 weights of the Talker and Code2Wav. Only this file needs
the package `onnx`. The store runs it once, when it fetches the default model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

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


def read_graph(path: Path) -> Weights:
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
