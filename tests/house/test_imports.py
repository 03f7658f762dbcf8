"""Who may import whom. Every edge between our packages is in the table below; a new one is a decision about the architecture."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SERVICE = {"host", "stage", "engine", "models", "v1"}
ALLOWED: dict[str, set[str]] = {
    "v1": set(),
    "client": {"v1"},
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
    "models": {"engine"},
    "engine": set(),
}

# Beyond the standard library. torch is so large that it is loaded only where a tensor is at hand.
CONNECTOR_LIBRARIES = {"numpy", "posix_ipc", "google"}
WITHOUT_TORCH = (
    *("v1", "client", "router", "host", "wire", "link", "connector", "stage"),
    *("models.interface", "models.conversation", "models.toy", "models.media", "engine.types"),
    *("models.common.answer", "models.common.requests", "models.common.steps", "models.common.stepper"),
)


@dataclass(frozen=True)
class Import:
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


def imports(source: str, dotted: str, place: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a source text, also relative ones, those inside functions, and import_module with a literal name."""
    package = dotted.split(".")[1]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for module in named_modules(node, dotted, is_package):
            yield Import(package, module, f"{place}:{getattr(node, 'lineno', 0)}", in_function)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function or isinstance(node, functions))

    yield from walk(ast.parse(source), False)


def named_modules(node: ast.AST, dotted: str, is_package: bool) -> Iterator[str]:
    """The absolute names of the modules that one statement or call imports, with what is taken from them (`a.b` for `from a import b`)."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            up = node.level - 1 if is_package else node.level
            parents = dotted.split(".")
            base = ".".join(filter(None, [*parents[: len(parents) - up], base]))
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__"):
            yield node.args[0].value


def all_imports() -> list[Import]:
    """The imports of all our source files."""
    return [
        found
        for path, dotted in sources().items()
        for found in imports(
            path.read_text(encoding="utf-8"),
            dotted.removesuffix(".__init__"),
            str(path.relative_to(ROOT)),
            is_package=path.name == "__init__.py",
        )
    ]


def forbidden(found: Import) -> bool:
    """Whether the import goes from one of our packages to another along an edge that is not in the table."""
    parts = found.module.split(".")
    if parts[0] != "omnistage":
        return False
    target = parts[1] if len(parts) > 1 else ""
    return target != found.package and target not in ALLOWED[found.package]


def test_every_package_is_in_the_table() -> None:
    packages = {dotted.split(".")[1] for dotted in sources().values()}
    assert packages
    assert packages <= ALLOWED.keys()


def test_packages_import_along_allowed_edges_only() -> None:
    assert [f"{found.place} imports {found.module}" for found in all_imports() if forbidden(found)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import omnistage.stage.server",
        "from omnistage.models import registry",
        "from omnistage import stage",
        "from ..stage import server",
        "from .. import stage",
        "def f():\n    from omnistage.stage import server",
        "if TYPE_CHECKING:\n    import omnistage.cli",
        "importlib.import_module('omnistage.stage')",
    ],
)
def test_a_forbidden_edge_is_seen_in_every_spelling(source: str) -> None:
    assert [found for found in imports(source, "omnistage.link.channels", "x.py") if forbidden(found)]


def test_own_modules_and_allowed_edges_pass() -> None:
    source = "from . import errors\nfrom .errors import LinkError\nfrom ..connector import arena\nfrom omnistage.v1 import stage_pb2"
    assert [found for found in imports(source, "omnistage.link.channels", "x.py") if forbidden(found)] == []


def test_connector_needs_few_libraries_and_torch_only_inside_functions() -> None:
    standard = sys.stdlib_module_names | {"omnistage"}
    for found in all_imports():
        library = found.module.split(".")[0]
        if found.package == "connector" and library not in standard | CONNECTOR_LIBRARIES:
            assert library == "torch" and found.in_function, f"{found.place} imports {found.module}"


def test_engine_knows_no_grpc_and_no_protobuf() -> None:
    assert [found.place for found in all_imports() if found.package == "engine" and found.module.split(".")[0] in ("grpc", "google")] == []


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
