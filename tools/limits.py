"""Writes docs/limits.md from the table in the code, or with --check says whether the committed page is fresh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from omnistage.client.request import MAX_TEXT_CHARACTERS
from omnistage.gateway import fetching, film_jobs, guard, port
from omnistage.gateway.body import MAX_KEYS
from omnistage.gateway.chat_schema import MAX_CHOICES, MAX_STOPS, MAX_TEXTS
from omnistage.gateway.failure import MOST_CHARACTERS as ERROR_CHARACTERS
from omnistage.gateway.kept import KEPT_S
from omnistage.gateway.messages import MAX_PARTS
from omnistage.gateway.pictures import FILES_BYTES
from omnistage.gateway.pictures_schema import MOST_PICTURES
from omnistage.gateway.responses_schema import MAX_METADATA
from omnistage.gateway.settings import GatewaySettings
from omnistage.gateway.transcripts import TRANSCRIPTS_BYTES
from omnistage.host.descriptors import WANTED as DESCRIPTORS
from omnistage.host.metrics_page import MAX_VISITORS, SILENCE_S
from omnistage.models.media import hidden_work
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.preprocessing import MOST_ASPECT, FilmPreprocessing
from omnistage.router.admission import STALLED_S, WAIT_S
from omnistage.router.clients import SECRET_ID_CHARACTERS
from omnistage.router.gate import CALLS_SHARE, MAX_HEALTH, MAX_OPEN, REQUEST_LIMIT_S
from omnistage.router.intake import ALL_REPLAY_BYTES, REPLAY_BYTES, WINDOW
from omnistage.router.places import MAX_WAITING, MAX_WAITING_EACH
from omnistage.router.settings import RouterSettings
from omnistage.router.turns import LARGE_SHARE, MAX_LARGE, TURN_LIMIT_S
from omnistage.wire import limits
from omnistage.wire.channel import HANDSHAKE_LIMIT_MS, IDLE_LIMIT_MS, MAX_CONNECTIONS
from omnistage.wire.decoding import FIELDS_AT_ONCE


def _default(setting: str) -> Any:
    """The default of an option of the router or of the gateway."""
    return (RouterSettings.model_fields | GatewaySettings.model_fields)[setting].default


PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"

_BODIES = f"{guard.BODIES_BYTES >> 20} MiB; {guard.BODIES_SHARE:g} of that from one host"
_UNREAD = f"time in which a client reads less than {port.LEAST_READ_BYTES >> 10} KiB of its answer"

_CHUNKS = f"{port.TINY_CHUNKS:,} of any size; chunks beyond these must have at least {port.LEAST_CHUNK_BYTES} bytes on average"

_FIELDS = "fields of a request, known or unknown; fields inside a message that can hold neither bytes nor a repeated field do not count"

HTTP = f"""## HTTP

These are the limits of the gateway ([http.md](http.md)); the router behind it has its own. If a request is refused, its
client gets the error at once and has {port.HEAD_LIMIT_S:g} s to send the rest of the request. A gateway whose process may open
fewer than {port.LEAST_DESCRIPTORS} descriptors does not start.

