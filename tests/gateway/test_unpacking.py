"""Bodies that are packed, or begin with a byte order mark."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from pathlib import Path

import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.memory import peak_bytes
from helpers.raw_http import CHAT, QUESTION, answer, connected, head, heard, post
from omnistage.gateway.failure import ApiError
from omnistage.gateway.unpacking import PIECE_BYTES, Unpacker

MIB = 1 << 20
BODY = json.dumps(QUESTION).encode()
FORM = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na cat\r\n--b--\r\n'
LIMIT = 4 * MIB


def packed(coding: str, data: bytes) -> bytes:
    return zlib.compress(data) if coding == "deflate" else gzip.compress(data)


@pytest.mark.parametrize("coding", ["gzip", "GZip", "x-gzip", "deflate", "identity", ""])
def test_a_packed_body_is_the_same_request(url: str, coding: str) -> None:
    data = BODY if coding in ("identity", "") else packed(coding.lower(), BODY)
    refused, taken = answer(url, post(data)), answer(url, post(data, Content_Encoding=coding))
    assert taken.status == 200 and json.loads(taken.body)["usage"]["completion_tokens"] == 4
    assert refused.status == (200 if data is BODY else 400)


def test_a_packed_form_is_read_too(film_url: str) -> None:
    form = {"Content_Type": "multipart/form-data; boundary=b", "Content_Encoding": "gzip"}
    assert answer(film_url, post(gzip.compress(FORM), "/v1/videos", **form)).status == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip, identity", "none", "x" * 1000])
def test_other_codings_are_refused_by_name(url: str, coding: str) -> None:
    refused = answer(url, post(BODY, Content_Encoding=coding))
    assert (refused.status, refused.error["code"], refused.error["reason"]) == (415, "unsupported_encoding", "BAD_REQUEST")
    assert coding[:64] in refused.error["message"] and refused.header("accept-encoding") == "gzip, deflate"


GZIP = gzip.compress(BODY)
DAMAGED = {
    "cut": GZIP[:-9],
    "without its sum": GZIP[:-1],
    "of another sum": GZIP[:-8] + bytes(8),
    "with more behind it": GZIP + b"x",
    "of another kind": zlib.compress(BODY),
    "no packed bytes": BODY,
    "a head alone": GZIP[:10],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_told_so(url: str, name: str) -> None:
    refused = answer(url, post(DAMAGED[name], Content_Encoding="gzip"))
    assert (refused.status, refused.error["code"]) == (400, "invalid_body") and "gzip" in refused.error["message"]
    assert answer(url, post()).status == 200


async def test_what_becomes_too_many_bytes_is_refused_in_little_memory(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    """Before all of it is unpacked; and bytes that become nothing count as they are."""
    with gateway(toy.address, tmp_path, "--max-message-bytes", str(LIMIT)) as server:
        url = f"http://{server.address}"
        fitting = gzip.compress(BODY + b" " * (LIMIT - len(BODY)))
        assert answer(url, post(fitting, Content_Encoding="gzip")).status == 200
        before = peak_bytes(server.pid)
        large = gzip.compress(bytes(256 * MIB), 6)
        assert len(large) < LIMIT // 2
        bombs = [large, gzip.compress(BODY + b" " * LIMIT), gzip.compress(b"") * (LIMIT // len(gzip.compress(b"")) + 1)]
        told = await asyncio.gather(*(asyncio.to_thread(answer, url, post(bomb, Content_Encoding="gzip")) for bomb in bombs * 3))
        assert {each.status for each in told} <= {413, 503} and told[0].status == 413
        assert peak_bytes(server.pid) - before < 64 * MIB
        with connected(url) as connection:  # It comes in chunks, so that nobody knows its length.
            connection.sendall(head("POST", CHAT, {"Host": "localhost", "Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}))
            connection.sendall(b"%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n")
            assert heard(connection).status == 413
        assert answer(url, post()).status == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_however_the_bytes_are_cut_they_are_the_same(coding: str, seed: int) -> None:
    """Also where what was read holds more than one piece."""
    source = random.Random(seed)
    data = source.randbytes(PIECE_BYTES) + bytes(5 * PIECE_BYTES) + b"ab" * PIECE_BYTES
    whole = packed(coding, data)
    for most in (1 << 30, 1 << 14, 999):
        unpacker, pieces, begin = Unpacker(coding), list[bytes](), 0
        while begin < len(whole):
            end = begin + source.randint(1, most)
            pieces += unpacker.unpack(whole[begin:end])
            begin = end
        unpacker.check_end()
        assert b"".join(pieces) == data and max(map(len, pieces)) <= PIECE_BYTES
    cut = Unpacker(coding)
    assert b"".join(cut.unpack(whole[:-1])) == data
    with pytest.raises(ApiError, match="ends too early"):
        cut.check_end()


def test_several_parts_of_gzip_are_one_body(url: str) -> None:
    parts = b"".join(gzip.compress(BODY[begin : begin + 10]) for begin in range(0, len(BODY), 10))
    assert answer(url, post(parts, Content_Encoding="gzip")).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech"])
def test_a_byte_order_mark_is_no_part_of_a_body(url: str, path: str) -> None:
    body = BODY if path == CHAT else b'{"input": "Hello"}'
    assert answer(url, post(b"\xef\xbb\xbf" + body, path)).status == 200
    # Each byte comes by itself.
    pieces = [b"1\r\n" + bytes([each]) + b"\r\n" for each in b"\xef\xbb\xbf" + body]
    chunked = head("POST", path, {"Host": "localhost", "Content-Type": "application/json", "Transfer-Encoding": "chunked"})
    assert answer(url, chunked, *pieces, b"0\r\n\r\n").status == 200


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_json_in_another_coding_is_told_so(url: str, coding: str) -> None:
    refused = answer(url, post(BODY.decode().encode(coding)))
    assert (refused.status, refused.error["code"], refused.error["hint"]) == (400, "invalid_json", "Send it in UTF-8.")
