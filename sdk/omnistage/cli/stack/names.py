"""Names of pipelines: the one that is typed before what is served, and those by which people know its checkpoint.

A pipeline has the name that was typed for it, else that of its file, which for a checkpoint is the name of its family. If that would be the
name of two, each checkpoint gives its own name to its pipeline. The names of a checkpoint are further names of its pipeline in any case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.cli.show.fetch import hub_name
from omnistage.client.errors import BadRequestError
from omnistage.models.checkpoint.files import checkpoint_name
from omnistage.router.pipeline import MAX_NAME_CHARACTERS, split_name


@dataclass(frozen=True, slots=True)
class NamedPipeline:
    """A pipeline to serve, whose checkpoint is there. source: its name among the shipped ones, or its file. folder: of the checkpoint;
    None: the families' own. name: its own. names: those of its checkpoint, the best one first. may_change: the name is that of a family,
    and the checkpoint's would do too."""

    source: str
    folder: Path | None
    name: str
    names: tuple[str, ...] = ()
    may_change: bool = False


def split_word(word: str) -> tuple[str, str]:
    """Returns (NAME, WHAT) of a word [NAME=]WHAT; the name is empty if there is none. An existing path is a WHAT even if it has a "=", and
    so is a text with a slash before its "=". Raises BadRequestError for a bad name, and for a name alone."""
    name, source = split_name(word)
    prefix, equals, rest = source.partition("=")
    if name or not equals or "/" in prefix or Path(word).exists():
        return name, source
    example = f"{_as_name(prefix) or 'film'}={rest or 'DIR'}"
    rule = "a name has 1 to 64 of a-z 0-9 . _ - and begins with a letter or digit; after it stands what it names"
    raise BadRequestError.of("PIPELINE", f"{word}: {rule}, such as {example}")


def _as_name(text: str) -> str:
    """The name for a pipeline that is most like a text; empty: the text has no letter or digit of such a name."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:64].rstrip("-")


def names_of(text: str, folder: Path) -> tuple[str, ...]:
    """The names by which people know a checkpoint. Every client of the router may see them, so of a path that is not of the form OWNER/NAME
    they have the last part alone. text: the checkpoint as typed. folder: where it is."""
    hub = hub_name(text)
    short = (hub.repository, hub.repository.rpartition("/")[2], text) if hub else (folder.name,)
    names = dict.fromkeys((*short, checkpoint_name(folder)))
    return tuple(name for name in names if name.strip(".") and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS)


def with_own_names(pipelines: Sequence[NamedPipeline]) -> list[NamedPipeline]:
    """The pipelines, with the names of their checkpoints for those that would have the name of another one. Raises BadRequestError if two
    have the same name even so."""
    names = [one.name for one in pipelines]
    renamed: list[NamedPipeline] = []
    for one in pipelines:
        checkpoint = next(filter(None, (_as_name(name.rpartition("/")[2]) for name in one.names)), "")
        name = checkpoint if checkpoint and one.may_change and names.count(one.name) > 1 else one.name
        if name in [other.name for other in renamed]:
            advice = f"leave one out, or give it another name, such as {name[:62]}-2={one.folder or one.source}"
            raise BadRequestError.of("PIPELINE", f"there are two pipelines {name}: {advice}")
        renamed.append(replace(one, name=name))
    return renamed
