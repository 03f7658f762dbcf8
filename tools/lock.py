"""Writes the lists of set-up: constraints.txt, the versions, and requirements/, the same with the SHA-256 of every wheel (`make lock`).

Versions in constraints.txt stay; new packages in pyproject.toml get their newest version; packages that nothing needs any more go.
`--upgrade` moves all to the newest. pip chooses the versions for the Python that runs this; this module finds by the markers which packages
other Pythons need in addition; and pip's finder gives the hashes of all wheels that any supported Python on Linux x86-64 with glibc could
take. pip decides where packages come from, so no address is read or written. Nothing is installed.

The packages that stand apart from the environment (apart.py) are only in requirements/, not in constraints.txt: each dependency group of
pyproject.toml, and `oldest`, the oldest packages that the core lets a client have.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# These are pip's insides, because its commands print only the hash of the wheel that they would install. pip is pinned.
from pip._internal.commands.index import IndexCommand
from pip._internal.index.package_finder import PackageFinder
from pip._internal.models.link import Link
from pip._internal.models.target_python import TargetPython

from tools import groups
from tools.commands import CommandError, SetupError, run
from tools.setup import CUDA_LIST, NEWEST, OLDEST, ROOT
from tools.torch_build import TABLE, TORCH, TORCH_CUDA, TORCH_INDEX_URL

PYTHONS = tuple(f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))
PLATFORMS = (
    "linux_x86_64",
    *(f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")),
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 61)),
)
BUILD = ("pip", "hatchling", "editables", "setuptools")
OLDEST_LIST = "oldest"
ROUNDS = 5
VERSIONS = """\
# The exact version of everything that can get installed, names and versions only. Written by `make lock`; a version may be changed
# by hand before it. torch stands here without its build label, which tools/torch_build.py chooses.
"""
LIST = """\
# What {what}, with the SHA-256 of every wheel for Python 3.11 to 3.13 on Linux x86-64. Written by `make lock`.
"""


class LockError(SetupError):
    """The lists cannot be written; the text says what the user can do."""


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """A package that pip chose. name: as its metadata spells it. needs: its requirements, the lines Requires-Dist of its metadata."""

    name: str
    version: str
    needs: tuple[str, ...]


Closure = dict[str, set[str]]
"""Canonical names of packages, with the Pythons that need each."""


def main(upgrade: bool = False) -> None:
    """Write the lists. upgrade: move everything to its newest version. A known problem becomes one clear message and exit status 1."""
    # Otherwise pip warns of each configured source that lacks a package.
    logging.getLogger("pip").setLevel(logging.ERROR)
    try:
        lock(ROOT, upgrade=upgrade)
    except SetupError as error:
        sys.exit(f"lock: {error}")


def lock(root: Path, *, upgrade: bool) -> None:
    """Write constraints.txt and requirements/ of the project in `root`. upgrade: take the newest versions, whatever constraints.txt
    says."""
    roots_of = read_groups(root)
    if any(Requirement(one).name == "torch" for roots in roots_of.values() for one in roots):
        roots_of[CUDA_LIST] = cuda_needs()
    versions = root / "constraints.txt"
    packages = resolve([one for roots in roots_of.values() for one in roots], None if upgrade else versions)
    closures = {name: follow(roots, packages) for name, roots in roots_of.items()}
    needs: Closure = {}
    for closure in closures.values():
        for name, pythons in closure.items():
            needs.setdefault(name, set()).update(pythons)
    hashes = find_hashes({packages[name].name: (packages[name].version, pythons) for name, pythons in needs.items() if name != "torch"})
    lines = [f"{packages[name].name}=={packages[name].version.partition('+')[0]}\n" for name in sorted(needs)]
    versions.write_text(VERSIONS + "".join(lines), encoding="utf-8")
    folder = root / "requirements"
    folder.mkdir(exist_ok=True)
    core = closures["core"].keys()
    installed_before = {"core": set[str](), "build": set[str](), CUDA_LIST: core | closures.get("models", {}).keys()}
    for group, closure in closures.items():
        # A list leaves out what is installed anyway: the core for every extra, and `models` for CUDA's libraries. No list has torch.
        names = sorted(closure.keys() - {"torch"} - installed_before.get(group, core))
        text = "".join(entry(packages[name], needs[name], hashes[packages[name].name]) for name in names)
        (folder / f"{group}.txt").write_text(heading(group) + text, encoding="utf-8")
    for group, pinned in pin_apart(root, roots_of["core"]).items():
        (folder / f"{group}.txt").write_text(heading(group) + pinned, encoding="utf-8")
    if "torch" in needs:
        table = folder / TABLE.name
        last_table = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
        table.write_text(json.dumps(torch_table(last_table), indent=2) + "\n", encoding="utf-8")


def read_groups(root: Path) -> dict[str, list[str]]:
    """The requirements of each list, by its name: the tools of the build, the core and every extra."""
    return {"build": list(BUILD), **groups.read_groups(root)}


def pin_apart(root: Path, core: Iterable[str]) -> dict[str, str]:
    """The text of each list of packages that stand apart, by the name of the list. It has, for each Python, the oldest version that the
    Python can have of each package. core: the requirements of the core. Raises LockError."""
    lists = {}
    for group, roots in {**groups.read_apart(root), OLDEST_LIST: core}.items():
        pythons: dict[tuple[str, str], set[str]] = {}
        for python in PYTHONS:
            finder = make_finder(python)
            for requirement in map(Requirement, roots):
                pythons.setdefault((requirement.name, oldest(finder, requirement, python)), set()).add(python)
        lists[group] = "".join(
            entry(LockedPackage(name, version, ()), pythons_of, find_hashes({name: (version, pythons_of)})[name])
            for (name, version), pythons_of in sorted(pythons.items())
        )
    return lists


def oldest(finder: PackageFinder, requirement: Requirement, python: str) -> str:
    """The oldest version that fits a requirement, has a wheel for this Python and was not yanked. Raises LockError if there is none."""
    candidates = (one for one in finder.find_all_candidates(requirement.name) if one.link.is_wheel and not one.link.is_yanked)
    versions = [one.version for one in candidates if requirement.specifier.contains(str(one.version))]
    if not versions:
        raise LockError(f"no version of {requirement} has a wheel for Python {python} on Linux x86-64.")
    return str(min(versions))


def resolve(roots: Iterable[str], constraints: Path | None) -> dict[str, LockedPackage]:
    """The packages that pip would install for `roots` on any of the Pythons, by canonical name. constraints: a file of versions that stay,
    or None.

    pip follows only the markers of the Python that it runs on. The additional needs of another Python are asked for in a further round, as
    if they stood in `roots`, until nothing is missing. Raises LockError if that does not end.
    """
    requirements = list(roots)
    for _ in range(ROUNDS):
        packages = _dry_run(requirements, constraints)
        unmet = sorted({one for python in PYTHONS for one in find_unmet(requirements, packages, python)})
        if not unmet:
            return packages
        requirements += unmet
    raise LockError(f"no versions fit Python {', '.join(PYTHONS)} at once: {', '.join(unmet)} is asked for and does not get in.")


def _dry_run(roots: Iterable[str], constraints: Path | None) -> dict[str, LockedPackage]:
    """The packages that pip would install for `roots` on the Python that it runs on, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--constraint={constraints}"] if constraints and constraints.exists() else []
        stand_ins = [stand_in(Path(folder))] if any(Requirement(one).name == "torch" for one in roots) else []
        words += [*map(str, stand_ins), *(one for one in roots if not stand_ins or Requirement(one).name != "torch")]
        metadata = _report(words)
    return {
        canonicalize_name(one["name"]): LockedPackage(one["name"], one["version"], tuple(one.get("requires_dist", ()))) for one in metadata
    }


