"""Maps the names of fields that the client library and the stages use to the names that an interface of the gateway uses."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.client.options import CODE2WAV, CONSTRAINTS, DIFFUSION, MEDIA, SAMPLING, TALKER, THINKER, TOP
from omnistage.client.wording import OPTION_OF

SAID = ("request", "text", "verbatim", "messages", "conversation")
"""The library's and the stages' names for the text of a request."""
STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fields_of(text_field: str, others: Mapping[str, str]) -> dict[str, str]:
    """The interface's name of each field that an error of the library may name, by the library's name. text_field: the interface's name of
    the field with the text that is spoken, answered or drawn. others: the interface's name of each further field whose name differs."""
    others = {**dict.fromkeys(SAID, text_field), "pipeline": "model", "outputs": "model", **others}
    options = dict.fromkeys((*TOP, *MEDIA, *THINKER, *SAMPLING, *CONSTRAINTS, *TALKER, *CODE2WAV, *DIFFUSION, *others))
    fields = {name: others.get(name, name) for name in options}
    for field, name in OPTION_OF.items():  # Errors have the full name in the contract, or its last part.
        fields |= dict.fromkeys((field, field.rpartition(".")[2]), others.get(field, others.get(name, name)))
    # If a pipeline lacks a stage altogether, another pipeline has it, so the field to blame is the one that names the pipeline.
    return {**fields, **dict.fromkeys(STAGES, others["pipeline"])}
