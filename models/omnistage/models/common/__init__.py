"""The old places, for one more version, from which families of other packages imported before there was `omnistage.models.kit`. The import
of an old module gives the module that has its names now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

PACKAGES = frozenset({"encoders", "speech"})

_PAIRS = """ahead:worker answer:text.answer chat:text.chat checkpoint:checkpoint.files constraint:text.constraint
    encoders.encoder:encoders.encoder encoders.prompt:encoders.prompt encoders.starting:encoders.starting
    encoders.thinker:encoders.thinker engine_model:text.engine_model packed:checkpoint.weights requests:requests
    revision:checkpoint.revision slices:checkpoint.decoder speech.opening:speech.talker speech.schedule:speech.schedule
    speech.talker:speech.talker speech.trial:speech.code2wav thinker:text.thinker tokenizer:text.chat
    weights:checkpoint.weights worker:worker"""
PLACES = MappingProxyType(dict(pair.split(":") for pair in _PAIRS.split()))
"""By old name: the present name, both below `omnistage.models`."""


class OldPlaces(MetaPathFinder, Loader):
    """Finds the modules of PLACES below this package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        old_name = fullname.removeprefix(f"{__name__}.")
        is_package = old_name in PACKAGES
        return ModuleSpec(fullname, self, is_package=is_package) if old_name != fullname and (is_package or old_name in PLACES) else None

    def exec_module(self, module: ModuleType) -> None:
        old_name = module.__name__.removeprefix(f"{__name__}.")
        if old_name in PLACES:
            sys.modules[module.__name__] = import_module(f"omnistage.models.{PLACES[old_name]}")


sys.meta_path.append(OldPlaces())
