"""The lists from which set-up installs agree with pyproject.toml, and `make lock` writes them. With pip itself and tiny wheels."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import lengths
from helpers.wheels import publish, use_only
from tools import lock, setup, torch_build
from tools.groups import PICTURES_PACKAGE, read_apart

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
ENTRY = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)(?: ; ([^\\]+?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
LINUX = "manylinux_2_28_x86_64"

# pip leaves the pages of an index in a folder to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*index.html:ResourceWarning")

PROJECT = """
[project]
name = "project"
dependencies = ["alpha>=1"]
[project.optional-dependencies]
more = ["beta[fast]>=1"]
"""


def read(path: Path) -> dict[str, tuple[str, str, list[str]]]:
    """The version, the marker and the hashes of every entry of a list, by canonical name; the list must hold nothing else."""
    text = "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if not line.startswith("#"))
    entries = list(ENTRY.finditer(text))
    assert "".join(entry[0] for entry in entries) == text
    return {canonicalize_name(one[1]): (one[2], one[3] or "", re.findall(r"[0-9a-f]{64}", one[4])) for one in entries}


def lists() -> Iterator[Path]:
    yield from sorted(setup.REQUIREMENTS.glob("*.txt"))


def apart() -> set[str]:
    """The lists of the packages that stand apart from the environment."""
    return {lock.OLDEST_LIST, *read_apart(setup.ROOT)}


def named(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def constraints(root: Path) -> dict[str, str]:
    """The pinned versions by name; nothing else may be there."""
    entries = [line for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert [line for line in entries if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in entries)}


def test_the_lists_hold_versions_and_hashes_and_no_addresses() -> None:
    assert {path.stem for path in lists()} == {*lock.read_groups(setup.ROOT), setup.CUDA_LIST, *apart()}
    assert all(hashes for path in lists() for _, _, hashes in read(path).values())


def test_the_versions_are_those_of_the_constraints() -> None:
    pinned = {name: version for path in lists() if path.stem not in apart() for name, (version, _, _) in read(path).items()}
    assert pinned | {"torch": torch_build.TORCH.partition("+")[0]} == constraints(setup.ROOT)


def test_the_lists_hold_what_pyproject_needs_and_no_more() -> None:
    """The check is for the Python that runs this, by the metadata of the installed packages; an extra that no test needs may be missing."""
    cuda = read(setup.list_of(setup.CUDA_LIST)).keys()
    here = [
        # The further needs of the build for CUDA have a list of their own.
        lock.LockedPackage(
            one.name, one.version, tuple(need for need in one.requires or () if one.name != "torch" or named(need) not in cuda)
        )
        for one in importlib.metadata.distributions()
    ]
    packages: dict[str, lock.LockedPackage] = {canonicalize_name(package.name): package for package in here}
    groups = lock.read_groups(setup.ROOT)
    core = read(setup.list_of("core")).keys()
    for group, roots in groups.items():
        if group == "torchao" and "torchao" not in packages:
            continue
        needed = {name for name, pythons in lock.follow(roots, packages).items() if PYTHON in pythons}
        listed = {name for name, (_, marker, _) in read(setup.list_of(group)).items() if not marker or Marker(marker).evaluate()}
        assert listed | core | {"torch"} == needed | core | {"torch"}, f"requirements/{group}.txt: make lock"


def test_what_stands_apart_is_in_the_versions_that_pyproject_names_and_for_every_python() -> None:
    for group, roots in {**read_apart(setup.ROOT), lock.OLDEST_LIST: lock.read_groups(setup.ROOT)["core"]}.items():
        text = setup.list_of(group).read_text(encoding="utf-8")
        for python in lock.PYTHONS:
            listed = [one for one in ENTRY.finditer(text) if not one[3] or Marker(one[3]).evaluate({"python_version": python})]
            packages: dict[str, lock.LockedPackage] = {canonicalize_name(one[1]): lock.LockedPackage(one[1], one[2], ()) for one in listed}
            assert len(packages) == len(listed) == len(roots)
            assert lock.find_unmet(roots, packages, python) == []


def test_every_version_fits_what_pyproject_asks_for() -> None:
    packages = {name: lock.LockedPackage(name, version, ()) for name, version in constraints(setup.ROOT).items()}
    roots = [one for roots in lock.read_groups(setup.ROOT).values() for one in roots]
    assert {python: lock.find_unmet(roots, packages, python) for python in lock.PYTHONS} == {python: [] for python in lock.PYTHONS}


def test_the_table_of_torch_has_a_place_for_every_python_and_a_hash_for_one() -> None:
    table = json.loads(torch_build.TABLE.read_text(encoding="utf-8"))
    assert torch_build.TORCH in table
    assert all(set(pythons) == set(lock.PYTHONS) for pythons in table.values())
    assert any(table[torch_build.TORCH].values())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source: what the project of this test needs, and a tool for its build."""
    folder = tmp_path / "index"
    use_only(folder, monkeypatch)
    monkeypatch.setattr(lock, "BUILD", ("tool",))
    publish(folder, "tool", "1.0")
    for minor in (11, 12, 13):
        publish(
            folder,
            "alpha",
            "1.0",
            tag=f"cp3{minor}-cp3{minor}-{LINUX}",
            needs=('gamma>=2 ; python_version >= "3.12"', 'winonly ; os_name == "nt"'),
        )
    publish(folder, "beta", "1.0", needs=("alpha", 'delta ; extra == "fast"', 'epsilon ; extra == "slow"'), extra="fast")
    publish(folder, "gamma", "2.0")
    publish(folder, "delta", "1.0", tag=f"cp311-abi3-{LINUX}")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    return root