def _report(words: Sequence[str]) -> list[dict[str, Any]]:
    """The metadata of the packages that pip would install. words: further arguments of `pip install`. Raises LockError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check"]
        command += ["--no-input", "--only-binary=:all:", f"--report={report}"]
        try:
            run([*command, *words])
        except CommandError as error:
            raise LockError(f"pip finds no versions that fit together:\n{error.tail()}") from error
        return [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def cuda_needs() -> list[str]:
    """The requirements of the build of torch for CUDA, by its own metadata."""
    (torch,) = _report([f"torch==={TORCH_CUDA}", "--no-deps"])
    return [one for one in torch.get("requires_dist", ()) if "extra ==" not in one]


def stand_in(folder: Path) -> Path:
    """Make a wheel without code that has the metadata of the installed CPU build of torch, and return its path: pip resolves with it,
    because that build is not on every index. Raises LockError if the build is not installed."""
    try:
        about = importlib.metadata.distribution("torch").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        about = None
    if about is None or f"\nVersion: {TORCH}\n" not in about:
        raise LockError(f"torch {TORCH} is not installed here: set up first (make setup-dev), where this build can be reached.")
    wheel = folder / f"torch-{TORCH}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(f"torch-{TORCH}.dist-info/METADATA", about)
        packed.writestr(f"torch-{TORCH}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: lock\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"torch-{TORCH}.dist-info/RECORD", "")
    return wheel


def follow(roots: Iterable[str], packages: Mapping[str, LockedPackage]) -> Closure:
    """All packages that `roots` need, with the Pythons that need each."""
    closure: Closure = {}
    for python in PYTHONS:
        for requirement in _walk(roots, packages, python):
            closure.setdefault(canonicalize_name(requirement.name), set()).add(python)
    return closure


def find_unmet(roots: Iterable[str], packages: Mapping[str, LockedPackage], python: str) -> list[str]:
    """Requirements that count on this Python, from `roots` down, and that `packages` lacks or has in a version that does not fit."""
    unmet = []
    for requirement in _walk(roots, packages, python):
        package = packages.get(canonicalize_name(requirement.name))
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            requirement.marker = None  # It is asked for on any Python.
            unmet.append(str(requirement))
    return unmet


def _walk(roots: Iterable[str], packages: Mapping[str, LockedPackage], python: str) -> list[Requirement]:
    """Every requirement that counts on this Python, from `roots` down; each package, and each of its extras, is followed once."""
    version = f"{python}.0"
    # The rest is as here: CPython on Linux x86-64.
    environment = {"python_version": python, "python_full_version": version, "implementation_version": version}
    waiting = [(Requirement(one), "") for one in roots]
    visited_extras: set[tuple[str, str]] = set()
    requirements = []
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        requirements.append(requirement)
        package = packages.get(canonicalize_name(requirement.name))
        for extra_name in ("", *requirement.extras):
            if package is not None and (package.name, extra_name) not in visited_extras:
                visited_extras.add((package.name, extra_name))
                waiting += [(Requirement(one), extra_name) for one in package.needs]
    return requirements


def find_hashes(versions: Mapping[str, tuple[str, set[str]]]) -> dict[str, list[str]]:
    """SHA-256 of the wheels of each package, by name. versions: by name, the version and the Pythons that need it. Raises LockError."""
    digests_by_name: dict[str, dict[str, str]] = {name: {} for name in versions}
    for python in PYTHONS:
        finder = make_finder(python)
        for name, (version, pythons) in versions.items():
            wheels = wheels_of(finder, name, version)
            if python in pythons and not wheels:
                raise LockError(
                    f"{name} {version} has no wheel for Python {python} on Linux x86-64: name another version in constraints.txt."
                )
            for link in wheels:
                digest = sha256_of(link)
                if digest is None:
                    raise LockError(f"the source of {link.filename} tells no SHA-256 of it.")
                if digests_by_name[name].setdefault(link.filename, digest) != digest:
                    raise LockError(f"two of pip's sources have different files named {link.filename}.")
    return {name: sorted(set(digests.values())) for name, digests in digests_by_name.items()}


def make_finder(python: str, *options: str) -> PackageFinder:
    """pip's finder of packages, as Python `python` would use it. It looks in pip's configured sources, or in those that `options` of pip
    name."""
    command = IndexCommand("index", "")
    parsed, _ = command.parse_args(["versions", "any", *options])
    with command.main_context():
        target = TargetPython(platforms=list(PLATFORMS), py_version_info=tuple(map(int, python.split("."))), implementation="cp")
        return command._build_package_finder(options=parsed, session=command._build_session(parsed), target_python=target)


def wheels_of(finder: PackageFinder, name: str, version: str) -> list[Link]:
    """The wheels of one version of a package that the finder's Python could take."""
    return [one.link for one in finder.find_all_candidates(name) if one.link.is_wheel and str(one.version) == version]


