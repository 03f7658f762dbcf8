"""A stack has a token: the one that its environment names, or a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.cli.stack import resources
from omnistage.client.routers import KEY_VARIABLE as KEY_VARIABLE
from omnistage.host.settings import ServerSettings
from omnistage.host.token import FILE_VARIABLE, make_file, new_token, read_token
from omnistage.wire.token import GATEWAY_VARIABLE, VARIABLE


def test_a_new_token_is_one_that_a_server_reads_and_the_key_of_a_client_is_not_for_servers() -> None:
    found = resources.with_token({KEY_VARIABLE: "secret", "HOME": "/root"})
    assert set(found) == {"HOME", VARIABLE} and found["HOME"] == "/root" and read_token("", found) is not None
    given = {VARIABLE: new_token().secret}
    assert resources.with_token({**given, KEY_VARIABLE: "secret"}) == resources.with_token(given) == given


def test_a_gateway_has_its_own_token_and_not_that_of_the_stages(tmp_path: Path) -> None:
    token, file = new_token(), tmp_path / "token"
    assert make_file(file, token)
    expected = {"HOME": "/root", GATEWAY_VARIABLE: token.for_gateway().secret}
    foreign = {"HOME": "/root", f"{GATEWAY_VARIABLE}_FILE": "of another stack"}
    assert resources.gateway_environment({**foreign, VARIABLE: token.secret}) == expected
    assert resources.gateway_environment({**foreign, FILE_VARIABLE: str(file)}) == expected
    assert token.secret not in str(expected)


def test_a_token_file_that_a_server_would_read_gets_no_token_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    assert make_file(file, new_token())
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    found = resources.with_token({FILE_VARIABLE: str(file)})
    read = read_token(ServerSettings().token_file, found)
    assert read is not None and read.secret == file.read_text().strip()
