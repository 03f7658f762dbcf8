"""Finds the names in the text of a Python file: the modules that it imports, the programs that it starts, the files that it reads."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

NOTHING_BELOW = frozenset({ast.Name, *ast.expr_context.__subclasses__(), *ast.operator.__subclasses__(), *ast.cmpop.__subclasses__()})
"""Kinds of nodes below which there is no name."""
TO_MODULE = re.compile(r"(?<!\S)-m ([\w.]+)")
FROM = re.compile(r"\bfrom +([\w.]+) +import +\(?([\w, ]+)")
PLAIN = re.compile(r"\bimport +([\w.]+(?:, *[\w.]+)*)")
NAME = re.compile(r"[\w./:*-]{3,200}")
START = re.compile(r"(?:[a-z_]\w*\.)+")


@dataclass(frozen=True)
class Import:
    """A module that is imported, with the name that is taken from it (`a.b` for `from a import b`). in_function: only when a function runs.
    for_types: only by the type checker."""

    module: str
    line: int
    in_function: bool = False
    for_types: bool = False


@dataclass(frozen=True)
class MadeUp:
    """A line where the name of a program is put together at run time. start: the beginning of the name in the source, such as `omnistage.`;
    may be empty."""

    line: int
    start: str


@dataclass
class Source:
    """The names in a file, or in a part of one. words: literals, but no docstrings, that may be names of modules or files. programs: the
    words after `-m`. by_programs: modules that programs import whose text is a literal. arguments: names of the arguments of functions, and
    of fixtures that tests ask for in other ways. executable: lines where `sys.executable` stands before a word that is no option. starts:
    whether the file declares STARTS, a tuple of literals."""

    imports: list[Import] = field(default_factory=list)
    by_programs: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    made_up: list[MadeUp] = field(default_factory=list)
    executable: list[int] = field(default_factory=list)
    starts: bool = False


def named_modules(node: ast.AST, dotted: str, is_package: bool) -> Iterator[str]:
    """The absolute names of the modules that one statement or call imports, with the names that are taken from them (`a.b` for `from a
    import b`). dotted: the name of the file as a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            up = node.level - 1 if is_package else node.level
            parents = dotted.split(".")
            base = ".".join(filter(None, [*parents[: len(parents) - up], base]))
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
        yield from filter(None, map(text_of, node.args[:1]))


def text_of(node: ast.AST) -> str | None:
    """The text of a literal; None for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def called_name(node: ast.Call) -> str:
    """The last name of a called expression."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@functools.cache  # several rules of the house read all our files
def read(text: str | bytes, dotted: str, is_package: bool = False) -> Source:
    """The names in a whole file. dotted: the name of the file as a module. Raises SyntaxError."""
    return _Reader(dotted, is_package).read([_parse(text)])


def _parse(text: str | bytes) -> ast.Module:
    """The tree of a file. Raises SyntaxError."""
    try:
        return ast.parse(text)
    except ValueError as error:  # zeros in it; later Pythons have a SyntaxError for that
        raise SyntaxError(str(error)) from None


def read_fixtures(text: str | bytes, dotted: str) -> tuple[Source, dict[str, Source]]:
    """The names in a conftest.py: those that every test gets from it, and those of each of its fixtures, by the name of the fixture. An
    import belongs to fixtures if nothing else uses it. Raises SyntaxError."""
    body = _parse(text).body
    imports = {name: one for statement in body if isinstance(statement, ast.Import | ast.ImportFrom) for name, one in _each(statement)}
    fixtures = [one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and _is_fixture(one)]
    rest = [one for one in body if not isinstance(one, ast.Import | ast.ImportFrom) and one not in fixtures]
    by_fixtures, by_rest = _names(fixtures), _names(rest)
    for_all = [one for name, one in imports.items() if name in by_rest or name not in by_fixtures]
    parts = {one.name: [*(imports[name] for name in sorted(_names([one]) & imports.keys())), one] for one in fixtures}
    return _Reader(dotted, False).read([*for_all, *rest]), {name: _Reader(dotted, False).read(part) for name, part in parts.items()}


