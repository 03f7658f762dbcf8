"""The default family: SmolLM2-135M-Instruct thinks, hibari speaks."""

from __future__ import annotations

from pathlib import Path

from omnistage.models.devices import check_there
from omnistage.models.errors import LoadError
from omnistage.models.interface import StageModel
from omnistage.models.registry import LoadOptions
from omnistage.models.smol.checkpoint import BadCheckpoint, check_folder
from omnistage.models.smol.store import model_directory

MAX_SESSIONS = 64


def check(kind: str, options: LoadOptions) -> None:
    """Raises LoadError for what can be known to be wrong before torch is imported."""
    if options.family:
        raise LoadError(f"smol has no options, {sorted(options.family)} are given")
    if options.path is not None:
        check_folder(options.path / kind, kind)


def load(kind: str, options: LoadOptions) -> StageModel:
    """Load one stage, from `options.path` or from the cache, fetching what is missing there. Raises LoadError."""
    directory = (options.path or model_directory()) / kind
    from safetensors import SafetensorError

    check_there(options.device)
    try:
        return _build(kind, directory, options)
    except LoadError:
        raise
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{directory} is damaged, or of another model: {type(error).__name__}: {error}") from error


def _build(kind: str, directory: Path, options: LoadOptions) -> StageModel:
    sessions = options.max_sessions or MAX_SESSIONS
    if kind == "thinker":
        from omnistage.models.smol.thinker import SmolThinker

        dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        return SmolThinker.from_directory(directory, dtype=dtype, threads=options.threads, max_sessions=sessions)
    if kind == "talker":
        from omnistage.models.smol.talker import SmolTalker

        return SmolTalker.from_directory(directory, threads=options.threads, max_sessions=sessions)
    from omnistage.models.smol.code2wav import SmolCode2Wav

    return SmolCode2Wav.from_directory(directory, threads=options.threads, device=options.device, max_sessions=sessions)
