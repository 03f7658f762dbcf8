"""Writes docs/limits.md from the table in the code, or with --check says whether the committed page is fresh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from omnistage.client.request import MAX_TEXT_CHARACTERS
from omnistage.gateway import accounts, fetching, film_jobs, guard, port
from omnistage.gateway.body import MAX_KEYS
from omnistage.gateway.chat import MAX_CHOICES, MAX_STOPS, MAX_TEXTS, TRANSCRIPTS_BYTES
from omnistage.gateway.failure import MOST_CHARACTERS as ERROR_CHARACTERS
from omnistage.gateway.kept import KEPT_S
from omnistage.gateway.messages import MAX_PARTS
from omnistage.gateway.pictures import FILES_BYTES, MOST_PICTURES
from omnistage.gateway.responses import MAX_METADATA
from omnistage.gateway.settings import GatewaySettings
from omnistage.host.descriptors import WANTED as DESCRIPTORS
from omnistage.host.metrics import MAX_VISITORS, SILENCE_S
from omnistage.host.places import HOST_SHARE, MAX_WAITING, MAX_WAITING_EACH, MAX_WAITING_OF_HOST
from omnistage.models.media import hidden_work
from omnistage.models.media.terms import MOST_ASPECT, FilmPreprocessing, MediaLimits
from omnistage.router.admission import (
    MAX_HEALTH,
    MAX_LARGE,
    MAX_OPEN,
    REQUEST_LIMIT_S,
    SECRET_ID_CHARACTERS,
    STALLED_S,
    TURN_LIMIT_S,
    WAIT_S,
)
from omnistage.router.conversation import ALL_REPLAY_BYTES, REPLAY_BYTES, WINDOW
from omnistage.router.settings import RouterSettings
from omnistage.wire import limits
from omnistage.wire.channel import HANDSHAKE_LIMIT_MS, IDLE_LIMIT_MS, MAX_CONNECTIONS
from omnistage.wire.limits import FIELDS_AT_ONCE


def _default(setting: str) -> Any:
    """The default of an option of the router or of the gateway."""
    return (RouterSettings.model_fields | GatewaySettings.model_fields)[setting].default


PAGE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"

_BODIES = f"{accounts.BODIES_BYTES >> 20} MiB; {HOST_SHARE:g} of that from one host"
_READ = f"all bodies that are being read, plus {guard.PART_BYTES} bytes for each `,` `:` `[` `{{` in them"
_RESERVE = f"{accounts.SMALL_BODIES_BYTES >> 20} MiB more; {HOST_SHARE:g} of that from one host"
_UNREAD = f"time in which a client reads less than {port.LEAST_READ_BYTES >> 10} KiB of its waiting answer"

_CHUNKS = f"{port.TINY_CHUNKS:,} of any size; chunks beyond these must have at least {port.LEAST_CHUNK_BYTES} bytes on average"

_FOR_HOST = f"{HOST_SHARE:g} of them for one host"
_OF_HOST = f"{HOST_SHARE:g} of what the others leave"
_OF_FILMS = f"{_OF_HOST}; the host with the fewest running films is next, and there the client"
_OLDEST = "the oldest of those who hold the most go first"
_TURN_EACH = "a turn each; the client served longest ago is next"
_TURNS = f"{HOST_SHARE:g} of what the others leave; hosts take turns, and so do the clients of a host"

_AHEAD = "chunks that a client of Converse may be ahead of the first stage, on all ports of a turn together"

_FIELDS = "fields of a request, known or unknown; fields inside a message that can hold neither bytes nor a repeated field do not count"

HTTP = f"""## HTTP

These are the limits of the gateway ([http.md](http.md)); the router behind it has its own. If a request is refused, its
client gets the error at once and has {port.HEAD_LIMIT_S:g} s to send the rest of the request. A gateway whose process may open
fewer than {port.LEAST_DESCRIPTORS} descriptors does not start.

