"""Records answers of the gateway to HTTP requests: status, headers and body.

`web.yaml` has a row for each endpoint with a small and a large body. From each field of the large body come requests with every value of
WRONG in its place, without it, and beside an unknown field; each endpoint gets the methods, headers, forms and broken bodies of the table.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import yaml

from tools.recording.commands import AT_ONCE, digest
from tools.recording.stack import Recording, read_table

LIMIT_S, FILM_LIMIT_S = 60.0, 30.0
JSON = "application/json"
FORM = "multipart/form-data; boundary=edge"
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "POST")
SMALL_BYTES = 4096
"""The size up to which a text is recorded as it is."""

WRONG: tuple[Any, ...] = (None, "", "nonsense", -1, 0, 1.5, 10**12, True, [], {}, ["nonsense"])
WRONG_TEXTS = ("", "nonsense", "-1", "1e12", "[]")
"""The same for fields of forms."""

PIECE_FIELDS = ("content", "transcript", "data", "delta", "audio", "reasoning_content")
"""Fields of events of a stream that hold a piece: how a text or a sound is cut into pieces depends on time, so the pieces are joined."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its Content-Length is that of its body unless the headers have one."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def answer(self, recording: Recording) -> tuple[int, dict[str, str], bytes]:
        """Send the request. Returns status, headers and body."""
        connection = http.client.HTTPConnection(recording.gateway, timeout=LIMIT_S)
        try:
            connection.putrequest(self.method, self.path, skip_host="Host" in self.headers, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            if self.body:
                connection.putheader("Content-Length", str(len(self.body)))
            connection.endheaders(self.body or None)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()


def post(path: str, body: Any, **headers: str) -> Ask:
    """A POST of JSON."""
    return Ask("POST", path, json.dumps(body).encode(), {"Content-Type": JSON, **headers})


def record(recording: Recording) -> dict[str, Any]:
    """The results of all requests, by case."""
    picture = base64.b64encode((recording.files / "picture.png").read_bytes()).decode()
    table = yaml.safe_load(json.dumps(read_table("web.yaml")).replace("{picture}", f"data:image/png;base64,{picture}"))
    asks = dict(_asks(recording, table))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = dict(zip(asks, pool.map(lambda ask: _result(recording, ask), asks.values()), strict=True))
    for name, row in table["lives"].items():
        path = _path_of_product(recording, row)
        for method, below, headers in row["asks"]:
            results[f"{name}: {method} {below} {headers}"] = _result(recording, Ask(method, path + below, b"", row["headers"] | headers))
    return results


def _asks(recording: Recording, table: Mapping[str, Any]) -> Iterator[tuple[str, Ask]]:
    """Every request, by case."""
    for path, row in table["bodies"].items():
        small, large = row["small"], {**row["small"], **row["large"]}
        bodies = {"large": large, **dict(_changed(small, large)), "many keys": {**small, **{f"key{number}": 1 for number in range(200)}}}
        bodies |= {f"more {json.dumps(extra)[:90]}": {**small, **extra} for extra in row["more"]}
        bodies["long text"] = {**small, row["text"]: "x" * 1_100_000}
        yield from ((f"{path}: {case}", post(path, body)) for case, body in bodies.items())
        for case, text in table["broken"].items():
            yield f"{path}: broken {case}", Ask("POST", path, text.encode(), {"Content-Type": JSON})
        for kind in table["content_types"]:
            yield f"{path}: content type {kind}", Ask("POST", path, json.dumps(small).encode(), {"Content-Type": kind} if kind else {})
        yield f"{path}: too large", Ask("POST", path, b"", {"Content-Type": JSON, "Content-Length": str(1 << 30)})
        if "file" in row:
            yield from _form_asks(recording, path, row["file"], large, table["forms"])
    path, row = next(iter(table["bodies"].items()))
    for headers in table["headers"]:
        yield f"{headers}", post(path, row["small"], **headers)
        yield f"GET {headers}", Ask("GET", "/v1/models", b"", headers)
    for path in (*table["bodies"], *table["paths"]):
        yield from ((f"{method} {path}", Ask(method, path)) for method in METHODS)


def _changed(small: dict[str, Any], large: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Cases of bodies: the small one with one field of the large one, and this field changed or left out."""
    yield "small", small
    yield "unknown field", {**small, "no_such_field": 1}
    yield from ((f"without {name}", {other: small[other] for other in small if other != name}) for name in small if name != "seed")
    for name, value in large.items():
        yield f"{name} alone", {**small, name: value}
        changes = ((f"{name}{case}", {**small, name: changed}) for case, changed in _variants(value))
        yield from ((case, body) for case, body in changes if body["seed"] is not None)  # Without a seed each answer is another.


def _variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Cases of one value: all of WRONG in its place, and the same for each value within it."""
    yield from ((f"={json.dumps(wrong)}", wrong) for wrong in WRONG if (type(wrong), wrong) != (type(value), value))
    if isinstance(value, dict):
        yield ".unknown", {**value, "no_such_field": 1}
        for name, inner in value.items():
            yield f" without .{name}", {other: value[other] for other in value if other != name}
            yield from ((f".{name}{case}", {**value, name: changed}) for case, changed in _variants(inner))
    elif isinstance(value, list) and value:
        yield "*3000", value * 3000
        yield from ((f"[0]{case}", [changed, *value[1:]]) for case, changed in _variants(value[0]))


def _form_asks(
    recording: Recording, path: str, file: str, large: dict[str, Any], forms: Mapping[str, list[list[str]]]
) -> Iterator[tuple[str, Ask]]:
    """Cases of forms. file: name of the field that holds a picture. large: values of fields. forms: by case, parts as [name, name of the
    file, contents]; a name of one of our files stands for its contents, and FILE for the name of the field."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in large.items() if not isinstance(value, dict)}
    good = [["prompt", "", "a hill"], ["seed", "", "7"], ["FILE", "a.png", "picture.png"]]
    cases = {case: [*good, *parts] for case, parts in forms.items()} | {"without file": good[:2], "only file": good[2:], "nothing": []}
    cases |= {f"{name}={value}": [*good, [name, "", value]] for name, text in texts.items() for value in (text, *WRONG_TEXTS)}
    for case, parts in cases.items():
        body = b""
        for name, filename, content in parts:
            source = recording.files / content
            data = source.read_bytes() if content and source.is_file() else content.encode()
            file_text = f"; filename={filename}" if filename else ""
            head = f'--edge\r\nContent-Disposition: form-data; name="{name.replace("FILE", file)}"{file_text}'
            body += head.encode() + b"\r\n\r\n" + data + b"\r\n"
        yield f"{path}: form {case}", Ask("POST", path, body + b"--edge--\r\n", {"Content-Type": FORM})
        if case == "good":
            yield f"{path}: form without end", Ask("POST", path, body, {"Content-Type": FORM})
            yield f"{path}: form cut", Ask("POST", path, body[:60], {"Content-Type": FORM})
            yield f"{path}: form without boundary", Ask("POST", path, body, {"Content-Type": "multipart/form-data"})
            yield f"{path}: form with another boundary", Ask("POST", path, body, {"Content-Type": f"{FORM}s"})


def _result(recording: Recording, ask: Ask) -> dict[str, Any]:
    """The part of an answer that is recorded. A film that was asked for is deleted, so that the next one finds the same gateway."""
    try:
        status, headers, body = ask.answer(recording)
    except (OSError, http.client.HTTPException) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if ask.path == "/v1/videos" and ask.method == "POST" and status == 200:
        Ask("DELETE", f"/v1/videos/{json.loads(body)['id']}").answer(recording)
    return {"status": status, "headers": dict(sorted(headers.items())), "body": shown(headers.get("content-type", ""), body)}


def shown(content_type: str, body: bytes) -> Any:
    """The part of a body that is recorded: JSON as it is, a stream as its events, a small text as its lines, else its digest."""
    if content_type.startswith(JSON) and body:
        return json.loads(body)
    if content_type.startswith("text/event-stream"):
        return joined_events(body.decode())
    if content_type.startswith("text/") and len(body) <= SMALL_BYTES:
        return body.decode().split("\n")
    return f"{len(body)} bytes" if content_type.startswith("multipart/") else digest(body)


def joined_events(text: str) -> dict[str, Any]:
    """The events of a stream, each kind once in the order of their first, and the joined pieces by their place in the event."""
    pieces: dict[str, list[Any]] = {}
    events: list[Any] = []
    for block in text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.split("\n") if line)  # Name and value, without the colon.
        data = fields.get("data", "")
        event = {**fields, "data": _without_pieces(json.loads(data), "", pieces) if data.startswith("{") else data}
        if event not in events and not _is_piece_alone(event["data"]):
            events.append(event)
    # Answers of one request run side by side, each in its order.
    events.sort(key=lambda event: int(_choice(event["data"]).get("index", 0)))
    return {"events": events, "pieces": {place: _join_pieces(place, values) for place, values in pieces.items()}}


def _choice(data: Any) -> Mapping[str, Any]:
    """The choice in an event of chat; empty for other events."""
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0] if choices else {}


def _is_piece_alone(data: Any) -> bool:
    """Whether an event had nothing but a piece. Whether the first and last pieces come alone is a matter of time."""
    choice = _choice(data)
    return choice.get("delta") == {} and choice.get("finish_reason") is None


def _without_pieces(value: Any, place: str, pieces: dict[str, list[Any]]) -> Any:
    """The value without its pieces and numbers of events; pieces are added to `pieces`. place: path of the value in the event."""
    if isinstance(value, dict):
        fields = {name: _without_pieces(one, f"{place}.{name}", pieces) for name, one in value.items() if name != "sequence_number"}
        # Which pieces of text come with their logprobs is a matter of time.
        return {name: one for name, one in fields.items() if one != "<piece>" and name != "logprobs"}
    if isinstance(value, list) and not place.endswith("logprobs.content"):
        return [_without_pieces(one, f"{place}.{number}", pieces) for number, one in enumerate(value)]
    if isinstance(value, list) or (isinstance(value, str) and place.rpartition(".")[2] in PIECE_FIELDS):
        pieces.setdefault(place, []).append(value)
        return "<piece>"
    return value


def _join_pieces(place: str, values: list[Any]) -> Any:
    """The pieces that came at one place of an answer, joined: tokens as a list, sound as the digest of its bytes, text as it is."""
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    is_sound = place.endswith((".data", ".audio")) or (place == ".delta" and len(values[0]) > 200)
    return digest(b"".join(map(base64.b64decode, values))) if is_sound else "".join(values)


def _path_of_product(recording: Recording, row: Mapping[str, Any]) -> str:
    """The path of a film that is ready, or of a picture that was asked for by URL. Raises KeyError if it was refused."""
    product = json.loads(post(row["path"], row["body"], **row["headers"]).answer(recording)[2])
    if "data" in product:
        return str(urlsplit(product["data"][0]["url"]).path)
    path, until = f"{row['path']}/{product['id']}", time.monotonic() + FILM_LIMIT_S
    while product["status"] not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.1)
        product = json.loads(Ask("GET", path, b"", row["headers"]).answer(recording)[2])
    return path
