"""Writes the files of options and settings from the contract and from LoadOptions, by the templates in tools/templates, and the tables of
docs/client.md from the client's descriptions. With --check it changes nothing, and exits with 1 if one of them is stale."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import typer
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from omnistage.models.options import SETTING_ABOUT, LoadOptions
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings
from omnistage.v1 import omni_pb2, options_pb2
from omnistage.wire.fields import descriptor_of, rule_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "client.md"
MODULES = (
    *("sdk/omnistage/client/call_options.py", "sdk/omnistage/client/stage_settings.py", "sdk/omnistage/client/omni_calls.py"),
    *("sdk/omnistage/cli/make/typed_fields.py", "sdk/omnistage/cli/stack/typed_settings.py", "models/omnistage/models/drawing_options.py"),
)
"""The files that are made; each has a template of its name."""

TYPES = {
    FieldDescriptor.TYPE_STRING: "str",
    FieldDescriptor.TYPE_ENUM: "str",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_UINT32: "int",
    FieldDescriptor.TYPE_UINT64: "int",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "float",
}
MESSAGE_TYPES = {"Media": "ImageLike", "Choices": "Sequence[str]"}
FURTHER_TYPES = {"stop": "str | {}", "json_schema": "{} | Mapping[str, Any]"}
"""The types that the client takes, by the type of the field."""


NO_CALLS = ("__init__", "as_client", "generate")
"""Methods of AsyncOmni that the client that blocks has in a form of its own."""


@dataclass(frozen=True)
class Option:
    """A field of the contract that people set by itself. place: the path of its message in a request."""

    place: str
    field: FieldDescriptor

    @property
    def rule(self) -> options_pb2.About:
        return rule_of(self.field)

    @property
    def name(self) -> str:
        """Its name in programs."""
        return self.rule.option or self.field.name

    @property
    def is_map(self) -> bool:
        return self.field.message_type is not None and bool(self.field.message_type.GetOptions().map_entry)

    @property
    def kind(self) -> str:
        """Its type, as Python writes it."""
        if self.is_map:
            return "Mapping[str, Any]"
        plain = self.element if self.field.message_type is None else MESSAGE_TYPES[self.field.message_type.name]
        return FURTHER_TYPES.get(self.field.name, "{}").format(f"Sequence[{plain}]" if self.field.is_repeated else plain)

    @property
    def element(self) -> str:
        """The type of one element; empty for a message."""
        return TYPES.get(self.field.type, "")

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.rule.words, *self.rule.such_as)

    @property
    def bounds(self) -> list[float]:
        """The bounds of a number: none, the smallest, or both. A field of 64 bits is bounded by what it holds."""
        if not self.rule.HasField("min") or self.words:
            return []
        number = int if self.element == "int" else float
        if self.field.type == FieldDescriptor.TYPE_UINT64:
            return [number(self.rule.min), 2**64 - 1]
        return [number(self.rule.min), number(self.rule.max)] if self.rule.HasField("max") else [number(self.rule.min)]

    @property
    def http(self) -> dict[str, str]:
        return {endpoint.name: name for endpoint, name in self.rule.http.ListFields()}

    @property
    def never_zero(self) -> bool:
        """Whether 0 is no value: it means that a field without presence is absent, and its bounds exclude it."""
        is_number = self.element in ("int", "float") and not self.field.has_presence and not self.field.is_repeated
        return is_number and bool(self.words or self.rule.min > 0 or self.rule.above_min)


def options(message: Descriptor, place: str = "") -> Iterator[Option]:
    """Yield the options of a message, then those of the messages in it. place: the path of the message in a request."""
    inner = list[Option]()
    for field in message.fields:
        if rule_of(field).text:
            yield Option(place, field)
        elif field.message_type is not None and not field.is_repeated and field.message_type.file.package == "omnistage.v1":
            inner.extend(options(field.message_type, f"{place}.{field.name}".removeprefix(".")))
    yield from inner


def calls() -> Iterator[dict[str, Any]]:
    """Yield the parts of the definition of each call of AsyncOmni that the client that blocks has in the same form."""
    tree = ast.parse((ROOT / "sdk" / "omnistage" / "client" / "async_omni.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.decorator_list or node.name in NO_CALLS:
            continue
        decorator, named = ast.unparse(node.decorator_list[0]), [f"{each.arg}={each.arg}" for each in node.args.kwonlyargs]
        if decorator.startswith(("takes_options", "explain_calls")):
            yield {
                "name": node.name,
                "decorator": decorator,
                "parameters": ast.unparse(node.args),
                "result": ast.unparse(node)
                .partition(" -> ")[2]
                .partition(":\n")[0]
                .replace("AsyncGenerator[Event, ", "Generator[Event, None, "),
                "text": ast.get_docstring(node, clean=False),
                "is_async": isinstance(node, ast.AsyncFunctionDef),
                "arguments": [*(each.arg for each in node.args.args[1:]), *named, *(["**options"] if node.args.kwarg else [])],
            }


def modules() -> dict[Path, str]:
    """The texts of the files that are made, by path."""
    loader = FileSystemLoader(ROOT / "tools" / "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters |= {"repr": repr, "clause": lambda text, ends: re.split(ends, text)[0].rstrip(".")}
    found = [option for option in options(descriptor_of(omni_pb2.GenerateRequest)) if option.place != "talker.sampling"]
    if len({option.name for option in found}) < len(found):
        raise ValueError(f"two options have one name: {sorted(option.name for option in found)}")
    hints = get_type_hints(LoadOptions)
    kinds = {name: next(kind for kind in (*get_args(hints[name]), hints[name]) if isinstance(kind, type)) for name in SETTING_ABOUT}
    servers = {
        name: field
        for kind in (StageSettings, RouterSettings)
        for name, field in kind.model_fields.items()
        if dict(cast(Mapping[str, Any], field.json_schema_extra or {})).get("is_of_stack")
    }
    values = {
        "options": found,
        "settings": SETTING_ABOUT,
        "kinds": {name: kind.__name__ for name, kind in kinds.items()},
        "servers": servers,
        "calls": [*calls()],
    }
    made = {ROOT / path: environment.get_template(f"{Path(path).name}.jinja").render(values) for path in MODULES}
    return {path: _formatted(text, path) for path, text in made.items()}


def _formatted(text: str, path: Path) -> str:
    command = [str(Path(sys.executable).parent / "ruff"), "format", "--stdin-filename", str(path), "-"]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def table(head: str, annotations: Mapping[str, Any]) -> str:
    """A table of Markdown with a row for each keyword. head: the title of its first column. annotations: by keyword, its type with the
    description."""
    from omnistage.client.about import keywords

    rows = [
        (f"`{one.name}`", f"`{one.type_text}`", one.about.allowed_text, one.about.default, one.about.meaning)
        for one in keywords(annotations)
    ]
    lines = [(head, "type", "values", "default", "meaning"), ("---",) * 5, *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def fresh(page: str) -> str:
    """The text of the page with fresh tables. Raises ValueError if the page lacks a table, or has it twice."""
    from omnistage.client import options

    groups = {  # By the first words of their heads.
        "every call": options.EVERY_CALL,
        "media": options.MEDIA,
        "text": (*options.THINKER, *options.CONSTRAINTS, *options.SAMPLING),
        "speech": (*options.TALKER, *options.CODE2WAV),
        "pictures": options.DIFFUSION,
    }
    tables = {f"of {group}": {name: options.OPTIONS[name] for name in names} for group, names in groups.items()}
    for head, table_text in {**tables, "setting": options.SETTINGS}.items():
        before = re.findall(rf"^\| {head} \|.*\n(?:\|.*\n)*", page, re.MULTILINE)
        if len(before) != 1:
            raise ValueError(f"docs/client.md has {len(before)} tables that begin with {head!r}, and should have one")
        page = page.replace(before[0], table(head, table_text))
    return page


def main(check: bool = False) -> None:
    """Write all of them. check: compare only."""
    page, made = PAGE.read_text(encoding="utf-8"), modules()
    if check:
        stale = page != fresh(page) or any(path.read_text(encoding="utf-8") != text for path, text in made.items())
        sys.exit("stale options. Run: make protos" if stale else 0)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    PAGE.write_text(fresh(page), encoding="utf-8")  # Imports what was just written.


if __name__ == "__main__":
    typer.run(main)
