"""Writes captions of a spoken answer: a few of its words at a time, with the times at which they are spoken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from omnistage.client.events import SpokenWord

KINDS = {".srt": "SubRip", ".vtt": "WebVTT"}

MAX_CHARACTERS = 42
"""The most characters of one caption, as many as a line of subtitles has."""

LONGEST_PAUSE_S = 0.6
"""Longest pause between two words of one caption."""

ENDS = (".", "!", "?", "…", ":")


def write_captions(words: Sequence[SpokenWord], path: Path, kind: str) -> None:
    """Write the captions of an answer. kind: .srt or .vtt, which decides the format."""
    point, head = (",", "") if kind == ".srt" else (".", "WEBVTT\n\n")
    texts = (
        f"{number}\n{_time(caption[0].begin_s, point)} --> {_time(caption[-1].end_s, point)}\n{_line(caption, kind)}\n"
        for number, caption in enumerate(captions(words), 1)
    )
    path.write_text(head + "\n".join(texts), encoding="utf-8")


def captions(words: Sequence[SpokenWord]) -> Iterator[list[SpokenWord]]:
    """Yields the words of one caption after the other. A caption ends with a sentence, before a pause, or before it gets too long."""
    caption: list[SpokenWord] = []
    for word in words:
        if caption and (
            word.begin_s - caption[-1].end_s > LONGEST_PAUSE_S
            or caption[-1].text.rstrip("\"'”’)").endswith(ENDS)
            or len(_line([*caption, word], "")) > MAX_CHARACTERS
        ):
            yield caption
            caption = []
        caption.append(word)
    if caption:
        yield caption


def _line(caption: Sequence[SpokenWord], kind: str) -> str:
    """The text of a caption on one line; in WebVTT with escapes for characters that begin a tag or end the caption."""
    line = " ".join(" ".join(word.text.split()) for word in caption)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if kind == ".vtt" else line


def _time(seconds: float, point: str) -> str:
    """A time as HH:MM:SS and milliseconds. point: stands before the milliseconds."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