def sha256_of(link: Link) -> str | None:
    """The SHA-256 of a wheel: from its index, or of the file if it is on this machine; None if there is neither."""
    if link.hash_name == "sha256":
        return link.hash
    if link.is_file:
        with Path(link.file_path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return None


def torch_table(last_table: Mapping[str, Mapping[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """Hashes of torch by build and Python: of the CPU build, and of the build without a label, which is made for CUDA.

    last_table: its hashes stay for a build that cannot be reached from here; an empty list means that no hash is known."""
    table = {}
    for build in (TORCH, TORCH_CUDA):
        table[build] = {python: list(last_table.get(build, {}).get(python, [])) for python in PYTHONS}
        for python in PYTHONS:
            for finder in (make_finder(python), make_finder(python, "--index-url", TORCH_INDEX_URL, "--retries", "0")):
                digests = {digest for link in wheels_of(finder, "torch", build) if (digest := sha256_of(link))}
                if digests:
                    table[build][python] = sorted(digests)
                    break
    return table


def entry(package: LockedPackage, pythons: set[str], hashes: Iterable[str]) -> str:
    """The lines of one package in a list; with a marker unless all Pythons need it."""
    marker = "" if pythons == set(PYTHONS) else " ; " + " or ".join(f'python_version == "{python}"' for python in sorted(pythons))
    return f"{package.name}=={package.version}{marker}" + "".join(f" \\\n    --hash=sha256:{one}" for one in hashes) + "\n"


def heading(group: str) -> str:
    """The comment that begins a list."""
    subjects = {
        "build": "the build of the project installs",
        "core": "the client installs",
        OLDEST_LIST: "the client in the oldest versions that it takes installs",
        CUDA_LIST: "`--device cuda` installs beyond the extra `models`",
        **{name: f"`make {name}` installs apart from the environment" for name in groups.read_apart(ROOT)},
    }
    return LIST.format(what=subjects.get(group, f"the extra `{group}` installs beyond the core"))


if __name__ == "__main__":
    typer.run(main)
