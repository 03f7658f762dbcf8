"""The client library's and the stages' names of fields, and the names that an interface gives them instead."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.client.options import CODE2WAV, CONSTRAINTS, DIFFUSION, MEDIA, SAMPLING, TALKER, THINKER, TOP
from omnistage.client.wording import OPTION_OF

SAID = ("request", "text", "verbatim", "messages", "conversation")
STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fields_of(said: str, others: Mapping[str, str]) -> dict[str, str]:
    """The interface's name of each field that an error of the library may name. said: its field of the text that is spoken, answered or
    drawn. others: the interface's name of each further field whose name differs."""
    others = {**dict.fromkeys(SAID, said), "pipeline": "model", "outputs": "model", **others}
    options = dict.fromkeys((*TOP, *MEDIA, *THINKER, *SAMPLING, *CONSTRAINTS, *TALKER, *CODE2WAV, *DIFFUSION, *others))
    fields = {name: others.get(name, name) for name in options}
    for field, name in OPTION_OF.items():  # In its place in the contract, and as a sentence of a stage names it.
        fields |= dict.fromkeys((field, field.rpartition(".")[2]), others.get(field, others.get(name, name)))
    # If a pipeline lacks a stage altogether, another pipeline has it, so the field to blame is the one that names the pipeline.
    return {**fields, **dict.fromkeys(STAGES, others["pipeline"])}
