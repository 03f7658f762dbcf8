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
    """Default of an option of the router or of the gateway."""
    return (RouterSettings.model_fields | GatewaySettings.model_fields)[setting].default


PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"

_BODIES = f"{guard.BODIES_BYTES >> 20} MiB; {guard.BODIES_SHARE:g} of that from one host"
_UNREAD = f"time in which a client reads less than {port.LEAST_READ_BYTES >> 10} KiB of what it was sent"

_CHUNKS = f"{port.TINY_CHUNKS:,} of any size; more have {port.LEAST_CHUNK_BYTES} bytes on average"

HTTP = f"""## HTTP

Of the gateway ([http.md](http.md)), beside all that the router behind it refuses. A request that is refused gets its answer,
and its client {port.HEAD_LIMIT_S:g} s to send what is left of it.

| what | most | then |
|---|---|---|
| connections at once | as above; {port.HOST_SHARE:g} of them from one host, or one IPv6 network of 64 bits | closed |
| descriptors of the process | {port.LEAST_DESCRIPTORS} at least | it does not start |
| head of a request | {port.HEAD_BYTES >> 10} KiB | 400 or 431 |
| time for a head to arrive | {port.HEAD_LIMIT_S:g} s | closed |
| time between two requests on a connection | {port.KEPT_LIMIT_S} s | closed |
| chunks of a body | {_CHUNKS} | 400, closed |
| body of a request | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default | 413 |
| time for a body to arrive | {guard.BODY_LIMIT_S:g} s | 408 |
| signs that JSON is made of (`,` `:` `[` `{{`) in a body | {guard.MAX_PARTS:,} | 400 |
| keys of an object that has fields | {MAX_KEYS} | 400 |
| characters of a field that is text, and of all messages together | {MAX_TEXT_CHARACTERS:,} | 400 |
| parts of all messages together | {MAX_PARTS:,} | 400 |
| texts in `stop`, in `choice`; entries of `metadata` | {MAX_STOPS}, {MAX_TEXTS:,}, {MAX_METADATA} | 400 |
| all bodies that are read or worked on, with {guard.PART_BYTES} bytes for each of these signs | {_BODIES} | 503, `OVERLOADED` |
| time for an answer | `--session-limit`, {_default("session_limit"):g} s by default | 503, `DEADLINE` |
| {_UNREAD} | {port.UNREAD_LIMIT_S:g} s | closed; the router may end the answer sooner |
| text of an error | {ERROR_CHARACTERS:,} characters | cut |
| answers of one request (`n`), in chat and of pictures | {MAX_CHOICES}, {MOST_PICTURES} | 400 |
| time for all media that a request names by URLs | {fetching.LIMIT_S:g} s; in size they are as a body is | 400 |
| media that were fetched, of all requests together | {fetching.REQUESTS} times a body | 503, `OVERLOADED` |
| pictures that URLs stand for | {FILES_BYTES >> 20} MiB, for {KEPT_S / 60:g} minutes | the oldest go |
| films that wait or are made | `--video-jobs`, {_default("video_jobs")}; {film_jobs.SHARE} of them of one client | 503, `OVERLOADED` |
| films that are made at once | `--video-runs`, {_default("video_runs")} | wait |
| bytes of all films | `--video-bytes`, {_default("video_bytes") >> 30} GiB | the oldest go |
| time that a film is kept | `--video-kept`, {_default("video_kept") / 3600:g} hours | deleted |
| films and failures that are kept | {film_jobs.MOST_KEPT:,} | the oldest go |
| what sounds said, for who names one by its id | {TRANSCRIPTS_BYTES >> 20} MiB, for {KEPT_S / 60:g} minutes | the oldest go |

"""

