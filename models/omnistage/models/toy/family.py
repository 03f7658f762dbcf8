"""The families of the toys, as data."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.models.family import Family, ModelEntry

_OPTIONS = "omnistage.models.toy.stages:ToyOptions"
"""The options of the toy models, the same for every kind of stage, so that one option can be set for a whole chain."""

TOYS: Mapping[str, Family] = {
    "toy": Family(
        models={
            "thinker": ModelEntry("omnistage.models.toy.stages:load_thinker", options=_OPTIONS),
            "talker": ModelEntry("omnistage.models.toy.stages:load_talker", options=_OPTIONS, voices=("toy",)),
            "code2wav": ModelEntry("omnistage.models.toy.stages:load_code2wav", options=_OPTIONS),
            "diffusion": ModelEntry("omnistage.models.toy.stages:load_diffusion", options=_OPTIONS),
        },
    ),
    "toy-omni": Family(
        models={
            "thinker": ModelEntry("omnistage.models.toy.omni:load_thinker", options="omnistage.models.toy.omni:OmniThinkerOptions"),
            "talker": ModelEntry("omnistage.models.toy.omni:load_talker", options="omnistage.models.toy.omni:OmniOptions"),
            "code2wav": ModelEntry("omnistage.models.toy.omni:load_code2wav", options="omnistage.models.toy.omni:OmniOptions"),
        },
    ),
    "toy-film": Family(
        models={"diffusion": ModelEntry("omnistage.models.toy.film:load_film", options="omnistage.models.toy.film:FilmOptions")},
    ),
}
