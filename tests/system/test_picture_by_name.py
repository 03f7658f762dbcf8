"""A picture as someone asks for it in three lines of Python: by the name that its checkpoint has at a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import lengths
from helpers.drawings import writable
from helpers.processes import ProcessFamily

pytestmark = [
    lengths.long_form(
        "models/test_hub.py::test_the_parts_of_a_drawing_model_are_fetched_and_found_again",
        "models/test_hub.py::test_without_a_hub_the_cache_is_used_and_told",
        "client/test_drawing.py::test_generate_draws_where_nothing_else_can_be_done",
        "models/diffusers/test_pipelines.py::test_a_picture_is_that_of_the_pipeline",
        unkept="A client starts a stack that draws by the name of a checkpoint.",
    )
]

SIDE = 64

CAT = """
from omnistage.client import Omni
Omni(model_path="Qwen/Qwen-Image", tensor_parallel_size=1).generate("a photo of a cat wearing a hat").images[0].save("cat_with_hat.png")
"""


def test_the_cat_gets_its_hat(family: ProcessFamily, tmp_path: Path) -> None:
    """By the name of a checkpoint that is in the cache of this user, without a hub."""
    store = tmp_path / "home" / "hub" / "models--Qwen--Qwen-Image"
    commit = "0123456789abcdef" * 2 + "01234567"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(commit)
    (store / "snapshots").mkdir()
    folder = writable("qwen-image", store / "snapshots" / commit)
    (folder / "omnistage.json").write_text(json.dumps({"width": SIDE, "height": SIDE, "steps": 4}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CAT],
        cwd=tmp_path,
        env={**environment, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "cat_with_hat.png") as image:
        assert (image.format, image.size, image.mode) == ("PNG", (SIDE, SIDE), "RGB")
        assert np.asarray(image).std() > 5
    assert family.wait_ended() == []
