"""The default family: SmolLM2-135M-Instruct thinks, hibari speaks."""

from __future__ import annotations

from omnistage.models.interface import StageModel
from omnistage.models.registry import LoadOptions
from omnistage.models.smol.store import model_directory

MAX_SESSIONS = 64


def load(kind: str, options: LoadOptions) -> StageModel:
    """Load one stage, from `options.path` or from the cache, fetching what is missing there."""
    directory = options.path or model_directory()
    sessions = options.max_sessions or MAX_SESSIONS
    if kind == "thinker":
        from omnistage.models.smol.thinker import SmolThinker

        dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        return SmolThinker.from_directory(directory / "thinker", dtype=dtype, threads=options.threads, max_sessions=sessions)
    if kind == "talker":
        from omnistage.models.smol.talker import SmolTalker

        return SmolTalker.from_directory(directory / "talker", threads=options.threads, max_sessions=sessions)
    from omnistage.models.smol.code2wav import SmolCode2Wav

    return SmolCode2Wav.from_directory(directory / "code2wav", threads=options.threads, device=options.device, max_sessions=sessions)
