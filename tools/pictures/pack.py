"""Puts a trained picture model into the package that carries it, with its defaults for drawing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import typer

from tools.pictures.scenes import COLOURS, KIND_WORDS, KINDS, OTHER_COLOUR_WORDS

PACKAGE = Path(__file__).resolve().parents[2] / "pictures" / "omnistage_pictures" / "coloured-shapes"
DRAWS = {
    "what": f"coloured shapes: {', '.join(KINDS)}",
    "words": {
        "shape": sorted({word for words in KIND_WORDS.values() for word in words}),
        "colour": [*COLOURS, *OTHER_COLOUR_WORDS.values()],
    },
    "lower_case": True,
    "one_size": True,
}
"""The description of what the model draws. In its training captions nearly always had small letters, and a colour for each shape, and all
pictures had one size."""
DEFAULTS = {"width": 128, "height": 128, "steps": 16, "guidance_scale": 1.0, "draws": DRAWS}
"""Defaults for drawing. Size, steps and guidance were chosen by the scores of tools/pictures/score.py."""
OF_A_MACHINE = ("_name_or_path", "is_local", "local_files_only")
"""Keys that are removed from a saved part: the folder from which it was loaded, and how."""


def pack(trained: Path) -> None:
    """Replace the model in the package by the trained one in a folder, and write its defaults for drawing."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(trained, PACKAGE, ignore=shutil.ignore_patterns("training.json"))
    for path in PACKAGE.rglob("*.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict) and any(name in config for name in OF_A_MACHINE):
            for name in OF_A_MACHINE:
                config.pop(name, None)
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (PACKAGE / "omnistage.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(pack)