HEAD = f"""# Limits

What one request may hold. This page is made by `python tools/limits.py` from the table in `wire/omnistage/wire/limits.py` and from the
settings and constants of the router; a test compares it with them.

A request is looked at before it is parsed (`wire/decoding.py`): a walk over the tags on the wire counts every field that repeats and stops
at the first element that is too much, because millions of empty elements fit into a few MiB and would become a GB of objects. What the
walk refuses is `BAD_REQUEST` with the name of the field, in a running session `PROTOCOL`. Up to {FIELDS_AT_ONCE:,} fields are walked
over at once, in about a millisecond; a message with more goes to a thread, one message at a time. At a router the clients take turns at
that: {MAX_LARGE} large requests may wait, {LARGE_SHARE:g} of them from one client, and {TURN_LIMIT_S:g} s at most; others are told
`OVERLOADED`. Groups, which proto3 does not have, are refused.

## Sizes

| what | most |
|---|---|
| a request to a router for text only | {limits.TEXT_REQUEST_BYTES >> 20} MiB, or `--max-message-bytes` where that is less |
| a request to a router with a pipeline that takes media | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default |
| a message to a stage | {limits.HOP_ROOM_BYTES >> 20} MiB above `--max-message-bytes`, for the route and what rebuilds a lost stage |
| fields of a request, known or not, outside of messages that hold nothing which repeats and no bytes | {limits.MAX_FIELDS:,} |
| characters of all messages of a request | {limits.MAX_TEXT_CHARACTERS:,} |
| the same, at a model | it may take less: the default Thinker 65,536, by the 8,192 tokens of its context |
| calls at once at a router, of any kind | {limits.MAX_CALLS:,}; gRPC answers one more with RESOURCE_EXHAUSTED and without details |
| of these, all but health checks | {MAX_OPEN:,}, {CALLS_SHARE:g} of them from one client; one more is `OVERLOADED` |
| health checks, and as many watches over the health | {MAX_HEALTH:,}, {CALLS_SHARE:g} of them from one client |
| time for a request to arrive at a router | {REQUEST_LIMIT_S:g} s; then the call is `BAD_REQUEST` |
| chunks that a client of Converse may be ahead of the first stage, all ports of a turn together | {WINDOW}, but 2 for each port at least |
| what a router keeps of streamed media for a replay | {REPLAY_BYTES >> 20} MiB of a turn, {ALL_REPLAY_BYTES >> 20} MiB in all |

Media that are streamed count towards no request; how much of them a model takes is its own limit ([media.md](media.md)).
A request above its size is refused by gRPC with RESOURCE_EXHAUSTED, without details, before any code of omnistage sees it.

## Connections

Of each server, a router or a stage, before anybody has asked it anything.

| what | most |
|---|---|
| connections at once | {MAX_CONNECTIONS:,}, or half of what it may have of descriptors; one more is closed |
| descriptors | what the system allows (the hard limit, which `ulimit -Hn` shows), up to {DESCRIPTORS:,} |
| time to say that it speaks HTTP/2 | {HANDSHAKE_LIMIT_MS / 1000:g} s; then the connection is closed |
| time without a call | {IDLE_LIMIT_MS / 1000:g} s; then the connection is closed, and its channel makes a new one with the next call |
| visitors of a page of metrics at once | {MAX_VISITORS}; one more takes the place of who has been silent for longest |
| time in which a visitor of that page says nothing | {SILENCE_S:g} s |

Half of the descriptors is for all else: the log, the metrics, neighbours, files that are put aside, processes that decode. So whoever was
connected before is served while strangers hold all connections that there may be. How a gateway bounds connections by client:
[security.md](security.md#what-a-gateway-has-to-bound).

{HTTP}## Places

A router runs as many answers at once as the scarcest stage takes with all of its replicas (`max_sessions` of each), or `--max-sessions`.
A replica that several pipelines share counts once.
`router/places.py` says who gets a place:

- Clients are told apart by the metadata key `x-api-key`, else by their host, of IPv6 by the network of 64 bits. The router checks no keys:
  where strangers reach it, a gateway that does stands before it. All clients behind one gateway that passes no keys on are one client.
  A key is given by `api_key=`, `as_client(key)` or `--api-key` ([client.md](client.md#who-asks)); it is no login.
- One client holds at most `--client-share` of the places ({_default("client_share"):g} by default), a second one as much of the rest, and
  so on. A client that holds nothing gets any free place. `Omni` starts its private stack with a share of 1.
- Where all places are taken, a client that holds less than an equal share waits: {MAX_WAITING_EACH} requests at most, {MAX_WAITING} of
  all clients together, and {WAIT_S:g} s. A free place goes to the client that holds the fewest, among equals to the one that has waited
  longest: who holds nothing gets a place at the latest when as many have become free as requests waited before its own. All others are
  told `OVERLOADED` at once, with a delay.
- A client that has left its answer unread for {STALLED_S:g} s loses it (`CLIENT_STALLED`) when another one waits; if none does,
  after `--stall-limit` ({_default("stall_limit"):g} s by default).

A request with a `request_id` takes the place of the older call with the same id, where nobody else can have sent that one: by the same
`x-api-key`; or, without a key, with an id of at least {SECRET_ID_CHARACTERS} characters, which no stranger can guess (the Python client
sends a random UUID), or over the same connection.

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


_MEDIA = MediaLimits()
_FILM = FilmPreprocessing()
_PICTURE_TIME = (
    f"{_MEDIA.picture_least_s:g} s, and {_MEDIA.megapixel_s:g} s for a million pixels, and {_MEDIA.picture_mebibyte_s:g} s for a MiB"
)
_SOUND_TIME = f"{_MEDIA.sound_least_s:g} s, and {_MEDIA.sound_mebibyte_s:g} s for a MiB"

MEDIA = f"""
## Media