def _is_fixture(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a fixture for which a test has to ask."""
    decorators = "".join(ast.unparse(one) for one in function.decorator_list)
    return "fixture" in decorators and "autouse" not in decorators


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """All variables that the nodes mention."""
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _each(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, ast.stmt]]:
    """For each name that an import defines: the name, and an import that defines only that one."""
    for alias in statement.names:
        one = ast.Import([alias]) if isinstance(statement, ast.Import) else ast.ImportFrom(statement.module, [alias], statement.level)
        yield alias.asname or alias.name.partition(".")[0], ast.copy_location(one, statement)


class _Reader:
    """Collects the names in a tree, in one walk and mostly without recursion: a repository has a million nodes. A method of `_looks` notes
    the names of its kind of node, and returns the nodes below that are still to be walked over."""

    def __init__(self, dotted: str, is_package: bool) -> None:
        self._dotted, self._is_package = dotted, is_package
        self._found = Source()
        self._in_function = self._for_types = False
        self._looks: Mapping[type[ast.AST], Callable[[Any], Iterable[ast.AST]]] = {
            ast.AnnAssign: self._assignment,
            ast.Assign: self._assignment,
            ast.AsyncFunctionDef: self._function,
            ast.BinOp: self._path,
            ast.Call: self._call,
            ast.Constant: self._constant,
            ast.Expr: self._statement,
            ast.FunctionDef: self._function,
            ast.If: self._condition,
            ast.Import: self._import,
            ast.ImportFrom: self._import,
            ast.JoinedStr: self._pieces,
            ast.Lambda: self._function,
            ast.List: self._elements,
            ast.Tuple: self._elements,
            ast.arg: self._argument,
        }

    def read(self, nodes: Sequence[ast.AST]) -> Source:
        """Walk over these nodes, and return all names that were found."""
        self._walk(nodes)
        self._found.imports.sort(key=lambda one: (one.line, one.module))
        return self._found

    def _walk(self, nodes: Iterable[ast.AST]) -> None:
        """Walk over these nodes and all nodes below them."""
        todo = [*nodes]
        while todo:
            node = todo.pop()
            kind = type(node)
            if kind is ast.Attribute:
                todo.append(node.value)  # type: ignore[attr-defined]
            elif kind in self._looks:
                todo += self._looks[kind](node)
            elif kind not in NOTHING_BELOW:
                todo += ast.iter_child_nodes(node)

    def _function(self, node: ast.AST) -> Iterable[ast.AST]:
        """Walk over a function; imports in it are noted as such."""
        before, self._in_function = self._in_function, True
        self._walk(ast.iter_child_nodes(node))
        self._in_function = before
        return ()

    def _condition(self, node: ast.If) -> Iterable[ast.AST]:
        """Walk over the body of `if TYPE_CHECKING`; imports in it are noted as for types."""
        test = node.test
        if (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) != "TYPE_CHECKING":
            return ast.iter_child_nodes(node)
        before, self._for_types = self._for_types, True
        self._walk(node.body)
        self._for_types = before
        return node.orelse

    def _import(self, node: ast.Import | ast.ImportFrom | ast.Call) -> Iterable[ast.AST]:
        """Note the modules that a statement or call imports."""
        for module in named_modules(node, self._dotted, self._is_package):
            self._found.imports.append(Import(module, node.lineno, self._in_function, self._for_types))
        return ()

    def _call(self, node: ast.Call) -> Iterable[ast.AST]:
        """Note the imports, the programs and the fixtures that a call names."""
        self._import(node)
        self._command(node.args)
        if called_name(node) in ("usefixtures", "getfixturevalue"):
            self._found.arguments |= {*filter(None, map(text_of, node.args))}
        return ast.iter_child_nodes(node)

    def _elements(self, node: ast.List | ast.Tuple) -> Iterable[ast.AST]:
        """Note the programs that a list or tuple starts as a command."""
        self._command(node.elts)
        return node.elts

    def _argument(self, node: ast.arg) -> Iterable[ast.AST]:
        self._found.arguments.add(node.arg)
        return ast.iter_child_nodes(node)

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> Iterable[ast.AST]:
        """Note whether STARTS is declared."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(one, ast.Name) and one.id == "STARTS" for one in targets):
            self._found.starts |= isinstance(node.value, ast.Tuple) and None not in map(text_of, node.value.elts)
        return ast.iter_child_nodes(node)

    def _statement(self, node: ast.Expr) -> Iterable[ast.AST]:
        return () if isinstance(node.value, ast.Constant) else [node.value]  # a docstring names no module or file

    def _constant(self, node: ast.Constant) -> Iterable[ast.AST]:
        if (text := text_of(node)) is not None:
            self._literal(text)
        return ()

    def _pieces(self, node: ast.JoinedStr) -> Iterable[ast.AST]:
        """Note the text of an f-string, with _ in place of each value."""
        self._literal("".join(str(one.value) if isinstance(one, ast.Constant) else "_" for one in node.values))
        return [one for one in node.values if not isinstance(one, ast.Constant)]

    def _path(self, node: ast.BinOp) -> Iterable[ast.AST]:
        """Note the path that `/` puts together: `ROOT / "docs" / "models.md"` names docs/models.md."""
        parts: list[str] = []
        operand: ast.expr = node
        while isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Div) and (part := text_of(operand.right)) is not None:
            parts.insert(0, part)
            operand = operand.left
        if not parts:
            return [node.left, node.right]
        self._literal("/".join(parts))
        return [operand]

    def _command(self, elements: Sequence[ast.expr]) -> None:
        """Note the programs that these elements start, if they are a command."""
        for element in elements:
            if isinstance(element, ast.JoinedStr) and len(element.values) == 2:
                start = text_of(element.values[0]) or ""
                if START.fullmatch(start):
                    self._found.made_up.append(MadeUp(element.lineno, start))
        for first, second in pairwise(elements):
            text = text_of(second)
            if text_of(first) == "-m" and not isinstance(second, ast.JoinedStr):
                if text is None:
                    self._found.made_up.append(MadeUp(second.lineno, ""))
                else:
                    self._found.programs.add(text)
            elif isinstance(first, ast.Attribute) and ast.unparse(first) == "sys.executable":
                imported = isinstance(second, ast.Attribute) and second.attr == "__file__"
                if not imported and not str(text).startswith("-"):
                    self._found.executable.append(second.lineno)

    def _literal(self, value: str) -> None:
        """Note what a literal names: a module or file, the programs of a shell command, or the names in the text of a program."""
        if NAME.fullmatch(value):
            self._found.words.add(value)
            return
        self._found.programs |= set(TO_MODULE.findall(value))
        if "import " not in value:
            return
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(textwrap.dedent(value))
        except (SyntaxError, ValueError):  # only a part of a program
            imported = {f"{base}.{name.strip()}" for base, names in FROM.findall(value) for name in names.split(",")}
            plain = {name.strip() for names in PLAIN.findall(FROM.sub("", value)) for name in names.split(",")}
            self._found.by_programs |= imported | plain
        else:
            inner = _Reader("", False).read([tree])
            self._found.by_programs |= inner.by_programs | {one.module for one in inner.imports}
            self._found.words |= inner.words
            self._found.programs |= inner.programs
