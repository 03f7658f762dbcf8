"""Names of pictures: short, of the words of the prompt, and each for one call only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnistage.cli.make.files import new_name, slug


def test_a_name_is_held_until_its_call_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with new_name("A hill", ".png", [Path()]) as first, new_name("a HILL!", ".png", [Path()]) as second:
        assert (first, second) == (Path("hill.png"), Path("hill-2.png"))
    assert not [*tmp_path.iterdir()]
    with new_name("A hill", ".png", [Path()]) as again:
        assert again == first


class ReadTogether(list[Path]):
    """Folders of which the first reading ends for all calls at the same time."""

    def __init__(self, folder: Path, barrier: threading.Barrier) -> None:
        super().__init__([folder])
        self._barriers = [barrier]

    def __iter__(self) -> Iterator[Path]:
        yield from super().__iter__()
        if self._barriers:
            self._barriers.pop().wait(20)


def test_calls_that_find_the_folder_empty_at_the_same_time_get_a_name_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = 20
    barrier = threading.Barrier(calls)

    def taken_name() -> str:
        with new_name("A hill", ".png", ReadTogether(Path(), barrier)) as path:
            barrier.wait(20)
        return path.name

    with ThreadPoolExecutor(calls) as pool:
        taken = [future.result() for future in [pool.submit(taken_name) for _ in range(calls)]]
    assert sorted(taken) == sorted(["hill.png", *(f"hill-{number}.png" for number in range(2, calls + 1))])


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("A photo of a cat wearing a hat", "photo-of-a-cat-wearing-a-hat"),
        ("a photo of the cat that is wearing a hat", "photo-of-the-cat-that-is"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf *", "rf"),
        ("The", "the"),
        ("🙂 \x1b[2J\u202e", "2j"),
        ("🙂", "picture"),
        ("Grüße, Œuvre", "grüße-œuvre"),
        ("हिन्दी में", "हिन्दी-में"),
        ("火山" * 40, "火山" * 7),
        ("x" * 300, "x" * 28),
        ("CON\x00\nnul", "con-nul"),
    ],
)
def test_names_of_prompts_are_short_and_of_letters(prompt: str, named: str) -> None:
    assert slug(prompt) == named
