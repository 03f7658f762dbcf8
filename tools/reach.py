"""Finds the tests that a file reaches: by the imports of each test, the imports of the processes that it starts, and the files that all of
these read.

Each file is a node. So is each fixture of a conftest.py, because a test has the imports only of the fixtures that it asks for. The distance
of a test from a file is the number of edges between them; edges from helpers do not count, because helpers are a part of the tests. An edge
is

- an import, wherever it stands; an import for the type checker alone does not count
- a literal that names a module of ours, as the registry's do, or `-m` and the word after it
- the imports of a program that is the text of a literal
- a literal that names a file, as `ROOT / "docs" / "models.md"` does
- a row of READ, for edges that no literal names
- the modules of STARTS in a helper whose processes get their names at run time; for our own code, the rows of STARTED"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from tools.sources import Source, read, read_fixtures

SERVERS = ("services/*/omnistage/*/__main__.py", "router/omnistage/router/__main__.py")
GATEWAY = "gateway/omnistage/gateway/__main__.py"

STARTED: Mapping[str, Collection[str]] = {
    "sdk/omnistage/cli/child.py": (),  # It starts the programs that stack.py names.
    "sdk/omnistage/cli/stack.py": (*SERVERS, GATEWAY),
    "services/stage/omnistage/stage/server.py": (),  # This file only puts together its own name.
}
"""Files of our own code that put names of programs together at run time; for each, patterns of the files that it then runs."""

_STUBS = "sdk/omnistage/v1/*_pb2*.py"
_TREE = "tests/house/test_tree.py"
_SENTENCES = "tests/house/test_sentences.py"
_IMAGES = ("tests/house/test_containers.py", "tests/system/test_compose.py")
_BY_LANGUAGES = ("tests/client/test_languages.py",)

ORDER = "tests/costs.json"
"""The file that orders runs of tests. All tests read it, but a change of it changes no test."""

READ: Mapping[str, Collection[str]] = {
    "*.md": (_TREE, "tests/client/test_documents.py"),
    "sdk/README.md": ("tests/house/test_wheel.py", "tests/client/test_package_page.py", "tests/system/test_installed.py"),
    "LICENSE": (_TREE,),
    "NOTICE": (_TREE,),
    "docs/images/*.png": (_TREE,),
    "docs/images/*.svg": (_TREE,),
    "models/omnistage/models/smol/spoken/tables/*.tsv": ("models/omnistage/models/smol/spoken/tables.py",),
    "tests/models/rare_forms.tsv": ("tests/models/test_spoken.py",),
    "tests/models/written_forms.tsv": ("tests/models/test_spoken.py", "tests/models/test_voice.py"),
    ".gitignore": (_TREE,),
    ".ci/run": ("tests/house/test_reach.py",),
    "tools/budget.json": ("tests/house/test_budget.py",),
    "Makefile": ("tests/house/test_setup.py", "tests/system/test_compose.py"),
    "pyproject.toml": ("tests/house/test_wheel.py", "tests/house/test_lock.py", _TREE),
    "constraints.txt": ("tests/house/test_lock.py", _TREE),
    "requirements/*": ("tests/house/test_lock.py", "tests/house/test_setup.py"),
    "requirements/oldest.txt": ("tests/client/test_oldest.py",),
    "requirements/protos.txt": ("tests/cli/test_protos.py",),
    "protos/*.proto": (_STUBS, "tests/house/test_wheel.py", "tests/client/test_options.py", "tests/wire/test_errors.py", *_BY_LANGUAGES),
    "protos/buf.yaml": ("tests/cli/test_protos.py",),
    "sdk/omnistage/v1/*.pyi": (_STUBS,),
    "*/py.typed": ("tests/house/test_wheel.py", "tests/client/test_documents.py"),
    "deploy/pipelines/*.yaml": ("router/omnistage/router/pipeline.py", "tests/router/test_pipeline.py", "tests/house/test_wheel.py"),
    "gateway/omnistage/gateway/page/*": ("gateway/omnistage/gateway/page.py", "tests/house/test_wheel.py", _SENTENCES),
    "deploy/grafana/*.json": ("tests/house/test_queries.py",),
    "deploy/prometheus/*.yml": ("tests/house/test_queries.py",),
    ".dockerignore": _IMAGES,
    "*/Dockerfile": (*_IMAGES, "tests/house/test_queries.py"),
    "docker-compose.yml": _IMAGES,
    "pictures/omnistage_pictures/*": ("models/omnistage/models/diffusers/store.py", "tests/models/diffusers/test_default_picture.py"),
    "pictures/pyproject.toml": ("tests/models/diffusers/test_default_picture.py", *_IMAGES),
    "examples/*.py": ("tests/client/test_examples.py",),  # No literal can name these files, because helpers of tests have the same names.
    "examples/*/*": _BY_LANGUAGES,
    "examples/openai/*": ("tests/gateway/test_openai_examples.py",),
    "tests/chaos/*.yaml": ("tests/chaos/house.py",),
    "tests/helpers/chromium.sh": ("tests/helpers/browser.py",),
    "tests/models/qwen2_5_omni/saved/*.json": ("tests/helpers/saved_versions.py",),
    "tests/models/published/*.json": ("tests/helpers/published.py",),
    "tests/families.dist-info/*": ("tests/helpers/engine_family.py", "tests/helpers/loading.py", "tests/models/test_registry.py"),
    ORDER: ("tests/house/test_suite.py",),
    "*.py": ("tests/house/test_imports.py", _SENTENCES, _TREE),
}
"""Patterns of files that are not Python, or not imported, and for each the patterns of its readers. A reader that names a file by a literal
needs no row here."""


@dataclass(frozen=True)
class Reached:
    """A file of tests that changes reach. distance: number of edges to the nearest file that changed. path: the nodes from the test to the
    changed file, without the test."""

    test: str
    distance: int
    path: tuple[str, ...] = ()

    @property
    def is_at_home(self) -> bool:
        """Whether it is a test of the part of the system that changed."""
        return bool(self.path) and area(self.test) == area(self.path[-1])


@dataclass
class Graph:
    """The files of a tree, and which of them use which. files: all files, also deleted files, which use nothing. readers: by node, the
    nodes that have an edge to it."""

    files: frozenset[str]
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def find_reached(self, changed: Iterable[str]) -> list[Reached]:
        """The files of tests that changed files reach; a file of tests that changed itself has distance 0."""
        nexts: dict[str, str] = {}
        distances = self.distances(changed, nexts)
        return [Reached(node, distance, tuple(_way(node, nexts))) for node, distance in distances.items() if is_test(node)]

    def distances(self, changed: Iterable[str], nexts: dict[str, str] | None = None) -> dict[str, int]:
        """The distance from the nearest changed file, by node, for all nodes that the changed files reach. nexts: gets, by node, the next
        node on the way to that file."""
        nexts = {} if nexts is None else nexts
        distances = dict.fromkeys(sorted(changed), 0)
        todo = deque(distances)
        while todo:
            node = todo.popleft()
            for reader in sorted(self.readers.get(node, ())):
                distance = distances[node] + (not is_helper(reader))
                if reader not in distances or distance < distances[reader]:
                    distances[reader] = distance
                    nexts[reader] = node
                    (todo.appendleft if is_helper(reader) else todo.append)(reader)
        return distances


def _way(node: str, nexts: Mapping[str, str]) -> Iterator[str]:
    """The nodes on the way from `node` to the file that changed, without `node` itself."""
    while node in nexts:
        yield (node := nexts[node])


def is_test(file: str) -> bool:
    """Whether pytest collects this file."""
    return file.startswith("tests/") and fnmatchcase(PurePosixPath(file).name, "test_*.py")


def is_helper(node: str) -> bool:
    """Whether a node is a file that tests share, or a fixture."""
    return node.startswith("tests/") and not is_test(node)


def area(file: str) -> str:
    """The part of the system to which a file belongs, by the folder of its tests: `link` for link/omnistage/link/chain.py."""
    parts = PurePosixPath(file).parts
    below = parts.index("omnistage") if "omnistage" in parts else 0 if parts[0] == "tests" else -1
    return parts[below + 1]


def rows(file: str) -> list[str]:
    """The patterns of READ that match a file."""
    return [pattern for pattern in READ if fnmatchcase(file, pattern)]


def matching(pattern: str, files: Iterable[str]) -> list[str]:
    """The files that match a pattern, in which `*` also stands for several folders."""
    return [file for file in files if fnmatchcase(file, pattern)]


def names_of(file: str) -> set[str]:
    """The names by which a Python file can be imported: from the root, from `tests`, or from the folder above a package of ours."""
    parts = PurePosixPath(file).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    roots = {0, *(number for number, part in enumerate(parts) if part.startswith("omnistage"))}
    if parts[:1] == ("tests",):
        roots.add(1)
    return {".".join(parts[root:]) for root in roots if parts[root:]}


def graph(root: Path, files: Iterable[str], gone: Iterable[str] = ()) -> Graph:
    """The graph of the files of a tree, named from its root. gone: deleted files; a file that names a deleted file still has its edge.
    Raises SyntaxError."""
    return _Builder(root, frozenset(files), frozenset(gone)).build()


class _Builder:
    """Builds the graph: reads each Python file once, and adds the edges from it."""

    def __init__(self, root: Path, files: frozenset[str], gone: frozenset[str]) -> None:
        self._root, self._there = root, files - gone
        self._graph = Graph(files | gone)
        self._modules: dict[str, set[str]] = defaultdict(set)
        self._by_name: dict[str, set[str]] = defaultdict(set)
        self._fixtures: dict[str, set[str]] = {}
        for file in self._graph.files:
            self._by_name[PurePosixPath(file).name].add(file)
            if file.endswith(".py"):
                for name in names_of(file):
                    self._modules[name].add(file)

    def build(self) -> Graph:
        """Add the edges of all Python files, of READ and of STARTED; returns the graph."""
        # The conftest.py files come first: the edges of a test need to know which fixtures there are.
        python = sorted((not file.endswith("/conftest.py"), file) for file in self._there if file.endswith(".py"))
        collects = gc.isenabled()
        gc.disable()  # The garbage collector would take a third of the time for nothing: trees have many nodes and no cycles.
        try:
            for _, file in python:
                self._read(file)
        finally:
            if collects:
                gc.enable()
        for file in self._graph.files:
            for pattern in {reader for row in rows(file) for reader in READ[row]}:
                for reader in matching(pattern, self._graph.files):
                    self._edge(reader, file)
        for file, patterns in STARTED.items():
            for pattern in patterns:
                self._edges(file, matching(pattern, self._graph.files))
        return self._graph

    def _read(self, file: str) -> None:
        """Add the edges from one Python file. Raises SyntaxError."""
        # As bytes, because a file may name its encoding on its first line.
        text, dotted = (self._root / file).read_bytes(), min(names_of(file), key=len)
        try:
            if file.endswith("/conftest.py"):
                self._read_fixtures(file, *read_fixtures(text, dotted))
                return
            source = read(text, dotted, file.endswith("/__init__.py"))
        except SyntaxError as error:
            error.filename = file
            raise
        self._take(file, file, source)
        if file.startswith("tests/"):
            self._ask(file, file, source)

    def _read_fixtures(self, file: str, common: Source, fixtures: Mapping[str, Source]) -> None:
        """Add the edges from a conftest.py and from each of its fixtures. common: the names that every test gets. fixtures: names by
        fixture."""
        self._fixtures[file] = set(fixtures)
        self._take(file, file, common)
        for name, source in fixtures.items():
            self._take(f"{file}::{name}", file, source)
            self._edge(f"{file}::{name}", file)
        for name, source in fixtures.items():
            self._ask(f"{file}::{name}", file, source)

    def _take(self, node: str, file: str, source: Source) -> None:
        """Add the edges from a node, a file or a fixture in it, to the files that its names stand for."""
        for module in {one.module for one in source.imports if not one.for_types} | source.by_programs:
            self._edges(node, self._find_imported(module))
        for program in source.programs:
            self._edges(node, self._run(program))
        for word in source.words:
            self._edges(node, self._file(word, file) or self._run(word.partition(":")[0]) if "." in word else ())

    def _ask(self, node: str, file: str, source: Source) -> None:
        """Add the edges from a node to the fixtures that it asks for, each in the nearest conftest.py that has it, and from a test also to
        every conftest.py above it."""
        above = [f"{folder}/conftest.py" for folder in PurePosixPath(file).parents]
        for name in source.arguments:
            if conftest := next((one for one in above if name in self._fixtures.get(one, ())), None):
                self._edge(node, f"{conftest}::{name}")
        if is_test(node):
            self._edges(node, (one for one in above if one in self._graph.files))

    def _find_imported(self, name: str) -> Iterator[str]:
        """The files that an import of a name runs, including those of its packages."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            yield from self._modules.get(".".join(parts[:length]), ())

    def _run(self, name: str) -> Iterator[str]:
        """The files that `python -m` runs for a name."""
        yield from self._find_imported(name)
        yield from self._modules.get(f"{name}.__main__", ())

    def _file(self, word: str, file: str) -> list[str]:
        """The file that a literal names, as a list of at most one: by its path from the root, beside the file with the literal, or as the
        only one of that name. Tests are left out, because nothing reads them."""
        name = word.removeprefix("./")
        sibling = str(PurePosixPath(file).parent / name)
        alike = [one for one in self._by_name.get(PurePosixPath(name).name, ()) if f"/{one}".endswith(f"/{name}")]
        matches = [one for one in (name, sibling) if one in self._graph.files] or (alike if len(alike) == 1 else [])
        return [one for one in matches[:1] if not is_test(one) and one != ORDER]

    def _edges(self, reader: str, targets: Iterable[str]) -> None:
        for target in targets:
            self._edge(reader, target)

    def _edge(self, reader: str, target: str) -> None:
        """Note that `reader` uses `target`."""
        if reader != target:
            self._graph.readers[target].add(reader)
