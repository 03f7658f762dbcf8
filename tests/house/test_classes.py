"""One word, one thing: who searches for the name of a public class finds one class, and its own file first."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools import near

ROOT = Path(__file__).resolve().parents[2]

MODELS = "models/omnistage/models/"

FAMILIES = (("qwen2_5_omni/", "qwen3_omni/", "encoders/", "options.py"), ("tiny/qwen2_5_omni/", "tiny/qwen3_omni/"))
"""Places in which one name may come again: sister families, which make the same part of one kind of model, each in its own way, and the
base of both in encoders/ or options.py. The files of sisters never import each other's."""

ENDS = {f"{MODELS}interface.py", f"{MODELS}ports.py", "sdk/omnistage/client/events.py"}
MESSAGES = {"Alignment", "SpokenWord", "TokenLogprob"}
"""Messages of chunk.proto: the models make them, and the client reads the same ones."""


def is_excused(name: str, files: Iterable[str]) -> bool:
    """Whether these files may each have a class of this name."""
    found = sorted(files)
    if set(found) <= ENDS and len(found) == 2:
        return name in MESSAGES
    folders = [{f"{MODELS}{one}" for one in sisters if any(file.startswith(f"{MODELS}{one}") for file in found)} for sisters in FAMILIES]
    return any(len(each) == len(found) and all(file.startswith(tuple(each)) for file in found) for each in folders)


def classes(root: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """The files of each public class, by its name. A file is there once for each class of that name."""
    found = defaultdict(list)
    for file in sorted(files):
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(file)
    return found


def homonyms(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: files for name, files in found.items() if len(files) > 1 and not is_excused(name, files)}


def test_no_name_stands_for_two_classes() -> None:
    files = [file for file in near.all_files(ROOT) if file.endswith(".py") and not file.startswith("sdk/omnistage/v1/")]
    assert len(files) > 1000
    assert not homonyms(classes(ROOT, files))


def test_a_second_class_of_a_name_is_seen(tmp_path: Path) -> None:
    for name, text in (
        ("one.py", "class Plan: ...\n"),
        ("two.py", "def make():\n    class Plan: ...\n"),
        ("three.py", "class Line: ...\n"),
    ):
        (tmp_path / name).write_text(text)
    assert homonyms(classes(tmp_path, ("one.py", "two.py", "three.py"))) == {"Plan": ["one.py", "two.py"]}


def test_sisters_may_share_a_name_and_strangers_may_not() -> None:
    qwen2_5, qwen3, encoders = (f"{MODELS}{folder}/config.py" for folder in ("qwen2_5_omni", "qwen3_omni", "encoders"))
    assert is_excused("AudioConfig", (qwen2_5, qwen3, encoders))
    assert is_excused("WaveConfig", (qwen2_5, qwen3))
    assert not is_excused("AudioConfig", (qwen2_5, qwen2_5)), "twice in one family"
    assert not is_excused("AudioConfig", (qwen2_5, f"{MODELS}smol/config.py"))
    assert not is_excused("AudioConfig", (qwen2_5, qwen3, "engine/omnistage/engine/config.py"))
    interface, client = f"{MODELS}interface.py", "sdk/omnistage/client/events.py"
    assert is_excused("SpokenWord", (interface, client))
    assert not is_excused("Progress", (interface, client))
