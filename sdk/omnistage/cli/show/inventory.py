"""Lists the models on this machine: those that were fetched, the pipelines that serve them, and their inputs and outputs. It fetches and
starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnistage.cli.stack.layout import DEFAULT_PIPELINES
from omnistage.models.diffusers.family import model_directory as picture_directory
from omnistage.models.fetch.own_files import cache_directory
from omnistage.models.fetch.packages import MANIFEST
from omnistage.models.registry import find_gaps, recognise
from omnistage.models.reports import LoadError
from omnistage.router.pipeline import PipelineFile, load_pipeline, shipped_pipelines


@dataclass(frozen=True, slots=True)
class Here:
    """One model. name: the word that `omnistage serve` takes, of a pipeline or of a checkpoint at a hub. bytes: its size on the disk; 0: it
    is not fetched yet. pipelines: the pipelines that serve it, the shortest name first. takes, gives: inputs and outputs of all these
    pipelines together."""

    name: str
    family: str
    bytes: int
    is_here: bool
    pipelines: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def models_here() -> list[Here]:
    """The families' own models, fetched or not, and the models that are in a hub's cache."""
    return [*_own_models(), *_of_hub()]


def _own_models() -> Iterator[Here]:
    """Yields the own models of the default pipelines. The model for pictures is part of a package; the others are fetched."""
    fetched = {json.loads(manifest.read_text())["name"]: manifest.parent for manifest in cache_directory().glob(f"*/{MANIFEST}")}
    for pipeline in map(load_pipeline, DEFAULT_PIPELINES):
        family = pipeline.stages[0].family
        folder = fetched.get(family)
        if family == "diffusers":
            with suppress(LoadError):
                folder = picture_directory()
        yield _model(pipeline.name, family, 0 if folder is None else _size(folder), folder is not None, [pipeline])


def _of_hub() -> Iterator[Here]:
    """Yields the models in a hub's cache that belong to one of our families."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ModuleNotFoundError:  # Without this package nothing of a hub can have been fetched.
        return
    with suppress(CacheNotFound):
        for repository in sorted(scan_cache_dir().repos, key=lambda one: one.repo_id):
            for revision in repository.revisions:
                with suppress(LoadError):  # Other programs keep models there that belong to no family of ours.
                    family = recognise(revision.snapshot_path, called=repository.repo_id)
                    at = "" if "main" in revision.refs else f"@{next(iter(revision.refs), revision.commit_hash)}"
                    yield _model(f"{repository.repo_id}{at}", family, revision.size_on_disk, True, _serving(family, revision.snapshot_path))


def _model(name: str, family: str, size: int, is_here: bool, pipelines: list[PipelineFile]) -> Here:
    """One model, with the inputs and outputs of its pipelines."""
    takes = dict.fromkeys(medium for pipeline in pipelines for medium in pipeline.could_take)
    gives = dict.fromkeys(port for pipeline in pipelines for port in pipeline.outputs)
    return Here(name, family, size, is_here, tuple(pipeline.name for pipeline in pipelines), tuple(takes), tuple(gives))


def _serving(family: str, folder: Path) -> list[PipelineFile]:
    """The shipped pipelines whose stages are all of one family and have their models in a folder, the shortest name first."""
    pipelines = [one for one in map(load_pipeline, shipped_pipelines()) if not find_gaps(folder, one.models)]
    return sorted((one for one in pipelines if {stage.family for stage in one.stages} == {family}), key=lambda one: len(one.name))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
