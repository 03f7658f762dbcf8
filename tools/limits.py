"""Writes docs/limits.md from the table in the code, or with --check says whether the committed page is fresh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omnistage.link import limits

PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"

HEAD = f"""# Limits

What one request may hold. This page is made from `link/omnistage/link/limits.py` by `python tools/limits.py`; a test compares the two.

A request is looked at before it is parsed (`link/decoding.py`): a walk over the tags on the wire counts every field that repeats and stops
at the first element that is too much, because millions of empty elements fit into a few MiB and would become a GB of objects. What the
walk refuses is `BAD_REQUEST` with the name of the field, in a running session `PROTOCOL`. Up to 4,096 fields are walked over at
once, in about a millisecond; a message with more goes to a thread, one message at a time. Groups, which proto3 does not have, are refused.

## Sizes

| what | most |
|---|---|
| a request to a router for text only | {limits.TEXT_REQUEST_BYTES >> 20} MiB, or `--max-message-bytes` where that is less |
| a request to a router with a pipeline that takes media | `--max-message-bytes`, 64 MiB by default |
| a message to a stage | {limits.HOP_ROOM_BYTES >> 20} MiB above `--max-message-bytes`, for the route and what rebuilds a lost stage |
| fields of a request, at every depth, known or not | {limits.MAX_FIELDS:,} |
| characters of all messages of a request | {limits.MAX_TEXT_CHARACTERS:,} |
| calls at once at a router, of any kind | {limits.MAX_CALLS:,}; gRPC answers one more with RESOURCE_EXHAUSTED and without details |

A request above its size is refused by gRPC with RESOURCE_EXHAUSTED, without details, before any code of omnistage sees it.

## Counts

Elements of a field in all of a request, wherever in it they stand.

| field | most |
|---|---|
"""

BYTES_HEAD = """
## Lengths

Of one field of bytes.

| field | most |
|---|---|
"""


def page() -> str:
    counts = "".join(f"| `{field}` | {most:,} |\n" for field, most in limits.COUNTS.items())
    sizes = "".join(f"| `{field}` | {_size(most)} |\n" for field, most in limits.BYTES.items())
    return HEAD + counts + BYTES_HEAD + sizes


def _size(size: int | None) -> str:
    if size is None:
        return "the size of the request"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def main() -> int:
    """Writes or checks; exit status 1 when the committed page is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    fresh = page()
    if parser.parse_args().check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != fresh
        if stale:
            print("docs/limits.md is stale. Run: python tools/limits.py")
        return int(stale)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