What a Thinker that sees and hears takes of one picture, sound or film (`models/omnistage/models/media/limits.py`), besides what the
table above lets through. Size, pixels, seconds and frames are looked at in the header before anything is decoded, and again while it is
decoded, because headers lie. A medium above a limit is `BAD_REQUEST` with the field of its part, what it has and what may be. One that
cannot be decoded, or whose decoding takes too long, too much memory, or ends its process, is told the same way and costs no other request.

| | picture | sound | film |
|---|---|---|---|
| size of the file | {_MEDIA.picture_bytes >> 20} MiB | {_MEDIA.sound_bytes >> 20} MiB | {_MEDIA.film_bytes >> 20} MiB |
| pixels, of a film of each frame | {_MEDIA.picture_pixels:,} | | {_MEDIA.film_pixels:,} |
| length | | {_MEDIA.sound_s:g} s, also of the sound of a film | {_MEDIA.film_s:g} s and {_MEDIA.film_frames:,} frames |
| samples per second, channels | | {_MEDIA.sound_rate_hz:,}, {_MEDIA.sound_channels} | as a sound |
| time to decode it, on the clock | {_MEDIA.picture_time_s:g} s | {_MEDIA.sound_time_s:g} s | {_MEDIA.film_time_s:g} s |
| processor time for that | {_PICTURE_TIME} | {_SOUND_TIME} | |

What comes out of one is at most {_MEDIA.result_bytes >> 20} MiB, and the process that decodes has {_MEDIA.memory_bytes >> 20} MiB of
address space. The processor time is five times or more what the slowest format took on one core of today, and a busy machine
takes none of it away. A picture may be at most {MOST_ASPECT} times longer one way than the other. Of a film
{_FILM.fps:g} frames a second are looked at, {_FILM.max_frames} at most, and no more than a model has tokens for
([qwen2_5_omni.md](qwen2_5_omni.md)): a longer one is looked at less
often, not cut. One for which its conversation has no room is refused before it is decoded.

Parts of a picture's file are counted before it is decoded: they are work of which its size tells nothing. The bounds are far above what
programs write.

| | at most |
|---|---|
| scans of a JPEG | {hidden_work.JPEG_SCANS:,} |
| segments of a JPEG | {hidden_work.JPEG_SEGMENTS:,} |
| those of Exif | {hidden_work.JPEG_EXIF_SEGMENTS:,} |
| bytes between them | {hidden_work.JPEG_FILL_BYTES:,} |
| chunks of a PNG | {hidden_work.PNG_CHUNKS:,} |
| blocks of a GIF before its first picture | {hidden_work.GIF_BLOCKS:,} |
| strips or tiles of a TIFF | {hidden_work.TIFF_PIECES:,} |
| a BMP that is compressed | {hidden_work.BMP_RUN_BYTES >> 20} MiB |

Several processes may decode (`decoders`). All films together leave one of them to pictures and sounds, and the pictures and sounds of a
client leave one to other clients: one client has `decoders` - 1 of them at most, and `decoders` - 2 for films, but one in any case. So
nobody waits for the many media of another client; where all processes have one, at most for the first of them that ends. Clients take
turns. When all wait that may, 256 films and 256 others, the last one of the client with the longest line gives way to a client with a
shorter one (`OVERLOADED`).
"""


def page() -> str:
    counts = "".join(f"| `{field}` | {most:,} |\n" for field, most in limits.COUNTS.items())
    sizes = "".join(f"| `{field}` | {_size(most)} |\n" for field, most in limits.BYTES.items())
    return HEAD + counts + BYTES_HEAD + sizes + MEDIA


def _size(size: int | None) -> str:
    if size is None:
        return "the size of the request"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def main() -> int:
    """Write or check; exit status 1 if the committed page is stale."""
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
