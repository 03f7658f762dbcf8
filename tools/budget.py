"""Prints the size of each package beside the size that `tools/budget.json` allows; with `--write` it stores sizes that became smaller.

A number of the table is a decision: a commit that needs a larger one changes it by hand and says why. `tests/house/test_budget.py`
compares.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "budget.json"
GENERATED = "sdk/omnistage/v1/"

_VAGUE = """told said made asked given found known begun ended came come taken kept wanted needed then late most least whole usual
    full left here there once again own same like near behind ahead beside now still early lacking spent chosen named heard spoken
    drawn written seen sent lost held meant typed looked counted cut joined fitting going quiet away few many much what who why
    how when where more less such so only alone apart both either neither none nothing further"""
VAGUE = frozenset(_VAGUE.split())
"""Names that say what happened to a value, or how much of it there is, and not what it is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class PackageSize:
    """The size of a package. code_lines: lines of code, without comments, docstrings and blanks. import_lines: those of them that import.
    vague_functions: functions that have a parameter or variable with a name of VAGUE. vague_names: functions, attributes, fields and
    constants with such a name; an attribute counts at each place where it is set. lone_functions: functions of one statement without
    docstring whose name stands at one other place in the source. For tests the last three and import_lines stay 0."""

    code_lines: int = 0
    import_lines: int = 0
    vague_functions: int = 0
    vague_names: int = 0
    lone_functions: int = 0

    @property
    def import_share(self) -> float:
        """The lines that import, in percent of the lines of code."""
        return 100 * self.import_lines / max(1, self.code_lines)

    def exceeds(self, allowed: PackageSize) -> list[str]:
        """For each number that is larger than the allowed one, a text that says so."""
        ours, theirs = asdict(self), asdict(allowed)
        return [f"{name}: {ours[name]}, allowed {theirs[name]}" for name in ours if ours[name] > theirs[name]]

    def smaller(self, other: PackageSize) -> PackageSize:
        """The smaller one of each pair of numbers."""
        return PackageSize(**{field.name: min(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)})


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


def measure(sources: Iterable[SourceFile]) -> dict[str, PackageSize]:
    """The size of each package of these files, by name."""
    files = [*sources]
    uses = Counter[str]()
    for file in files:
        if not file.is_test:
            uses.update(file.names)
    sizes: dict[str, PackageSize] = {}
    for file in files:
        size = sizes.setdefault(file.package, PackageSize())
        size.code_lines += len(file.code_lines)
        size.vague_functions += file.vague_functions
        if not file.is_test:
            size.vague_names += file.vague_names
            size.import_lines += len(file.code_lines & file.import_lines)
            size.lone_functions += sum(uses[name] == 2 for name in file.small_functions)
    return dict(sorted(sizes.items()))


def read_sources(root: Path = ROOT) -> list[SourceFile]:
    """The Python files that git knows or would add, without generated ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split("\0") if path and not path.startswith(GENERATED) and (root / path).is_file()]
    return [SourceFile(path, (root / path).read_text(encoding="utf-8")) for path in sorted(paths)]


def read_table(path: Path | None = None) -> dict[str, PackageSize]:
    """The allowed sizes, by package. path: of the table; None: TABLE."""
    return {package: PackageSize(**row) for package, row in json.loads((path or TABLE).read_text(encoding="utf-8")).items()}


def write_table(sizes: Mapping[str, PackageSize], path: Path | None = None) -> None:
    """Store allowed sizes, a line for each package, so that a diff shows each change. path: as in `read_table`."""
    lines = [f"{json.dumps(package)}: {json.dumps(asdict(size))}" for package, size in sorted(sizes.items())]
    (path or TABLE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table_text(sizes: Mapping[str, PackageSize], allowed: Mapping[str, PackageSize]) -> str:
    """The measured numbers, each beside the allowed one, for people."""
    names = [field.name for field in fields(PackageSize)]
    lines = [f"{'package':24}" + "".join(f"{name.replace('_', ' '):>24}" for name in names)]
    for package, size in sizes.items():
        limit = allowed.get(package, PackageSize())
        pairs = [f"{getattr(size, name)} of {getattr(limit, name)}" for name in names]
        lines.append(f"{package:24}" + "".join(f"{pair:>24}" for pair in pairs))
    source = [size for package, size in sizes.items() if not package.startswith("tests")]
    total = sum(size.code_lines for size in source)
    share = PackageSize(total, sum(size.import_lines for size in source)).import_share
    vague_functions, vague_names, lone_functions = (sum(getattr(size, name) for size in source) for name in names[2:])
    counts = f"{total} code lines, {share:.1f} % of them imports, {vague_functions} vague functions, {vague_names} vague names"
    counts += f", {lone_functions} lone functions"
    return "\n".join([*lines, f"without tests: {counts}"])


def main() -> int:
    """Print or write the table. Exit status 1 if a package is larger than the table allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="store the numbers that became smaller, and forget packages that are gone")
    options = parser.parse_args()
    sizes, allowed = measure(read_sources()), read_table()
    if options.write:
        allowed = {package: limit.smaller(sizes[package]) for package, limit in allowed.items() if package in sizes}
        write_table(allowed)
    print(table_text(sizes, allowed))
    larger = {package: size.exceeds(allowed.get(package, PackageSize())) for package, size in sizes.items()}
    for package, texts in larger.items():
        for text in texts:
            print(f"{package}: {text}", file=sys.stderr)
    return 1 if any(larger.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