| what | most | beyond it |
|---|---|---|
| connections at once | as above; at most {HOST_SHARE:g} of them from one host, or one IPv6 network of 64 bits | closed |
| head of a request | {port.HEAD_BYTES >> 10} KiB | 400 or 431 |
| time for a head to arrive | {port.HEAD_LIMIT_S:g} s | closed |
| time between two requests on a connection | {port.KEPT_LIMIT_S} s | closed |
| chunks of a body | {_CHUNKS} | 400, closed |
| body of a request | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default | 413 |
| time for a body to arrive | {guard.BODY_LIMIT_S:g} s | 408 |
| signs that JSON is made of (`,` `:` `[` `{{`) in a body | {guard.MAX_PARTS:,} | 400 |
| keys of a JSON object whose fields this interface names (the body, a message, a tool; not `metadata`) | {MAX_KEYS} | 400 |
| characters of each text field, and of all messages together | {MAX_TEXT_CHARACTERS:,} | 400 |
| parts of all messages together | {MAX_PARTS:,} | 400 |
| texts in `stop`; texts in `choice`; entries of `metadata` | {MAX_STOPS}; {MAX_TEXTS:,}; {MAX_METADATA} | 400 |
| {_READ}; of requests that wait for answers, texts and media alone | {_BODIES} | 503, `OVERLOADED` |
| the same of requests with at most {accounts.SMALL_BYTES >> 10} KiB, once that is taken | {_RESERVE} | 503, `OVERLOADED` |
| time for an answer | `--session-limit`, {_default("session_limit"):g} s by default | 503, `DEADLINE` |
| {_UNREAD} | {port.UNREAD_LIMIT_S:g} s | closed; the router may end the answer sooner |
| text of an error | {ERROR_CHARACTERS:,} characters | cut |
| answers of one request (`n`): in chat; of pictures | {MAX_CHOICES}; {MOST_PICTURES} | 400 |
| time for all media that a request names by URLs | {fetching.LIMIT_S:g} s; together they may be as large as a body | 400 |
| fetched media of all requests together | {fetching.REQUESTS} times the size of a body | 503, `OVERLOADED` |
| pictures that the gateway keeps for its URLs | {FILES_BYTES >> 20} MiB, for {KEPT_S / 60:g} minutes | the oldest are deleted |
| films that wait or are being made | `--video-jobs`, {_default("video_jobs")}; {_FOR_HOST} | 503, `OVERLOADED` |
| films that are made at once | `--video-runs`, {_default("video_runs")} | the others wait |
| bytes of all films | `--video-bytes`, {_default("video_bytes") >> 30} GiB | the oldest are deleted |
| time that a film is kept | `--video-kept`, {_default("video_kept") / 3600:g} hours | deleted |
| films and failures that are kept | {film_jobs.MOST_KEPT:,} | the oldest are deleted |
| texts of spoken answers that a request names by id | {TRANSCRIPTS_BYTES >> 20} MiB, for {KEPT_S / 60:g} minutes | the oldest are deleted |

"""

HEAD = f"""# Limits

This page lists how large requests, media and answers may be, and how many a server takes. `python tools/limits.py`
makes it from the table in `wire/omnistage/wire/limits.py` and from settings and constants in the code; a test compares
it with them.

A server looks at the bytes of a request before it parses them (`wire/limits.py`). It walks over the tags, counts the
elements of every repeated field, and stops when there is one too many: millions of empty elements fit into a few MiB,
and parsing would turn them into a GB of objects. The request is then refused with `BAD_REQUEST` and the name of the
field; a message of a running session is refused with `PROTOCOL`. If a message has up to {FIELDS_AT_ONCE:,} fields, the event loop
itself walks over them, in about a millisecond. Larger messages go to a thread, one at a time. At a router the clients
take turns there, host by host: {MAX_LARGE} large requests may wait for at most {TURN_LIMIT_S:g} s, {HOST_SHARE:g} of them from one host;
further ones get `OVERLOADED`. Groups, which proto3 does not have, are refused.

## Sizes

| what | most |
|---|---|
| a request to a router whose pipelines take only text | {limits.TEXT_REQUEST_BYTES >> 20} MiB, or `--max-message-bytes` if that is less |
| a request to a router with a pipeline that takes media | `--max-message-bytes`, {_default("max_message_bytes") >> 20} MiB by default |
| a message to a stage | {limits.HOP_ROOM_BYTES >> 20} MiB more than `--max-message-bytes`, for the route and what rebuilds a lost stage |
| {_FIELDS} | {limits.MAX_FIELDS:,} |
| characters of all messages of a request | {limits.MAX_TEXT_CHARACTERS:,} |
| characters that the model takes | perhaps fewer: the default Thinker takes 65,536, because its context has 8,192 tokens |
| calls of any kind at once at a router | {limits.MAX_CALLS:,}; gRPC answers a further one with RESOURCE_EXHAUSTED and without details |
| calls at once that are no health checks | {MAX_OPEN:,}, at most {HOST_SHARE:g} of them from one host; a further one is `OVERLOADED` |
| health checks (`Check`) at once, and as many `Watch` calls | {MAX_HEALTH:,}, at most {HOST_SHARE:g} of them from one host |
| time for a request to arrive at a router | {REQUEST_LIMIT_S:g} s; then the call is `BAD_REQUEST` |
| {_AHEAD} | {WINDOW}, but at least 2 for each port |
| streamed media that a router keeps to send them again | {REPLAY_BYTES >> 20} MiB for each turn, {ALL_REPLAY_BYTES >> 20} MiB in all |

