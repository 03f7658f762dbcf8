"""By which names the client library and the stages know what an interface calls otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.client.options import CODE2WAV, CONSTRAINTS, DIFFUSION, MEDIA, SAMPLING, TALKER, THINKER, TOP
from omnistage.client.wording import OF_STAGES

STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fields_of(others: Mapping[str, str]) -> dict[str, str]:
    """By a field as an error of the library may call it, that of an interface. others: by what has another name there, its name."""
    options = dict.fromkeys((*TOP, *MEDIA, *THINKER, *SAMPLING, *CONSTRAINTS, *TALKER, *CODE2WAV, *DIFFUSION, *others))
    fields = {name: others.get(name, name) for name in options}
    fields |= {f"{stage}.{name}": others.get(name, name) for stage, names in OF_STAGES.items() for name in names}
    # What a pipeline lacks altogether, another one has.
    return {**fields, **dict.fromkeys(STAGES, others["pipeline"])}