| what | most | beyond it |
|---|---|---|
| connections at once | as above; {port.HOST_SHARE:g} of them from one host, or one IPv6 network of 64 bits | closed |
| head of a request | {port.HEAD_BYTES >> 10} KiB | 400 or 431 |
| time for a head to arrive | {port.HEAD_LIMIT_S:g} s | closed |
| time between two requests on a connection | {port.KEPT_LIMIT_S} s | closed |
| chunks of a body | {_CHUNKS} | 400, closed |
| body of a request | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default | 413 |
| time for a body to arrive | {guard.BODY_LIMIT_S:g} s | 408 |
| signs that JSON is made of (`,` `:` `[` `{{`) in a body | {guard.MAX_PARTS:,} | 400 |
| keys of a JSON object whose fields this interface names (the body, a message, a tool; not `metadata`) | {MAX_KEYS} | 400 |
| characters of a field that is text, and of all messages together | {MAX_TEXT_CHARACTERS:,} | 400 |
| parts of all messages together | {MAX_PARTS:,} | 400 |
| texts in `stop`, in `choice`; entries of `metadata` | {MAX_STOPS}, {MAX_TEXTS:,}, {MAX_METADATA} | 400 |
| all bodies that are read or worked on, plus {guard.PART_BYTES} bytes for each `,` `:` `[` `{{` in them | {_BODIES} | 503, `OVERLOADED` |
| time for an answer | `--session-limit`, {_default("session_limit"):g} s by default | 503, `DEADLINE` |
| {_UNREAD} | {port.UNREAD_LIMIT_S:g} s | closed; the router may end the answer sooner |
| text of an error | {ERROR_CHARACTERS:,} characters | cut |
| answers of one request (`n`), in chat and of pictures | {MAX_CHOICES}, {MOST_PICTURES} | 400 |
| time for all media that a request names by URLs | {fetching.LIMIT_S:g} s; together they may be as large as a body | 400 |
| media that were fetched, of all requests together | {fetching.REQUESTS} times a body | 503, `OVERLOADED` |
| pictures that the gateway keeps for its URLs | {FILES_BYTES >> 20} MiB, for {KEPT_S / 60:g} minutes | the oldest go |
| films that wait or are made | `--video-jobs`, {_default("video_jobs")}; {film_jobs.SHARE} of them of one client | 503, `OVERLOADED` |
| films that are made at once | `--video-runs`, {_default("video_runs")} | wait |
| bytes of all films | `--video-bytes`, {_default("video_bytes") >> 30} GiB | the oldest are deleted |
| time that a film is kept | `--video-kept`, {_default("video_kept") / 3600:g} hours | deleted |
| films and failures that are kept | {film_jobs.MOST_KEPT:,} | the oldest are deleted |
| texts of spoken answers that a request may name by an id | {TRANSCRIPTS_BYTES >> 20} MiB, {_KEPT} | the oldest are deleted |

"""

HEAD = f"""# Limits

This page lists the limits of a request and of a server. `python tools/limits.py` makes the page from the table in
`wire/omnistage/wire/limits.py` and from settings and constants in the code; a test compares the page with them.

A server looks at the bytes of a request before it parses them (`wire/decoding.py`). It walks over the tags, counts
every repeated field, and stops at the first element above a limit: millions of empty elements fit into a few MiB and
would become a GB of objects. A refused request gets `BAD_REQUEST` with the name of the field; in a running session it
gets `PROTOCOL`. The event loop itself walks over up to {FIELDS_AT_ONCE:,} fields, in about a millisecond; a message with more goes
to a thread, one message at a time. At a router clients take turns on this thread: {MAX_LARGE} large requests may wait,
at most {LARGE_SHARE:g} of them from one client, for at most {TURN_LIMIT_S:g} s; further requests get `OVERLOADED`. Groups, which proto3
does not have, are refused.

## Sizes

| what | most |
|---|---|
| a request to a router for text only | {limits.TEXT_REQUEST_BYTES >> 20} MiB, or `--max-message-bytes` if that is less |
| a request to a router with a pipeline that takes media | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default |
| a message to a stage | {limits.HOP_ROOM_BYTES >> 20} MiB above `--max-message-bytes`, for the route and what rebuilds a lost stage |
| {_FIELDS} | {limits.MAX_FIELDS:,} |
| characters of all messages of a request | {limits.MAX_TEXT_CHARACTERS:,} |
| characters of all messages, at a model | a model may take less: the default Thinker 65,536, because its context has 8,192 tokens |
| calls at once at a router, of any kind | {limits.MAX_CALLS:,}; gRPC answers one more with RESOURCE_EXHAUSTED and without details |
| calls at once at a router, without health checks | {MAX_OPEN:,}, {CALLS_SHARE:g} of them from one client; one more is `OVERLOADED` |
| health checks at once, and as many watches of the health | {MAX_HEALTH:,}, {CALLS_SHARE:g} of them from one client |
| time for a request to arrive at a router | {REQUEST_LIMIT_S:g} s; then the call is `BAD_REQUEST` |
| chunks that a client of Converse may be ahead of the first stage, all ports of a turn together | {WINDOW}, but 2 for each port at least |
| streamed media that a router keeps for a replay | {REPLAY_BYTES >> 20} MiB of a turn, {ALL_REPLAY_BYTES >> 20} MiB in all |