Streamed media do not count as a part of the request; each model has its own limit for them ([media.md](media.md)). gRPC
refuses a request above its size with RESOURCE_EXHAUSTED, without details, before any code of omnistage sees it.

## Connections

These limits hold for each server, a router or a stage, even before a call comes.

| what | most |
|---|---|
| connections at once | {MAX_CONNECTIONS:,}, or half of the server's descriptors if that is less; a further one is closed |
| descriptors | what the system allows (the hard limit, which `ulimit -Hn` shows), up to {DESCRIPTORS:,} |
| time until a client has begun to speak HTTP/2 | {HANDSHAKE_LIMIT_MS / 1000:g} s; then the connection is closed |
| time without a call | {IDLE_LIMIT_MS / 1000:g} s; then the connection is closed, and the next call makes a new one |
| visitors of a page of metrics at once | {MAX_VISITORS}; a further one replaces the one that has been silent for longest |
| time for which a visitor of that page may be silent | {SILENCE_S:g} s |

The other half of the descriptors is for the log, the metrics, connections to other servers, files of streamed media,
and processes that decode. So a server goes on serving earlier connections even if strangers hold all others.
[security.md](security.md#what-a-gateway-has-to-bound) says how a proxy can limit the connections of each client.

{HTTP}## Places

A place is the right to one running answer. A router has `--max-sessions` places; without that option it has as many as
the stage with the fewest sessions takes (the sum of `max_sessions` of its replicas). A replica that several pipelines
share counts once. `host/places.py` decides which client gets a place:

- A client is a host, or the network of 64 bits for IPv6, and there the value of the metadata key `x-api-key`. The router
  checks no keys, so a host that invents keys gets no more places by it. A router believes the gateway of its own stack,
  which shows a token ([security.md](security.md#who-speaks-for-other-hosts)), for which host it calls; all clients
  behind any other proxy are of one host. `api_key=`, `as_client(key)` or `--api-key` give a key
  ([client.md](client.md#who-asks)); it is no login.
- One host holds at most `--client-share` of the places ({_default("client_share"):g} by default), a second host the same share of the
  places that are left, and so on. A host that holds no place gets any free one. The same holds for the clients of a
  host. `Omni` starts its private stack with a share of 1.
- If all places are taken, or the host has its share, a client may wait that holds less than an equal share of its
  host's equal share: at most {WAIT_S:g} s, with at most {MAX_WAITING_EACH} requests. At most {MAX_WAITING_OF_HOST}
  requests of one host may wait, and {MAX_WAITING} of all together. A place that becomes free goes to the client whose
  host holds the fewest places, there to the client that holds the fewest, and among equals to the one that has waited
  longest. So if a host holds no place and N requests wait before its own, it gets a place after at most N others have
  become free. All other requests get `OVERLOADED` at once, with a delay.
- If a client leaves its answer unread for {STALLED_S:g} s while another client waits, it loses the answer (`CLIENT_STALLED`). If no
  other client waits, it loses the answer after `--stall-limit` ({_default("stall_limit"):g} s by default).

A request with a `request_id` replaces the older call with the same id and gets its place, if it is certain that both
come from the same client. That is so if both have the same `x-api-key`. Without a key it is so if both came over the
same connection, or if the id has at least {SECRET_ID_CHARACTERS} characters, because no stranger can guess such an id (the Python client
sends a random UUID).

## What one client gets in all

Nobody checks keys yet. So whatever a stranger could take by inventing keys is shared among hosts first. The work for those
who hold a place is shared among clients.

| what is shared | by | what one gets | decided in |
|---|---|---|---|
| connections, memory of requests and of unread answers, fetched media | host | {_OF_HOST} | `gateway/port.py`, `gateway/accounts.py` |
| films that wait or are being made | host, client | {_OF_FILMS} | `gateway/film_jobs.py` |
| open calls of a router ({MAX_OPEN}) | host, client | {HOST_SHARE:g} of what the others leave | `router/admission.py`, `host/places.py` |
| reading of large requests ({MAX_LARGE} may wait) | host, client | {_TURNS} | `router/admission.py` |
| places for answers | host, client | `--client-share` of what the others leave | `host/places.py` |
| tokenizing, decoding of media and trials of grammars in a stage | client | {_TURN_EACH} | `models/turns.py` |
| memory of grammars | host | {_OF_HOST} | `models/text/constraint.py` |
| memory of the decoders of films | nobody | the drawing that has waited longest is next | `models/steps/session.py` |
| room for finished films | host, client | {_OLDEST} | `gateway/film_jobs.py` |
| room for media that are streamed to a Thinker | host | {_OF_HOST} | `models/media/spool.py` |
| room to repeat a turn of a conversation after a loss | host, client | {_OF_HOST} | `router/front.py` |
| room for pictures and sounds of earlier answers | host | {_OLDEST} | `gateway/kept.py`, `gateway/chat.py` |
| rows of a model's next pass | client | the client with the fewest sessions in it is next | `engine/scheduler.py` |
| steps of drawings | client | an equal part of the time (weighted fair queueing) | `models/steps/orders.py` |

## Counts

How many elements a repeated field may have, counted over one whole request.

| field | most |
|---|---|
"""

BYTES_HEAD = """
## Lengths

How many bytes one field may have.

| field | most |
|---|---|
"""


_MEDIA = MediaLimits()
_FILM = FilmPreprocessing()
_PICTURE_TIME = (
    f"{_MEDIA.picture_least_s:g} s, plus {_MEDIA.megapixel_s:g} s for each million pixels and {_MEDIA.picture_mebibyte_s:g} s for each MiB"
)
_SOUND_TIME = f"{_MEDIA.sound_least_s:g} s, plus {_MEDIA.sound_mebibyte_s:g} s for each MiB"

MEDIA = f"""
## Media

A Thinker that sees and hears has these limits for one picture, sound or film
(`models/omnistage/models/media/terms.py`), besides those of the tables above. It checks size, pixels, seconds and
frames in the header before it decodes anything, and again while it decodes, because a header may be wrong. A medium
above a limit is refused with `BAD_REQUEST`, the field of its part, its own value and the limit. A medium is refused
with `BAD_REQUEST` too if it cannot be decoded, if its decoding takes too much time or memory, or if it makes the
decoding process crash; other requests do not suffer.

| | picture | sound | film |
|---|---|---|---|
| size of the file | {_MEDIA.picture_bytes >> 20} MiB | {_MEDIA.sound_bytes >> 20} MiB | {_MEDIA.film_bytes >> 20} MiB |
| pixels (of a film: of each frame) | {_MEDIA.picture_pixels:,} | | {_MEDIA.film_pixels:,} |
| length | | {_MEDIA.sound_s:g} s; the sound of a film too | {_MEDIA.film_s:g} s and {_MEDIA.film_frames:,} frames |
| samples per second, channels | | {_MEDIA.sound_rate_hz:,}, {_MEDIA.sound_channels} | as a sound |
| time for decoding, on the clock | {_MEDIA.picture_time_s:g} s | {_MEDIA.sound_time_s:g} s | {_MEDIA.film_time_s:g} s |
| processor time for decoding | {_PICTURE_TIME} | {_SOUND_TIME} | |

A decoded medium has at most {_MEDIA.result_bytes >> 20} MiB, and the process that decodes has {_MEDIA.memory_bytes >> 20} MiB of address
space. The processor time is at least five times as long as the slowest format took on one core of today. Time in which
the process waits for a busy machine does not count. One side of a picture may be at most {MOST_ASPECT} times as long as the other.
A model sees {_FILM.fps:g} frames a second of a film, but at most {_FILM.max_frames} frames, and no more than it has tokens for
([qwen2_5_omni.md](qwen2_5_omni.md)). It sees a longer film as a whole, with fewer frames a second. If the conversation
has no room for a film, the film is refused before it is decoded.

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
| size of a compressed BMP | {hidden_work.BMP_RUN_BYTES >> 20} MiB |

Several processes may decode (`decoders`). All films together use at most `decoders` - 1 of them, and the films of one
client at most `decoders` - 2. The pictures and sounds of one client use at most `decoders` - 1. Each of these numbers
is at least 1. So no client waits for all films, or for all pictures and sounds, of another client; if all processes are
busy, it waits at most for the first that becomes free. Clients take turns. At most 256 films and 256 other media wait.
If one more comes, the client with the longest line loses its last waiting medium (`OVERLOADED`), so that a client with
a shorter line can wait.
"""


def page() -> str:
    """The text of docs/limits.md."""
    counts = "".join(f"| `{field}` | {limit:,} |\n" for field, limit in limits.COUNTS.items())
    sizes = "".join(f"| `{field}` | {_size(limit)} |\n" for field, limit in limits.BYTES.items())
    return HEAD + counts + BYTES_HEAD + sizes + MEDIA


def _size(size: int | None) -> str:
    """A number of bytes in words; None means a field that only the size of the request limits."""
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