def versions(root: Path) -> dict[str, dict[str, str]]:
    return {path.stem: {name: found[0] for name, found in read(path).items()} for path in (root / "requirements").glob("*.txt")}


@lengths.TOOLING
def test_every_wheel_of_every_python_is_written_with_its_hash(index: Path, project: Path) -> None:
    lock.lock(project, upgrade=False)
    assert versions(project) == {
        "build": {"tool": "1.0"},
        "core": {"alpha": "1.0", "gamma": "2.0"},
        "more": {"beta": "1.0", "delta": "1.0"},
        "oldest": {"alpha": "1.0"},
    }
    core = read(project / "requirements" / "core.txt")
    assert set(core["alpha"][2]) == {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (index / "alpha").glob("*.whl")}
    assert len(core["alpha"][2]) == 3
    assert core["gamma"][1] == 'python_version == "3.12" or python_version == "3.13"'
    assert constraints(project) == {"alpha": "1.0", "beta": "1.0", "delta": "1.0", "gamma": "2.0", "tool": "1.0"}


@lengths.TOOLING
def test_an_extra_that_names_another_one_has_all_of_it(index: Path, project: Path) -> None:
    (project / "pyproject.toml").write_text(PROJECT + 'all = ["Project[most]"]\nmost = ["project[more]", "epsilon>=1"]\n')
    publish(index, "epsilon", "1.0")
    assert lock.read_groups(project)["all"] == ["beta[fast]>=1", "epsilon>=1"]
    lock.lock(project, upgrade=False)
    written = versions(project)
    assert written["more"] == {"beta": "1.0", "delta": "1.0"}
    assert written["all"] == written["most"] == {"beta": "1.0", "delta": "1.0", "epsilon": "1.0"}


@lengths.TOOLING
def test_the_package_that_is_built_from_here_is_sought_nowhere(index: Path, project: Path) -> None:
    (project / "pyproject.toml").write_text(PROJECT + f'models = ["{PICTURES_PACKAGE}>=0.1", "beta"]\n')
    lock.lock(project, upgrade=False)
    assert versions(project)["models"] == {"beta": "1.0"} and PICTURES_PACKAGE not in constraints(project)


