"""The files that versions of Transformers save of a Qwen2.5-Omni processor, and the prompts that they make with it. Both are kept in files,
for tests that have no other version than ours.

`python -m helpers.saved_versions` in tests/ writes the files anew: it installs each version into a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers import saved_processor
from helpers.saved_processor import EXPECTED
from omnistage.models.tiny.omni import write_settings, write_tokenizer
from omnistage.models.tiny.qwen2_5_omni import DESIGN, PREPROCESSOR, SIZES, config
from omnistage.models.tiny.tokenizer import train

VERSIONS = {
    "4.52.4": ("transformers==4.52.4", "tokenizers==0.21.4", "huggingface_hub==0.34.4"),
    "4.57.6": ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.0"),
    "5.23.0": ("transformers==5.23.0", "tokenizers==0.23.3", "huggingface_hub==2.4.0"),
}
"""With what each needs that others do not have; the rest is that of this environment."""

KEPT = Path(__file__).parents[1] / "models" / "qwen2_5_omni" / "saved"
NOT_READ = {"merges.txt", "vocab.json", "added_tokens.json", "special_tokens_map.json"}
"""The files of a tokenizer beside the one that has all of it."""

Variant = dict[str, Any]
"""The files of a folder by name, JSON as values; EXPECTED is among them."""


def source(folder: Path) -> Path:
    """A folder in the published layout, without weights, with the tokenizer that is trained in place."""
    values = config(SIZES["tiny"], write_tokenizer(folder, train(), DESIGN), "float32")
    write_settings(folder, values, PREPROCESSOR)
    return folder


def saved_by(version: str) -> dict[str, Variant]:
    """By a version that is installed for it: its variants, by name."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "source").mkdir()
        installed, made = base / "installed", base / "made"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
        subprocess.run([*pip, *VERSIONS[version], "torchvision"], check=True, timeout=500)
        subprocess.run(
            [sys.executable, saved_processor.__file__, str(source(base / "source")), str(made)],
            check=True,
            timeout=500,
            env={**os.environ, "PYTHONPATH": str(installed)},
        )
        return {folder.name: read(folder) for folder in sorted(made.iterdir())}


def read(folder: Path) -> Variant:
    texts = {path.name: path.read_text("utf-8") for path in sorted(folder.iterdir()) if path.name not in NOT_READ}
    files: Variant = {name: json.loads(text) if name.endswith(".json") else text for name, text in texts.items()}
    for part in ("talker_config", "token2wav_config"):  # Which have no part in a prompt.
        del files["config.json"][part]
    return files


def write(variant: Variant, folder: Path) -> None:
    for name, content in variant.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")


def kept(version: str) -> dict[str, Variant]:
    """As `saved_by`, from the file. A variant has the files of `published` where it has no others; None: it has none."""
    variants = json.loads((KEPT / f"{version}.json").read_text("utf-8"))
    wholes = {name: {**variants["published"], **changes} for name, changes in variants.items()}
    return {name: {file: content for file, content in whole.items() if content is not None} for name, whole in wholes.items()}


def keep(version: str, variants: dict[str, Variant]) -> None:
    first = variants["published"]
    changes = {
        name: {file: files.get(file) for file in first.keys() | files.keys() if files.get(file) != first.get(file)}
        for name, files in variants.items()
        if files is not first
    }
    made = json.dumps({"published": first, **changes}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    (KEPT / f"{version}.json").write_text(made + "\n", "utf-8")


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for each in VERSIONS:
        keep(each, saved_by(each))
        print(f"{each}: {(KEPT / f'{each}.json').stat().st_size} bytes, {EXPECTED} and all files")
