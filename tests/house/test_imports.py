"""The permitted imports. The table below has every edge between our packages; a new one is a decision about the architecture. Packages of
other projects are declared in pyproject.toml, for the package that imports them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from omnistage.cli.stack.pipelines import GATEWAY_NEEDS
from omnistage.models.registry import FAMILIES
from tools import lock

ROOT = Path(__file__).resolve().parents[2]

SERVICE = {"host", "stage", "engine", "models", "v1"}
ALLOWED: dict[str, set[str]] = {
    "v1": set(),
    "client": {"host.child", "v1"},
    "cli": {"client", "host", "router", "stage", "models", "wire"},
    "host": {"wire"},
    "router": {"host", "link", "wire", "connector", "v1"},
    "link": {"wire", "connector", "v1"},
    "wire": {"v1"},
    "connector": {"v1"},
    "stage": {"host", "link", "wire", "connector", "models", "v1"},
    "thinker": SERVICE,
    "talker": SERVICE,
    "code2wav": SERVICE,
    "diffusion": SERVICE,
    "gateway": {"client", "host"},
    "models": {"engine", "host.child"},
    "engine": set(),
}
"""By package: the packages that it may import, and single modules of others."""

# The extras that a package needs: those that every user of it has, and those for imports in functions alone.
SERVER = ("core", "server")
MODELS = (*SERVER, "models")
USED: dict[str, tuple[str, ...]] = {
    "v1": ("core",),
    "client": ("core", "cli", "play", "models"),
    "cli": (*MODELS, "cli"),
    "host": (*SERVER, "otel"),
    "gateway": (*SERVER, "gateway"),
    **dict.fromkeys(("router", "link", "wire", "connector", "stage"), SERVER),
    **dict.fromkeys(("thinker", "talker", "code2wav", "diffusion"), MODELS),
    "models": (*MODELS, "compressed", "convert", "torchao"),
    # triton comes with the build of torch for CUDA; the tests have it from `dev`.
    "engine": (*MODELS, "dev"),
}
OF_FRAMEWORKS = {"langchain_ollama", "langchain_openai", "litellm", "livekit", "ollama", "pipecat"}
"""Modules that examples and programs import for an environment of their own, which a test makes (tests/gateway/test_schema.py,
tests/system/test_programs.py)."""
NO_PACKAGE = {"_typeshed", "omnistage"}
"""Modules that belong to no package: type checkers alone know the first, and the second is ours."""

# Beyond the standard library. torch is so large that it is loaded only where a tensor is at hand.
CONNECTOR_LIBRARIES = {"numpy", "posix_ipc", "google"}
WITHOUT_TORCH = (
    *("v1", "client", "gateway", "router", "host", "wire", "link", "connector", "stage"),
    *("models.interface", "models.conversation", "models.toy", "models.media", "engine.types"),
    *("models.kit", "models.family", "models.options", "models.devices", "models.reports", "models.requests", "models.checkpoint.files"),
    *("models.text.answer", "models.common", "models.steps"),
    *("models.speech.schedule", "models.speech.pace", "models.tiny.makers"),
)


@dataclass(frozen=True)
class FoundImport:
    """One import statement: the module that it names, and where it stands."""

    package: str
    module: str
    place: str
    in_function: bool


def sources() -> dict[Path, str]:
    """Our source files with the dotted name of each (`omnistage.wire.channel`); generated stubs left out."""
    found: dict[Path, str] = {}
    for portion in sorted([*ROOT.glob("*/omnistage"), *ROOT.glob("services/*/omnistage")]):
        for path in sorted(portion.rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                found[path] = ".".join(path.relative_to(portion.parent).with_suffix("").parts)
    return found


@cache
def named_modules(text: str, dotted: str, is_package: bool = False) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, whether the import stands in a function) of each import of a source text, also of relative ones, and of import_module
    with a literal name. A module is named with the name that is taken from it: `a.b` for `from a import b`."""
    modules = list[tuple[str, int, bool]]()
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while nodes:
        node, in_function = nodes.pop()
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno, in_function) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = dotted.split(".")[: -node.level + is_package or None] if node.level else []
            base = ".".join(filter(None, [*parents, node.module]))
            modules += [(f"{base}.{alias.name}", node.lineno, in_function) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            modules += [(str(arg.value), node.lineno, in_function) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        is_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        nodes += [(below, is_function) for below in ast.iter_child_nodes(node)]
    return tuple(sorted(modules, key=lambda module: (module[1], module[0])))


def imports(source: str, dotted: str, place: str, *, is_package: bool = False) -> list[FoundImport]:
    """The imports of a source text."""
    found = named_modules(source, dotted, is_package)
    return [FoundImport(dotted.split(".")[1], module, f"{place}:{line}", in_function) for module, line, in_function in found]


@cache
def all_imports() -> list[FoundImport]:
    """The imports of all our source files."""
    found = list[FoundImport]()
    for path, dotted in sources().items():
        name, place = dotted.removesuffix(".__init__"), str(path.relative_to(ROOT))
        found += imports(path.read_text(encoding="utf-8"), name, place, is_package=name != dotted)
    return found


def forbidden(found: FoundImport) -> bool:
    """Whether the import goes from one of our packages to another along an edge that is not in the table."""
    parts = found.module.split(".")
    if parts[0] != "omnistage":
        return False
    target = parts[1] if len(parts) > 1 else ""
    return target != found.package and ALLOWED[found.package].isdisjoint((target, ".".join(parts[1:3])))


@cache
def declared() -> dict[str, set[str]]:
    """The packages that pyproject.toml asks for, by extra."""
    return {extra: {canonicalize_name(Requirement(one).name) for one in group} for extra, group in lock.read_groups(ROOT).items()}


@cache
def owners() -> dict[str, set[str]]:
    """The installed packages that have a module, by its name."""
    return {module: {canonicalize_name(one) for one in names} for module, names in packages_distributions().items()}


def undeclared(module: str, extras: Iterable[str]) -> bool:
    """Whether a module belongs to another project, and no extra asks for a package that has it."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names | NO_PACKAGE:
        return False
    # A package that is not installed, as torchao, is taken to be named as its module.
    return not owners().get(top, {top}) & set[str]().union(*(declared()[extra] for extra in extras))


def test_every_package_is_in_the_table() -> None:
    packages = {dotted.split(".")[1] for dotted in sources().values()}
    assert packages
    assert packages <= ALLOWED.keys()
    assert USED.keys() == ALLOWED.keys()


def test_what_tests_tools_benchmarks_and_examples_import_is_declared_somewhere() -> None:
    ours = {"benchmarks", "tools"} | {path.stem for path in (ROOT / "tests").iterdir()}
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for folder in ("tests", "tools", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for module, _, _ in named_modules(path.read_text(encoding="utf-8"), "none.none")
        if module.split(".")[0] not in ours | OF_FRAMEWORKS and undeclared(module, declared())
    }
    assert sorted(found) == []


def test_serve_knows_what_the_gateway_needs() -> None:
    """Without one of these the gateway would start, and fail."""
    own = (one for one in all_imports() if one.package == "gateway" and not one.in_function)
    needed = {one.module.split(".")[0] for one in own if undeclared(one.module, SERVER)}
    assert {*GATEWAY_NEEDS} == {*needed, "python_multipart"}, "FastAPI itself imports that one, for forms"


def test_an_import_that_is_not_declared_is_seen() -> None:
    assert undeclared("mpmath.libmp", USED["models"]), "sympy brings it, which torch brings"
    assert undeclared("torch", USED["router"])
    assert not undeclared("PIL.Image", USED["models"]) and not undeclared("google.rpc.code_pb2", USED["wire"])


CONNECTS = re.compile(r"\b(?:in)?secure_channel\b|\badd_(?:in)?secure_port\b")
CONNECTING = {"omnistage.wire.channel", "omnistage.client.routers"}
"""Modules that make connections, for servers and for clients: no other code decides whether a connection is encrypted."""


def test_connections_are_made_in_one_place() -> None:
    assert {dotted for path, dotted in sources().items() if CONNECTS.search(path.read_text(encoding="utf-8"))} == CONNECTING


@pytest.mark.parametrize(
    ("source", "is_forbidden"),
    [
        ("import omnistage.stage.server", True),
        ("from omnistage.models import registry", True),
        ("from omnistage import stage", True),
        ("from ..stage import server", True),
        ("from .. import stage", True),
        ("def f():\n    from omnistage.stage import server", True),
        ("if TYPE_CHECKING:\n    import omnistage.cli", True),
        ("importlib.import_module('omnistage.stage')", True),
        ("from . import errors\nfrom .errors import LinkError", False),
        ("from ..connector import arena\nfrom omnistage.v1 import stage_pb2", False),
    ],
)
def test_a_forbidden_edge_is_seen_in_every_spelling_and_others_pass(source: str, is_forbidden: bool) -> None:
    assert any(map(forbidden, imports(source, "omnistage.link.liveness", "x.py"))) == is_forbidden


@cache
def families() -> set[str]:
    """The folders of omnistage.models that hold a family."""
    return {model.loader.split(".")[2] for family in FAMILIES.values() for model in family.models.values()}


def is_of_a_sister(found: FoundImport, families: set[str]) -> bool:
    """Whether a module of omnistage.models imports code of a family that it does not belong to. Code for several families is in a folder
    beside them, and a family knows nothing of the makers of its checkpoints with random weights. The registry lists the families."""
    if found.place.startswith("models/omnistage/models/registry.py:") and found.module.split(".")[3:4] == ["family"]:
        return False
    source, target = (_place_among_families(parts, families) for parts in (found.place.split("/")[3:], found.module.split(".")[2:]))
    return target[0] in families and (target[0] != source[0] or (target[1] and not source[1]))


def _place_among_families(parts: Sequence[str], families: set[str]) -> tuple[str, bool]:
    """The family that a path belongs to, "" for none, and whether the path is a maker of checkpoints."""
    is_maker = parts[:1] == ["tiny"]
    own = parts[int(is_maker) : int(is_maker) + 1]
    return own[0] if own and own[0] in families else "", is_maker


@pytest.mark.parametrize(
    ("place", "module", "is_sister"),
    [
        ("new/talker", "old.talker", True),
        ("new/wave/trial", "old", True),
        ("speech/talker", "old.ports", True),
        ("media/decoder", "new", True),
        ("registry", "old.loading", True),
        ("hub", "old.family.OLD", True),
        ("tiny/makers", "tiny.old.checkpoint", True),
        ("tiny/new/tokenizer", "tiny.old.tokenizer", True),
        ("tiny/new/sizes", "old.config", True),
        ("new/loading", "tiny.new.sizes", True),
        ("new/talker", "new.ports", False),
        ("new/talker", "speech.talker", False),
        ("tiny/new/checkpoint", "new.quiet", False),
        ("tiny/new/checkpoint", "tiny.new.sizes", False),
        ("tiny/new/checkpoint", "tiny.makers", False),
        ("renew/talker", "renew.ports", False),
        ("registry", "old.family.OLD", False),
    ],
)
def test_what_belongs_to_a_sister_is_seen_and_what_is_shared_passes(place: str, module: str, is_sister: bool) -> None:
    one = FoundImport("models", f"omnistage.models.{module}", f"models/omnistage/models/{place}.py:1", in_function=False)
    assert is_of_a_sister(one, {"old", "new"}) == is_sister


def is_heavy(found: FoundImport) -> bool:
    """Whether the connector imports a library that it has no need for, or torch outside of a function."""
    library = found.module.split(".")[0]
    return library not in sys.stdlib_module_names | {"omnistage"} | CONNECTOR_LIBRARIES and not (library == "torch" and found.in_function)


FORBIDDEN: dict[str, Callable[[FoundImport], bool]] = {
    "along an edge that is not in the table": forbidden,
    "of what is not declared for it": lambda one: undeclared(one.module, USED[one.package]),
    "of another family": lambda one: one.package == "models" and is_of_a_sister(one, families()),
    # An old place is kept for families of other packages alone; ours import a name from its own module.
    "from an old place": lambda one: one.module.startswith("omnistage.models.common"),
    "of a large library by the connector": lambda one: one.package == "connector" and is_heavy(one),
    "of gRPC or protobuf by the engine": lambda one: one.package == "engine" and one.module.split(".")[0] in ("grpc", "google"),
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_nothing_is_imported_that_is_forbidden(kind: str) -> None:
    assert {"qwen2_5_omni", "diffusers", "smol", "toy"} <= families()
    assert sorted({f"{found.place} imports {found.module}" for found in all_imports() if FORBIDDEN[kind](found)}) == []


def module_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """The imports among some modules. texts: by dotted name, `.__init__` for a package.

    Imports in functions and those for the type checker count too: a reader of a module has to know its imports, whenever they are
    loaded."""
    known = {dotted.removesuffix(".__init__") for dotted in texts}
    graph: dict[str, set[str]] = {}
    for dotted, text in texts.items():
        name = dotted.removesuffix(".__init__")
        modules = [module for module, _, _ in named_modules(text, name, dotted.endswith(".__init__"))]
        # `from a.b import c` names the module a.b.c, or c in the module a.b.
        named = {module if module in known else module.rpartition(".")[0] for module in modules}
        graph[name] = named & known - {name}
    return graph


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that each import the one before, where the last is the first again; empty where there is no such circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_no_modules_of_a_package_import_each_other(package: str) -> None:
    """Code that two modules need from each other belongs into a third one below both."""
    texts = {dotted: path.read_text(encoding="utf-8") for path, dotted in sources().items() if dotted.split(".")[1] == package}
    found = circle(module_graph(texts))
    assert found == [], " is imported by ".join(found)


def test_no_packages_import_each_other() -> None:
    assert circle(ALLOWED) == []


def test_a_module_that_any_package_may_import_imports_nothing_of_ours() -> None:
    single = {f"omnistage.{target}" for targets in ALLOWED.values() for target in targets if "." in target}
    places = {dotted: str(path.relative_to(ROOT)) for path, dotted in sources().items() if dotted in single}
    assert places.keys() == single
    assert [one for one in all_imports() if one.place.partition(":")[0] in places.values() and one.module.startswith("omnistage")] == []


@pytest.mark.parametrize(
    "back",
    [
        "from omnistage.x import a",
        "from omnistage.x.a import A",
        "from .a import A",
        "def f():\n    from omnistage.x.a import A",
        "if TYPE_CHECKING:\n    from omnistage.x.a import A",
        "importlib.import_module('omnistage.x.a')",
    ],
)
def test_modules_that_import_each_other_are_seen_in_every_spelling(back: str) -> None:
    texts = {"omnistage.x.__init__": "", "omnistage.x.a": "from omnistage.x.b import B", "omnistage.x.b": "from omnistage.x import c"}
    assert circle(module_graph({**texts, "omnistage.x.c": "import os"})) == []
    found = circle(module_graph({**texts, "omnistage.x.c": back}))
    assert found[0] == found[-1] and {*found} == {"omnistage.x.a", "omnistage.x.b", "omnistage.x.c"}


def test_light_packages_run_without_torch() -> None:
    # One fresh interpreter imports them all: what a package pulls in through others counts as well.
    modules = [
        dotted.removesuffix(".__init__")
        for dotted in sources().values()
        if any(f"{dotted}.".startswith(f"omnistage.{light}.") for light in WITHOUT_TORCH) and not dotted.endswith("__main__")
    ]
    each = "    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name\n"
    program = f"import importlib, sys\nfor name in {modules!r}:\n{each}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
