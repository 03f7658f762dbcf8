"""The file of a toy pipeline that takes its time, or has much to say."""

from __future__ import annotations

from pathlib import Path


def toy_pipeline(
    folder: Path,
    name: str = "toy-of-a-test",
    *,
    interval_s: float = 0,
    length: int = 24,
    samples_per_frame: int = 0,
    thinks: int = 0,
    load_s: float = 0,
) -> str:
    """Its path. interval_s: before each token. length: tokens where the model ends by itself; more are made where a request asks for more.
    samples_per_frame: of sound, for each token; 0: it answers in text alone. thinks: so many of the tokens are thought first.
    load_s: of each stage."""
    thinker = f"interval_s: {interval_s}, length: {length}, thinks: {thinks}, load_s: {load_s}"
    stages = [f"{{kind: thinker, family: toy, options: {{{thinker}}}}}"]
    if samples_per_frame:
        loud = f"options: {{samples_per_frame: {samples_per_frame}, load_s: {load_s}}}"
        stages.append(f"{{kind: talker, family: toy, takes: [hidden], {loud}}}")
        stages.append(f"{{kind: code2wav, family: toy, takes: [codes], {loud}}}")
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {path.stem}\ndescription: Of a test.\ninputs: [text]\noutputs: [{'text, audio' if samples_per_frame else 'text'}]\n"
        f"stages: [{', '.join(stages)}]\ndefaults: {{thinker: {{max_tokens: 256}}}}\n"
    )
    return str(path)
