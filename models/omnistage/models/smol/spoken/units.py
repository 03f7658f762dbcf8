"""Names of units."""

from __future__ import annotations

import functools
import re

from omnistage.models.smol.spoken.form import alternatives, table

_NAMES = """
km kilometer;cm centimeter;mm millimeter;m meter;dm decimeter;nm nanometer;μm micrometer;um micrometer;kg kilogram;g gram;mg milligram
mcg microgram;μg microgram;ng nanogram;lb pound;lbs pound;oz ounce;ft foot feet;yd yard;mi mile;ml milliliter;mL milliliter;cl centiliter
dl deciliter;dL deciliter;l liter;L liter;hl hectoliter;gal gallon;qt quart;tsp teaspoon;tbsp tablespoon;ha hectare;t ton
Hz hertz hertz;kHz kilohertz kilohertz;MHz megahertz megahertz;GHz gigahertz gigahertz;THz terahertz terahertz;KB kilobyte;kB kilobyte
MB megabyte;GB gigabyte;TB terabyte;PB petabyte;EB exabyte;KiB kibibyte;MiB mebibyte;GiB gibibyte;TiB tebibyte;kb kilobit;Mb megabit
Gb gigabit;kbps kilobit~per~second kilobits~per~second;Kbps kilobit~per~second kilobits~per~second
Mbps megabit~per~second megabits~per~second;Gbps gigabit~per~second gigabits~per~second;mph mile~per~hour miles~per~hour
kph kilometer~per~hour kilometers~per~hour;kmh kilometer~per~hour kilometers~per~hour;rpm revolution~per~minute revolutions~per~minute
bpm beat~per~minute beats~per~minute;fps frame~per~second frames~per~second;ppm part~per~million parts~per~million
ppb part~per~billion parts~per~billion;dpi dot~per~inch dots~per~inch;ppi pixel~per~inch pixels~per~inch
psi pound~per~square~inch pounds~per~square~inch;mpg mile~per~gallon miles~per~gallon;h hour;hr hour;hrs hour;min minute;mins minute
s second;sec second;secs second;ms millisecond;μs microsecond;us microsecond;ns nanosecond;ps picosecond;yr year;yrs year;wk week;wks week
kWh kilowatt~hour;MWh megawatt~hour;GWh gigawatt~hour;TWh terawatt~hour;Wh watt~hour;mAh milliamp~hour;Ah amp~hour;W watt;mW milliwatt
kW kilowatt;MW megawatt;GW gigawatt;TW terawatt;V volt;mV millivolt;kV kilovolt;mA milliamp;μA microamp;kA kiloamp;Ω ohm;kΩ kilohm
MΩ megohm
N newton;kN kilonewton;Nm newton~meter;J joule;kJ kilojoule;MJ megajoule;cal calorie;kcal kilocalorie;eV electron~volt
keV kilo~electron~volt;MeV mega~electron~volt;GeV giga~electron~volt;Pa pascal;kPa kilopascal;hPa hectopascal;MPa megapascal;bar bar
mbar millibar;dB decibel;dBA decibel;lm lumen;mol mole;mmol millimole;px pixel;pt point;MP megapixel;hp horsepower horsepower
cc cubic~centimeter;mSv millisievert;pct percent percent;K kelvin kelvin;T tesla tesla;nF nanofarad;pF picofarad;μF microfarad
Å angstrom;atm atmosphere;Gbit gigabit;Mbit megabit;kbit kilobit;sqft square~foot square~feet;pts point
mmHg millimeter~of~mercury millimeters~of~mercury
"""
_SPECIAL = {
    "sq ft": ("square foot", "square feet"),
    "sq mi": ("square mile", "square miles"),
    "sq m": ("square meter", "square meters"),
    "sq km": ("square kilometer", "square kilometers"),
    "cu ft": ("cubic foot", "cubic feet"),
    "fl oz": ("fluid ounce", "fluid ounces"),
}


def _table() -> dict[str, tuple[str, str]]:
    """By the sign of each unit: its singular and its plural."""
    names = {}
    for line in _NAMES.replace("\n", ";").split(";"):
        if line:
            sign, one, *many = line.split()
            names[sign] = (one.replace("~", " "), (many[0] if many else f"{one}s").replace("~", " "))
    return names


UNITS = _table()
_ATOM = alternatives(UNITS)
_POWER = r"(?:²|³|\^[23]|[23](?!\d))"
UNIT = rf"(?:{alternatives(_SPECIAL)}|(?:{_ATOM}){_POWER}?(?:[/·](?:{_ATOM}){_POWER}?)?)"
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
    if unit in _SPECIAL:
        return _SPECIAL[unit]
    found = _PARTS.fullmatch(unit)
    assert found is not None
    sign, power, between, other, other_power = found.groups()
    kind = f"{_POWERS[power[-1]]} " if power else ""
    one, many = (kind + name for name in UNITS[sign])
    if not other:
        return one, many
    tail = UNITS[other][0]
    if other_power:
        square = other_power[-1] in "2²"
        tail = f"{tail} {'squared' if square else 'cubed'}" if tail == "second" else f"{_POWERS[other_power[-1]]} {tail}"
    if between == "·":
        return f"{one} {tail}", f"{one} {tail}s"
    return f"{one} per {tail}", f"{many} per {tail}"
