"""The Python that docs/client.md and README.md show is Python that a strict type checker takes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omnistage.client import AsyncOmni, Omni


class Player:
    def write(self, samples: NDArray[np.float32]) -> None: ...


player = Player()
omni = Omni(address="127.0.0.1:50050")
"""


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/client.md", "README.md"])
def test_snippets_have_types(name: str, tmp_path: Path) -> None:
    found = snippets(ROOT / name)
    assert found
    paths = []
    for number, snippet in enumerate(found):
        is_async = any(isinstance(node, ast.AsyncWith) for node in ast.walk(ast.parse(snippet)))
        body = "async def main() -> None:\n" + "".join(f"    {line}\n" for line in snippet.splitlines()) if is_async else snippet
        paths.append(tmp_path / f"snippet_{number}.py")
        paths[-1].write_text(PRELUDE + body)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