Streamed media do not count as a part of a request; each model has its own limit for them ([media.md](media.md)). If a
request is too large, gRPC refuses it with RESOURCE_EXHAUSTED, without details, before any code of omnistage sees it.

## Connections

These limits hold for each server, a router or a stage, even before a call comes.

| what | most |
|---|---|
| connections at once | {MAX_CONNECTIONS:,}, or half of its descriptors; one more is closed |
| descriptors | what the system allows (the hard limit, which `ulimit -Hn` shows), up to {DESCRIPTORS:,} |
| time until a connection says that it speaks HTTP/2 | {HANDSHAKE_LIMIT_MS / 1000:g} s; then the connection is closed |
| time of a connection without a call | {IDLE_LIMIT_MS / 1000:g} s; then it is closed, and its channel makes a new one with the next call |
| visitors of a page of metrics at once | {MAX_VISITORS}; one more takes the place of the visitor that has been silent for longest |
| time in which a visitor of that page sends nothing | {SILENCE_S:g} s |

The other half of the descriptors is for everything else: the log, the metrics, connections to other servers, files that
are put aside, processes that decode. So a server goes on serving earlier connections while strangers hold all others.
[security.md](security.md#what-a-gateway-has-to-bound) says how a proxy can bound connections by client.

{HTTP}## Places

A router runs as many answers at once as all replicas of its scarcest stage take together (`max_sessions` of each), or
as many as `--max-sessions` says. A replica that several pipelines share counts once. `router/places.py` decides which
client gets a place:

- The metadata key `x-api-key` tells clients apart. Without a key the host does, or, for IPv6, the network of 64 bits.
  The router checks no keys: if strangers can reach it, put a gateway before it that checks them. If a gateway passes no
  keys on, all clients behind it are one client. `api_key=`, `as_client(key)` or `--api-key` give a key
  ([client.md](client.md#who-asks)); a key is no login.
- One client holds at most `--client-share` of the places ({_default("client_share"):g} by default), a second client
  at most the same share of the rest, and so on. A client that holds nothing gets any free place. `Omni` starts its
  private stack with a share of 1.
- If all places are taken, a client that holds less than an equal share may wait, for at most {WAIT_S:g} s. At most {MAX_WAITING_EACH}
  requests of one client wait, and {MAX_WAITING} of all clients together. A free place goes to the client that holds the fewest
  places; among equals, to the client that has waited longest. So a client that holds nothing gets a place at the latest
  when as many places have become free as requests waited before its own. All other requests get `OVERLOADED` at once,
  with a delay.
- If a client leaves its answer unread for {STALLED_S:g} s and another client waits, it loses the answer (`CLIENT_STALLED`). If no
  client waits, it loses the answer after `--stall-limit` ({_default("stall_limit"):g} s by default).

A request with a `request_id` takes the place of the older call with the same id, if both calls must come from the same
client. That is so in three cases: both have the same `x-api-key`; they have no key, and the id has at least
{SECRET_ID_CHARACTERS} characters, which no stranger can guess (the Python client sends a random UUID); or they have no key and came
over the same connection.

## Counts

The table has the most elements of a field, counted over one whole request.

| field | most |
|---|---|
"""

BYTES_HEAD = """
## Lengths

The table has the most bytes of one field.

| field | most |
|---|---|
"""


_MEDIA = MediaLimits()
_FILM = FilmPreprocessing()
_PICTURE_TIME = (
    f"{_MEDIA.picture_least_s:g} s, and {_MEDIA.megapixel_s:g} s for a million pixels, and {_MEDIA.picture_mebibyte_s:g} s for a MiB"
)
_SOUND_TIME = f"{_MEDIA.sound_least_s:g} s, and {_MEDIA.sound_mebibyte_s:g} s for a MiB"

MEDIA = f"""
## Media

A Thinker that sees and hears has these limits for one picture, sound or film
(`models/omnistage/models/media/limits.py`), in addition to those of the tables above. It checks size, pixels, seconds and
frames in the header before it decodes anything, and again while it decodes, because headers lie. A medium above a limit
gets `BAD_REQUEST` with the field of its part, its own value and the limit. So does a medium that cannot be decoded, or
whose decoding takes too long or too much memory, or ends its process; no other request suffers.

| | picture | sound | film |
|---|---|---|---|
| size of the file | {_MEDIA.picture_bytes >> 20} MiB | {_MEDIA.sound_bytes >> 20} MiB | {_MEDIA.film_bytes >> 20} MiB |
| pixels of a picture, or of each frame of a film | {_MEDIA.picture_pixels:,} | | {_MEDIA.film_pixels:,} |
| length | | {_MEDIA.sound_s:g} s, also of the sound of a film | {_MEDIA.film_s:g} s and {_MEDIA.film_frames:,} frames |
| samples per second, channels | | {_MEDIA.sound_rate_hz:,}, {_MEDIA.sound_channels} | {_MEDIA.sound_rate_hz:,}, {_MEDIA.sound_channels} |
| time to decode a medium, on the clock | {_MEDIA.picture_time_s:g} s | {_MEDIA.sound_time_s:g} s | {_MEDIA.film_time_s:g} s |
| processor time to decode a medium | {_PICTURE_TIME} | {_SOUND_TIME} | |

A decoded medium has at most {_MEDIA.result_bytes >> 20} MiB, and the process that decodes has {_MEDIA.memory_bytes >> 20} MiB of address
space. The limit of processor time is at least five times the time that the slowest format took on one core of today,
and a busy machine takes none of it away. One side of a picture may be at most {MOST_ASPECT} times as long as the other.
A model sees {_FILM.fps:g} frames a second of a film, at most {_FILM.max_frames}, and no more than it has tokens for
([qwen2_5_omni.md](qwen2_5_omni.md)): of a longer film it sees fewer frames a second, and the film is not cut. If the
conversation has no room for a film, the film is refused before it is decoded.

Some parts of a picture's file make work that its size does not show. They are counted before the picture is decoded.
No usual program writes a file near these bounds.

| part of a file | at most |
|---|---|
| scans of a JPEG | {hidden_work.JPEG_SCANS:,} |
| segments of a JPEG | {hidden_work.JPEG_SEGMENTS:,} |
| Exif segments of a JPEG | {hidden_work.JPEG_EXIF_SEGMENTS:,} |
| bytes between the segments of a JPEG | {hidden_work.JPEG_FILL_BYTES:,} |
| chunks of a PNG | {hidden_work.PNG_CHUNKS:,} |
| blocks of a GIF before its first picture | {hidden_work.GIF_BLOCKS:,} |
| strips or tiles of a TIFF | {hidden_work.TIFF_PIECES:,} |
| bytes of a compressed BMP | {hidden_work.BMP_RUN_BYTES >> 20} MiB |

Several processes may decode (`decoders`). All films together use at most `decoders` - 1 of them, and the films of one
client at most `decoders` - 2. The pictures and sounds of one client use at most `decoders` - 1. Each of these numbers
is at least 1. So no client waits for all films, or for all pictures and sounds, of another client; if all processes are
busy, it waits at most for the first that becomes free. Clients take turns. At most 256 films and 256 other media wait.
If one more comes, the client with the longest line loses its last waiting medium (`OVERLOADED`), so that a client with
a shorter line can wait.
"""


def page() -> str:
    """The text of docs/limits.md."""
    counts = "".join(f"| `{field}` | {most:,} |\n" for field, most in limits.COUNTS.items())
    sizes = "".join(f"| `{field}` | {_size(most)} |\n" for field, most in limits.BYTES.items())
    return HEAD + counts + BYTES_HEAD + sizes + MEDIA


def _size(size: int | None) -> str:
    """A number of bytes in words; None stands for a field that only the size of the request bounds."""
    if size is None:
        return "the size of the request"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def main() -> int:
    """Write the page, or with --check compare it. Exit status 1 if the committed page is stale."""
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
