"""Prints the size of each package beside the size that `tools/budget.json` allows; with `--write` it stores sizes that became smaller.

A number of the table is a decision: a commit that needs a larger one changes it by hand and says why. `tests/house/test_budget.py`
compares.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "budget.json"
GENERATED = "sdk/omnistage/v1/"
MAKER = "`python -m tools.options` makes this file"
"""Words in the first line of the other generated files."""

_VAGUE = """told said made asked given found known begun ended came come taken kept wanted needed then late most least whole usual
    full left here there once again own same like near behind ahead beside now still early lacking spent chosen named heard spoken
    drawn written seen sent lost held meant typed looked counted cut joined fitting going quiet away few many much what who why
    how when where more less such so only alone apart both either neither none nothing further"""
VAGUE = frozenset(_VAGUE.split())
"""Names that say what happened to a value, or how much of it there is, and not what it is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


Size = Counter[str]
"""The size of a package: a number for each of NUMBERS."""
NUMBERS = ("code_lines", "import_lines", "vague_functions", "vague_names", "lone_functions")
"""code_lines: lines of code, without comments, docstrings and blanks. import_lines: those of them that import. vague_functions: functions
that have a parameter or variable with a name of VAGUE. vague_names: functions, attributes, fields and constants with such a name; an
attribute counts at each place where it is set. lone_functions: functions of one statement without docstring whose name stands at one other
place in the source. For tests the last two and import_lines stay 0."""


class SourceFile:
    """The facts of one Python file. path: relative to the root of the repository. code_lines, import_lines: numbers of lines. names: every
    name, with how often it is used or defined. vague_functions, vague_names: how many. small_functions: names of functions of one
    statement."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        # A list that lives only here: the garbage collector would look through the nodes of all files again and again.
        nodes = [*ast.walk(ast.parse(text))]
        functions = [node for node in nodes if isinstance(node, Function)]
        self.code_lines = _code_lines(text, nodes)
        self.import_lines = {line for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for line in _lines_of(node)}
        self.names = Counter(_names(nodes))
        self.vague_functions = sum(map(is_vague, functions))
        self.vague_names = sum(name.strip("_").lower() in VAGUE for node in nodes for name in _defined_names(node))
        self.small_functions = [function.name for function in functions if is_small(function)]

    @property
    def package(self) -> str:
        """The package that the file belongs to; families of models and parts of the SDK are packages of their own."""
        parts = self.path.split("/")[:-1]
        folders = [part for part in parts if part != "omnistage"]
        unique = [*dict.fromkeys(folders)]
        return "/".join(unique[: 2 if unique[0] in ("models", "sdk", "services", "tests") else 1]) or "."

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the tests, of which only the size and the names are counted."""
        return self.path.startswith("tests/")


def _code_lines(text: str, nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers of the lines of code. nodes: of this text."""
    numbered = enumerate(map(str.strip, text.split("\n")), 1)
    lines = {number for number, line in numbered if line and not line.startswith("#")}
    docstrings: set[int] = set()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings |= _lines_of(node)
            case ast.Constant(value=str()) | ast.JoinedStr():
                lines |= _lines_of(node)  # Within a text, blank lines and number signs are code.
    return lines - docstrings


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name at each place where it is used or defined."""
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Constant(value=str(text)) if text.isidentifier():
                yield text


def _lines_of(node: ast.stmt | ast.expr) -> set[int]:
    """The numbers of the lines of a node."""
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def is_vague(function: Function) -> bool:
    """Whether a parameter or a variable of this function, not of one within it, has a name of VAGUE."""
    return any(name.strip("_") in VAGUE for node in _own_nodes(function) for name in _named_values(node))


def _named_values(node: ast.AST) -> Iterator[str]:
    """The names that a node gives to values."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
            yield name


def _defined_names(node: ast.AST) -> Iterator[str]:
    """The names that a node gives to a function, an attribute, the fields of a class, or the constants of a module."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.ClassDef(body=body) | ast.Module(body=body):
            assigned = (target for line in body if isinstance(line, ast.Assign | ast.AnnAssign) for target in ast.walk(line))
            yield from (target.id for target in assigned if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function's parameters and body without those of functions within it."""
    waiting: list[ast.AST] = [function.args, *function.body]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, Function))