@lengths.TOOLING
def test_what_the_build_of_torch_for_cuda_needs_beyond_the_other_is_a_list_of_its_own(index: Path, project: Path) -> None:
    (project / "pyproject.toml").write_text(PROJECT + f'models = ["torch=={torch_build.TORCH_CUDA}"]\n')
    common = [Requirement(one).name for one in importlib.metadata.requires("torch") or () if "extra ==" not in one]
    for name in common:
        publish(index, name.replace("-", "_"), "99.0")
    publish(
        index,
        "torch",
        torch_build.TORCH_CUDA,
        needs=(*common, 'nvidia-cublas==13.1 ; platform_system == "Linux"', 'optree ; extra == "optree"'),
    )
    publish(index, "nvidia_cublas", "13.1", needs=("cuda-pathfinder",))
    publish(index, "cuda_pathfinder", "1.0")
    lock.lock(project, upgrade=False)
    written = versions(project)
    assert written["cuda"] == {"cuda-pathfinder": "1.0", "nvidia-cublas": "13.1"}
    assert written["models"].keys() == {canonicalize_name(name) for name in common}
    assert {"nvidia-cublas", "cuda-pathfinder", "torch"} <= constraints(project).keys()


@lengths.TOOLING
def test_versions_stay_until_they_are_upgraded(index: Path, project: Path) -> None:
    lock.lock(project, upgrade=False)
    for name in ("beta", "gamma"):
        publish(index, name, "3.0")
    lock.lock(project, upgrade=False)
    assert versions(project)["more"] == {"beta": "1.0", "delta": "1.0"}
    assert versions(project)["core"]["gamma"] == "2.0"
    lock.lock(project, upgrade=True)
    assert versions(project)["more"] == {"beta": "3.0"}
    assert versions(project)["core"]["gamma"] == "3.0"


@lengths.TOOLING
def test_what_stands_apart_has_the_oldest_version_that_each_python_can_have(index: Path, project: Path) -> None:
    """Newer versions stand beside it, an older one has no wheel that every Python can take, and one was taken back; constraints.txt does
    not have it."""
    (project / "pyproject.toml").write_text(PROJECT.replace("alpha>=1", "alpha>=0.4") + '[dependency-groups]\nprotos = ["beta==0.9"]\n')
    for version in ("0.3", "0.5"):
        publish(index, "alpha", version)
    for minor in (11, 12):
        publish(index, "alpha", "0.6", tag=f"cp3{minor}-cp3{minor}-{LINUX}")
    publish(index, "alpha", "0.7")
    page = index / "alpha" / "index.html"
    page.write_text(page.read_text().replace('<a href="alpha-0.5', '<a data-yanked="broken" href="alpha-0.5'))
    publish(index, "beta", "0.9", needs=("alpha<0.4",))
    lock.lock(project, upgrade=False)
    oldest = [one.groups()[:3] for one in ENTRY.finditer((project / "requirements" / "oldest.txt").read_text())]
    assert oldest == [
        ("alpha", "0.6", 'python_version == "3.11" or python_version == "3.12"'),
        ("alpha", "0.7", 'python_version == "3.13"'),
    ]
    assert versions(project)["protos"] == {"beta": "0.9"}
    assert constraints(project)["alpha"] == "1.0" and constraints(project)["beta"] == "1.0"


@lengths.TOOLING
def test_a_package_without_a_wheel_for_one_python_is_named(index: Path, project: Path) -> None:
    (index / "alpha" / "index.html").write_text(
        "".join(f'<a href="{one.name}">{one.name}</a>' for one in (index / "alpha").glob("*cp311*"))
    )
    with pytest.raises(lock.LockError, match=r"alpha 1\.0 has no wheel for Python 3\.12"):
        lock.lock(project, upgrade=False)
    assert not (project / "constraints.txt").exists()


@lengths.TOOLING
def test_two_files_of_one_name_are_not_both_trusted(index: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "other", "beta", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "other" / "beta"))
    with pytest.raises(lock.LockError, match=r"different files named beta-1\.0-py3-none-any\.whl"):
        lock.lock(project, upgrade=False)


@lengths.TOOLING
def test_a_known_hash_of_torch_stays_where_its_index_is_out_of_reach(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lock, "TORCH_INDEX_URL", (tmp_path / "not there").as_uri())
    here = publish(index, "torch", torch_build.TORCH, tag=f"cp312-cp312-{LINUX}")
    table = lock.torch_table({torch_build.TORCH: {"3.11": ["a" * 64], "3.12": ["b" * 64]}})
    assert table[torch_build.TORCH] == {"3.11": ["a" * 64], "3.12": [hashlib.sha256(here.read_bytes()).hexdigest()], "3.13": []}
