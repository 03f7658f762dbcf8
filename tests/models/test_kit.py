"""The names that a family of another package imports: each is where `omnistage.models.kit` says, and loads no more than it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from omnistage.models import kit
from omnistage.models.checkpoint.revision import revision
from omnistage.models.text.answer import AnswerAssembler


def test_type_checkers_and_python_find_the_same_names() -> None:
    (block,) = (node for node in ast.parse(Path(kit.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    seen: defaultdict[str, list[str]] = defaultdict(list)
    for one in block.body:
        assert isinstance(one, ast.ImportFrom) and one.module
        seen[one.module] += [name.name for name in one.names]
    assert dict(seen) == {module: list(names) for module, names in kit._NAMES.items()}


def test_each_name_is_there() -> None:
    assert kit.AnswerAssembler is AnswerAssembler and kit.revision is revision
    for name in kit._PLACES:
        assert getattr(kit, name) is not None
        assert name in dir(kit)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = kit.Nothing


def test_the_entry_of_a_family_loads_no_torch() -> None:
    program = "import sys\nfrom omnistage.models.kit import Family, Mark, ModelEntry\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_old_places_have_the_same_names() -> None:
    from omnistage.models.common import answer, requests
    from omnistage.models.common import revision as old_revision

    assert answer.AnswerAssembler is kit.AnswerAssembler and answer.answer_pieces is kit.answer_pieces
    assert requests.check_parts is kit.check_parts and requests.refuse_unfit is kit.refuse_unfit
    assert old_revision.revision is kit.revision and old_revision.compute_on_thread is kit.compute_on_thread
