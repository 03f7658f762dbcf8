"""Names of units."""

from __future__ import annotations

import functools
import re

from omnistage.models.smol.spoken.form import alternatives, table
from omnistage.models.smol.spoken.tables import read_rows

UNITS = {sign: (one, many) for sign, one, many in read_rows("units.tsv")}
"""By the sign of each unit: its singular and its plural."""
_ATOM = alternatives(sign for sign in UNITS if " " not in sign)
_SPACED = alternatives(sign for sign in UNITS if " " in sign)
_POWER = r"(?:²|³|\^[23]|[23](?!\d))"
UNIT = rf"(?:{_SPACED}|(?:{_ATOM}){_POWER}?(?:[/·](?:{_ATOM}){_POWER}?)?)"
"""A pattern for a unit after a number."""
_SHORT_LONE = table("km cm mm kg kW μm μg μs mph kph mpg rpm fps dpi ppi bpm psi")
LONE = frozenset(sign for sign in UNITS if len(sign) > 2 and not sign.islower() and sign not in ("MeV", "GeV")) | frozenset(_SHORT_LONE)
LONE_UNIT = rf"(?:(?:{_ATOM})/(?:{_ATOM}){_POWER}?|(?:[kcm]?m|ft|mi)[²³]|{alternatives(LONE)})"
"""A pattern for a unit that needs no number before it."""
_PARTS = re.compile(rf"({_ATOM})({_POWER})?(?:([/·])({_ATOM})({_POWER})?)?")
_POWERS = {"2": "square", "²": "square", "3": "cubic", "³": "cubic"}


@functools.lru_cache(maxsize=512)
def unit_names(unit: str) -> tuple[str, str]:
    """The singular and the plural of a unit: "m/s²" as "meter per second squared" and "meters per second squared"."""
    if unit in UNITS:
        return UNITS[unit]
    match = _PARTS.fullmatch(unit)
    assert match is not None
    sign, power, between, other, other_power = match.groups()
    kind = f"{_POWERS[power[-1]]} " if power else ""
    one, plural_name = (kind + name for name in UNITS[sign])
    if not other:
        return one, plural_name
    tail = UNITS[other][0]
    if other_power:
        square = other_power[-1] in "2²"
        tail = f"{tail} {'squared' if square else 'cubed'}" if tail == "second" else f"{_POWERS[other_power[-1]]} {tail}"
    if between == "·":
        return f"{one} {tail}", f"{one} {tail}s"
    return f"{one} per {tail}", f"{plural_name} per {tail}"
