"""By which names the client library and the stages know what an interface calls otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.client.options import CODE2WAV, CONSTRAINTS, DIFFUSION, MEDIA, SAMPLING, TALKER, THINKER, TOP
from omnistage.client.wording import OPTION_OF

SAID = ("request", "text", "verbatim", "messages", "conversation")
STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fields_of(said: str, others: Mapping[str, str]) -> dict[str, str]:
    """By a field as an error of the library may call it, that of an interface. said: its field of what is said, or to be drawn. others: by
    what else has another name there, its name."""
    others = {**dict.fromkeys(SAID, said), "pipeline": "model", "outputs": "model", **others}
    options = dict.fromkeys((*TOP, *MEDIA, *THINKER, *SAMPLING, *CONSTRAINTS, *TALKER, *CODE2WAV, *DIFFUSION, *others))
    fields = {name: others.get(name, name) for name in options}
    for field, name in OPTION_OF.items():  # In its place in the contract, and as a sentence of a stage names it.
        fields |= dict.fromkeys((field, field.rpartition(".")[2]), others.get(field, others.get(name, name)))
    # What a pipeline lacks altogether, another one has.
    return {**fields, **dict.fromkeys(STAGES, others["pipeline"])}
