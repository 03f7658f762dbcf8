"""Letters after a number that look like a unit and are none: iPhone 5s, 8 N Main St, 5m people."""

from __future__ import annotations

import re

from omnistage.models.smol.spoken.form import after, before, table

LASTING = frozenset(
    table("after every within take takes took taking wait waits waited waiting last lasts lasted lasting sleep sleeps slept finished ended")
)
"""Words after which a number of seconds, or a score, is likely."""
_LASTS = re.compile(
    rf"(?:\b(?:in|for|{'|'.join(sorted(LASTING))}|delay|timeout|interval|duration|latency|paused?|runs?|ran|period|limit|exactly|only|just|than|until"
    r"|about|around|nearly|almost|roughly|approximately|maximum|minimum|max|min|mean|median|average|total|by|per|each|additional|extra)"
    r"(?: (?:of|is|was|to|at|by|about|only|just|up to|under|over|less than|more than|another|around|every|the|next|last|first)){0,2}"
    r"|\d ?(?:ms|h|min|m)(?:,| to| and| or| /)?|[=<>≤≥~≈±×:(|]) ?$|\d ?m?s?(?:[-–/]| to )$",
    re.IGNORECASE,
)
_LASTING_THING = re.compile(
    r"[ -](?:later|ago|long|left|remaining|faster|slower|late|early|delay|timeout|limit|interval|clip|video|audio|recording|mark|window"
    r"|pause|break|each|elapsed|per|wait|duration|latency|hold|countdown|timer|rest|sprint|cooldown|total|deadline|exposure|grace|apart"
    r"|of (?:audio|video|speech|sound|silence|music|footage|time|rest|work))\b|/[a-z]| ?(?:,|to|[-–/]) ?\d+(?:\.\d+)? ?(?:ms|min|h|m|s)\b"
)
_OF_MANY = re.compile(r" of (?!audio|video|speech|sound|silence|music|footage|time|rest|work)")
_ONE_THING = re.compile(r"(?:^|\W)an? $", re.IGNORECASE)
_PART_OF_NAME = re.compile(r"[A-Za-z]-?$|\d[x×]$")
_NAME = re.compile(r"(?<![\w.])[A-Za-z][\w.]*(?:-[\w.]+)*-$")
_PLACES = re.compile(
    r"\b(?:bus|route|rte|exit|row|gate|room|rm|seat|section|highway|hwy|train|platform|flight|apartment|apt|suite|building|block|zone|ward"
    r"|grade|class|figure|fig|appendix|door|lane|pier|terminal|tram|stand|stall)\.?(?: no\.?)? $",
    re.IGNORECASE,
)
_STREET = re.compile(
    r"(?: (?:[A-Z][a-z']+|\d+(?:st|nd|rd|th))){0,3} (?:St|Street|Ave|Avenue|Rd|Road|Blvd|Boulevard|Dr|Drive|Ln|Lane|Way)\b"
)
_DIRECTED = re.compile(r" (?:[A-Z][a-z]|\d+(?:st|nd|rd|th)\b)|\.? \d+(?:st|nd|rd|th)\b")
_SHAPED = re.compile(r"[ -](?:shaped?|shirts?|curves?|necks?|junctions?|bones?|intersections?|turns?|bars?)\b")
_MANY = re.compile(
    r" (?:(?:active|new|daily|monthly|weekly|more|unique|paying|registered|young|different|other|happy|free) ){0,2}"
    r"(?:people|users|followers|subscribers|views|viewers|downloads|installs|dollars|euros|pounds|customers|copies|records|rows|lines|tokens"
    r"|parameters|params|requests|inhabitants|residents|citizens|children|adults|women|men|jobs|homes|households|tonnes|barrels|votes|voters"
    r"|students|workers|employees|visitors|tourists|deaths|cases|doses|members|players|streams|plays|likes|files|images|documents|accounts"
    r"|devices|cars|passengers|patients|readers|listeners|words|years|events|messages|queries|transactions|orders|books|songs|samples)\b"
)


def awaits_letter(text: str) -> bool:
    """Whether the letter of a number after this text is no unit: gate 8 N."""
    return bool(_PLACES.search(f"{text[-24:]} "))


def is_many(match: re.Match[str]) -> bool:
    """Whether m after a number means million: 5m people."""
    return match["unit"] == "m" and match.group()[-2].isdecimal() and bool(_MANY.match(match.string, match.end()))


def are_seconds(match: re.Match[str]) -> bool:
    """Whether the whole number before a joined s counts seconds: in 5s, a 30s clip; not iPhone 5s, two 6s."""
    front, rest = before(match, 48), after(match, 24)
    if _PART_OF_NAME.search(front[-3:]) or _OF_MANY.match(rest) or rest[:1] == "'":
        return False
    alone = not front.strip("(\"'“ ") and not rest.strip(".,;:!?)\"'” ")
    return (
        alone
        or bool(_LASTS.search(front))
        or bool(_LASTING_THING.match(rest))
        or bool(_ONE_THING.search(front) and re.match(" [a-z]", rest))
    )


def is_mistaken(match: re.Match[str]) -> bool:
    """Whether the letters after a number that look like a unit are part of a name, a shape or a direction: 8 N Main St."""
    unit, front, rest = match["unit"], before(match, 48), after(match, 48)
    joined = match.group()[len(match["number"]) : len(match["number"]) + 1].isalpha()
    if joined and _NAME.search(front):
        return True
    if len(unit) > 1:
        return False
    if _PLACES.search(front):
        return True
    if joined or not unit.isupper():
        return False
    return bool(_SHAPED.match(rest) or _STREET.match(rest) or (unit in "NW" and _DIRECTED.match(rest)))
