"""Constraints that a model which can constrain its text must keep to, and constraints that it must refuse."""

from __future__ import annotations

import json
import re

from omnistage.v1 import stage_pb2

LISTED = ["a", 7, "é", None]
CONSTRAINTS = {
    "json_schema": stage_pb2.Constraint(json_schema=json.dumps({"type": "array", "items": {"enum": LISTED}, "minItems": 2, "maxItems": 3})),
    "regex": stage_pb2.Constraint(regex="(no|yes), [0-9]{3}é?"),
    "choice": stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["left", "le\nft", 'a "b"', "日本"])),
}
"""One of each form; a text that keeps to any of them has 64 tokens at most."""

BAD_CONSTRAINTS = (
    ("json_schema", stage_pb2.Constraint(json_schema="{")),
    ("json_schema", stage_pb2.Constraint(json_schema='{"enum": []}')),
    ("json_schema", stage_pb2.Constraint(json_schema='{"not": {}}')),
    ("json_schema", stage_pb2.Constraint(json_schema="[" * 1000)),
    ("json_schema", stage_pb2.Constraint(json_schema="")),
    ("json_schema", stage_pb2.Constraint(json_schema='{"const": "' + "a" * 65_536 + '"}')),
    ("regex", stage_pb2.Constraint(regex="(a")),
    ("regex", stage_pb2.Constraint(regex="(?=a)b")),
    ("regex", stage_pb2.Constraint(regex="[^\\s\\S]")),
    ("choice", stage_pb2.Constraint(choice=stage_pb2.Choices())),
    ("choice", stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["a", ""]))),
)


def keeps(form: str, text: str) -> bool:
    """Whether a text keeps to the constraint of this form."""
    match form:
        case "json_schema":
            values = json.loads(text)
            return 2 <= len(values) <= 3 and all(value in LISTED for value in values)
        case "regex":
            return re.fullmatch(CONSTRAINTS[form].regex, text) is not None
    return text in CONSTRAINTS[form].choice.texts
