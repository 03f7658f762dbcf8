"""Checks of an answer against OpenAI's published interface document. The document is no part of this repository: a variable says where it
lies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

VARIABLE = "OMNISTAGE_OPENAI_DOCUMENT"
BASE = "https://document.example.com/"


class Document:
    """Judges by its schemas. Nothing is looked up anywhere else."""

    def __init__(self, path: Path) -> None:
        self._whole = json.loads(path.read_text())
        self._registry = jsonschema_rs.Registry([(BASE, self._whole)], draft=jsonschema_rs.Draft202012)
        self._validators: dict[str, jsonschema_rs.Draft202012Validator] = {}

    def check(self, value: object, schema: str) -> None:
        """Raises AssertionError, which names each fault of a value by the schema of this name, as the document has it."""
        assert schema in self._whole["components"]["schemas"], f"the document has no {schema}"
        self._check(value, f"#/components/schemas/{schema}")

    def check_answer(self, value: object, path: str, method: str = "post", media_type: str = "application/json") -> None:
        """The same, for an answer, or an event of a stream, of an endpoint: `check_answer(body, "/chat/completions")`."""
        assert media_type in self._whole["paths"][path][method]["responses"]["200"]["content"], f"{method} {path} gives no {media_type}"
        place = "/".join(part.replace("~", "~0").replace("/", "~1") for part in ("paths", path, method))
        media = media_type.replace("/", "~1")
        self._check(value, self._of_its_kind(value, f"#/{place}/responses/200/content/{media}/schema"))

    def fields(self, schema: str) -> set[str]:
        """The names of all fields that the schema of this name has, in any of its forms."""
        return self._fields({"$ref": f"#/components/schemas/{schema}"})

    def _fields(self, schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            schema = self._at(schema["$ref"])
        forms = [form for kind in ("allOf", "anyOf", "oneOf") for form in schema.get(kind, ())]
        return set(schema.get("properties", ())).union(*map(self._fields, forms))

    def _of_its_kind(self, value: object, pointer: str) -> str:
        """Says what is wrong by the schema that has the type of this event, among the schemas of all events."""
        schema = self._at(pointer)
        while "$ref" in schema:
            pointer = schema["$ref"]
            schema = self._at(pointer)
        kind = value.get("type") if isinstance(value, dict) else None
        known = [one["$ref"] for one in schema.get("anyOf", ()) if "$ref" in one]
        return next((one for one in known if kind in self._at(one).get("properties", {}).get("type", {}).get("enum", ())), pointer)

    def _at(self, pointer: str) -> Any:
        found = self._whole
        for part in pointer.removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found

    def _check(self, value: object, pointer: str) -> None:
        if pointer not in self._validators:
            self._validators[pointer] = jsonschema_rs.Draft202012Validator({"$ref": BASE + pointer}, registry=self._registry, offline=True)
        faults = [f"{error.instance_path}: {error.message[:500]}" for error in self._validators[pointer].iter_errors(value)]
        assert not faults, f"{pointer}: {faults}"


@cache
def document() -> Document:
    """The one that the variable names. A test that asks for it is skipped where it names none."""
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no file: OpenAI's published document is not here")
    return Document(Path(path))


def is_here() -> bool:
    """For a test that shows more than what the document says."""
    return bool(os.environ.get(VARIABLE))


def events_of(body: str) -> Iterator[tuple[str, Any]]:
    """The server-sent events of a whole stream: name, "" where it has none, and data, as JSON but for the last line [DONE]."""
    for block in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields:
            data = fields["data"]
            yield fields.get("event", ""), data if data == "[DONE]" else json.loads(data)
