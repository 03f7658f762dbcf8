"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from omnistage.models.common.checkpoint import BadCheckpoint


def read_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of the folder. Raises BadCheckpoint."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a complete checkpoint, or none for the family's own default")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library has no narrower class.
        raise BadCheckpoint(f"{path} is damaged: {error}") from error