def is_small(function: Function) -> bool:
    """Whether a function is one statement without a docstring. Methods that Python calls by itself do not count."""
    (first, *rest) = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return not rest and not is_docstring and not function.name.startswith("__")


def measure(sources: Iterable[SourceFile]) -> dict[str, Size]:
    """The size of each package of these files, by name."""
    files = [*sources]
    uses = sum((file.names for file in files if not file.is_test), Counter[str]())
    sizes: dict[str, Size] = {}
    for file in files:
        size = sizes.setdefault(file.package, Size())
        size.update(code_lines=len(file.code_lines), vague_functions=file.vague_functions)
        if not file.is_test:
            lone_functions = sum(uses[name] == 2 for name in file.small_functions)
            import_lines = len(file.code_lines & file.import_lines)
            size.update(import_lines=import_lines, vague_names=file.vague_names, lone_functions=lone_functions)
    return dict(sorted(sizes.items()))


def all_files(root: Path) -> set[str]:
    """The files that exist and that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return {file for file in listed.stdout.split("\0") if (root / file).is_file()}


def read_sources(root: Path = ROOT) -> list[SourceFile]:
    """The Python files that git knows or would add, without generated ones."""
    paths = sorted(path for path in all_files(root) if path.endswith(".py") and not path.startswith(GENERATED))
    texts = {path: (root / path).read_text(encoding="utf-8") for path in paths}
    return [SourceFile(path, text) for path, text in texts.items() if MAKER not in text.partition("\n")[0]]


def read_table(path: Path | None = None) -> dict[str, Size]:
    """The allowed sizes, by package. path: of the table; None: TABLE."""
    return {package: Size(row) for package, row in json.loads((path or TABLE).read_text(encoding="utf-8")).items()}


def write_table(sizes: Mapping[str, Size], path: Path | None = None) -> None:
    """Store allowed sizes, a line for each package, so that a diff shows each change. path: as in `read_table`."""
    rows = {package: {number: size[number] for number in NUMBERS} for package, size in sorted(sizes.items())}
    lines = [f"{json.dumps(package)}: {json.dumps(row)}" for package, row in rows.items()]
    (path or TABLE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table_text(sizes: Mapping[str, Size], allowed: Mapping[str, Size]) -> str:
    """The measured numbers, each beside the allowed one, for people."""
    titles = [number.replace("_", " ") for number in NUMBERS]
    rows = [["package", *titles]]
    for package, size in sizes.items():
        rows.append([package, *(f"{size[number]} of {allowed.get(package, Size())[number]}" for number in NUMBERS)])
    source = sum((size for package, size in sizes.items() if not package.startswith("tests")), Size())
    sums = ", ".join(f"{source[number]} {title}" for number, title in zip(NUMBERS, titles, strict=True))
    share = 100 * source["import_lines"] / max(1, source["code_lines"])
    lines = [f"{package:24}" + "".join(f"{cell:>24}" for cell in cells) for package, *cells in rows]
    return "\n".join([*lines, f"without tests: {sums}; {share:.1f} % of the code lines import"])


def excesses(sizes: Mapping[str, Size], allowed: Mapping[str, Size]) -> list[str]:
    """A text for each number that is larger than the allowed one."""
    return [
        f"{package}: {number}: {size[number]}, allowed {limit[number]}"
        for package, size in sizes.items()
        for limit in [allowed.get(package, Size())]
        for number in size - limit
    ]


def main(write: bool = False) -> None:
    """Print the sizes. Exit status 1 if a package is larger than the table allows. write: store the numbers that became smaller, and forget
    packages that are gone."""
    sizes, allowed = measure(read_sources()), read_table()
    if write:
        allowed = {package: limit & sizes[package] for package, limit in allowed.items() if package in sizes}
        write_table(allowed)
    print(table_text(sizes, allowed))
    if larger := excesses(sizes, allowed):
        sys.exit("\n".join(larger))


if __name__ == "__main__":
    typer.run(main)
