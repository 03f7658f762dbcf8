"""Reads YAML that somebody else may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 256 << 10
MAX_DEPTH = 32
MAX_NODES = 10_000
"""The most values, with the keys of mappings: PyYAML reads some ten thousand a second."""
MAX_DIGITS = 64
"""The most characters of a number. The time to read one in base 60, such as 1:30:00, grows with their square."""
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class BadYaml(ValueError):
    """A file cannot be read. The text says why, and names no file."""


class _Loader(yaml.SafeLoader):
    """Takes no aliases, which let a file of some hundred bytes stand for billions of values, no deep nesting, and no tags."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise BadYaml(f"line {line}: aliases (*NAME) are not taken; write the value out")
        if getattr(event, "tag", None):
            raise BadYaml(f"line {line}: tags (!NAME) are not taken")
        if self._depth >= MAX_DEPTH:
            raise BadYaml(f"line {line}: values are nested in more than {MAX_DEPTH} others")
        if self._nodes >= MAX_NODES:
            raise BadYaml(f"line {line}: these are more than {MAX_NODES} values")
        self._depth += 1
        self._nodes += 1
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and len(node.value) > MAX_DIGITS:
            raise BadYaml(f"line {line}: this number has more than {MAX_DIGITS} characters")
        return node


def read_yaml(path: Path) -> Any:
    """The values of a file. Raises OSError and BadYaml."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadYaml(f"this is more than {MAX_BYTES >> 10} KiB")
    try:
        return yaml.load(data, _Loader)
    except BadYaml:
        raise
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadYaml(f"this is no YAML: {place}{error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise BadYaml("this is no text in UTF-8" if "utf-8" in error.encoding.lower() else f"this is no YAML: {error.reason}") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # also a date that there is not
        raise BadYaml(f"this is no YAML: {' '.join(str(error).split())[:200]}") from None
