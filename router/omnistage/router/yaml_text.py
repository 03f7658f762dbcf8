"""Reads YAML that somebody else may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 32


class BadYaml(ValueError):
    """A file cannot be read. The text says why, and names no file."""


class _Loader(yaml.SafeLoader):
    """Takes no aliases, which let a file of some hundred bytes stand for billions of values, and no deep nesting."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {line}: aliases (*NAME) are not taken; write the value out")
        if self._depth >= MAX_DEPTH:
            raise ValueError(f"line {line}: values are nested in more than {MAX_DEPTH} others")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def read_yaml(path: Path) -> Any:
    """The values of a file. Raises OSError and BadYaml."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadYaml(f"this is more than {MAX_BYTES >> 20} MiB")
    try:
        return yaml.load(data, _Loader)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadYaml(f"this is no YAML: {place}{error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise BadYaml("this is no text in UTF-8" if "utf-8" in error.encoding.lower() else f"this is no YAML: {error.reason}") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # also a date that there is not, or a number of a million digits
        raise BadYaml(f"this is no YAML: {' '.join(str(error).split())[:200]}") from None
