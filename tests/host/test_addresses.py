"""Addresses and settings as people type them, taken ports, and servers that start with a mistake: one line says what to change."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from helpers import lengths
from helpers.processes import ProcessFamily
from omnistage.host.addresses import check_address, check_can_listen, check_replica_address, is_loopback
from omnistage.host.errors import StartError, fault_found
from omnistage.host.settings import ServerSettings, read_settings
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        yield port


@pytest.mark.parametrize("address", ["127.0.0.1:50050", "0.0.0.0:0", "[::1]:65535", "localhost:1", "a-host.example_1:80"])
def test_host_and_port(address: str) -> None:
    assert (check_address(address), check_replica_address(address)) == (address, address)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("50051", "has no host: give HOST:PORT such as 127.0.0.1:50051"),
        (":50051", "has no host: give HOST:PORT such as 127.0.0.1:50051"),
        ("localhost", "has no port: give HOST:PORT such as localhost:50050"),
        ("localhost:", "has no port: give HOST:PORT such as localhost:50050"),
        ("a..b:50050", "names no possible host: between its dots stand 1 to 63 characters"),
        (f"{'x' * 64}:1", "names no possible host"),
        ("http://127.0.0.1:50050", "is a URL: leave http:// out, give HOST:PORT such as 127.0.0.1:50050"),
        ("grpc://router", "is a URL: leave grpc:// out"),
        ("0.0.0.0:99999", "has no possible port: a port is 0 to 65535"),
        ("::1:50050", "an IPv6 address stands in brackets"),
        ("127.0.0.1:http", "is not HOST:PORT"),
        ("127.0.0.1:50050 ", "is not HOST:PORT"),
        ("127.0.0.1:\u0661\u0662", "is not HOST:PORT"),
        ("", "is not HOST:PORT"),
    ],
)
def test_what_is_wrong_with_an_address_is_told_in_words(address: str, told: str) -> None:
    for check in (check_address, check_replica_address):
        with pytest.raises(ValueError, match=r"HOST:PORT|a port is|brackets|characters") as raised:
            check(address)
        assert told in str(raised.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.255.0.53", "localhost", "0:0:0:0:0:0:0:1")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "127.999.0.1")),
    ],
)
def test_channelz_is_for_who_an_open_stage_is_for(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    address = f"[{host}]:1" if ":" in host else f"{host}:1"
    if loopback:
        assert ServerSettings(channelz_address=address).channelz_address == address
    else:
        with pytest.raises(ValidationError, match="can be reached from other hosts"):
            ServerSettings(channelz_address=address)


def test_a_free_port_can_be_listened_on(free_port: int) -> None:
    for address in ("127.0.0.1:0", f"127.0.0.1:{free_port}", f"localhost:{free_port}", f"0.0.0.0:{free_port}"):
        check_can_listen(address, "--address")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_who_is_in_the_way_is_told(taken: int, host: str) -> None:
    with pytest.raises(StartError) as raised:
        check_can_listen(f"{host}:{taken}", "--metrics-address")
    told = str(raised.value)
    assert told.startswith(f"cannot listen on {host}:{taken}: the port is taken by ")
    assert f"(pid {os.getpid()})" in told and told.endswith("; choose another --metrics-address")


def test_a_port_whose_connections_have_just_ended_is_free() -> None:
    """The kernel keeps such connections for a minute. That must not keep a server from starting again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # first, so that the side of the server is the one that waits
    check_can_listen(f"127.0.0.1:{port}", "--address")


def test_a_port_that_is_kept_can_be_listened_on_once() -> None:
    """With SO_REUSEPORT the system would let two servers of one user share the calls. A server on another address is not in the way."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", 0))
        port: int = keeper.getsockname()[1]
        address = f"127.0.0.1:{port}"
        with socket.create_server(("127.0.0.2", port)):
            check_can_listen(address, "--address", is_reserved=True)
            with pytest.raises(StartError, match="the port is taken by "):
                check_can_listen(address, "--address")
        with socket.create_server(("127.0.0.1", port), reuse_port=True), pytest.raises(StartError, match=rf"\(pid {os.getpid()}\)"):
            check_can_listen(address, "--address", is_reserved=True)
        check_can_listen(address, "--address", is_reserved=True)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
        ("no-such-host.invalid", "no host 'no-such-host.invalid' is known here"),
    ],
)
def test_a_host_that_is_not_here(host: str, told: str) -> None:
    with pytest.raises(StartError, match="choose another --address") as raised:
        check_can_listen(f"{host}:50050", "--address")
    assert told in str(raised.value)


def test_the_module_is_named_where_python_runs_one() -> None:
    """pytest runs this test, started as a module or not; the process's own command line says which."""
    from omnistage.host.addresses import listener

    with socket.create_server(("127.0.0.1", 0)) as server:
        told = listener(server.getsockname()[1])
    assert told.endswith(f"(pid {os.getpid()})") and ("python -m " in told) == ("-m" in sys.orig_argv)


TOY = ["--family", "toy"]


def test_words_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_THREADS", "3")
    monkeypatch.setenv("OMNISTAGE_DEVICE", "cuda:1")
    settings = read_settings(StageSettings, [*TOY, "--threads=2", "--options", '{"length": 3}', "--allow", "a:1,b:2"], "stage")
    assert (settings.threads, settings.device, settings.options, settings.allow) == (2, "cuda:1", {"length": 3}, ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--family is missing: family of models"),
        ([*TOY, "--colour", "red"], "there is no option --colour; --help tells more"),
        ([*TOY, "--max-session", "3"], "there is no option --max-session, did you mean --max-sessions?"),
        ([*TOY, "--thread=3"], "there is no option --thread, did you mean --threads?"),
        ([*TOY, "red"], "unrecognized arguments: red"),
        ([*TOY, "--address"], "argument --address: expected one argument"),
        ([*TOY, "--address", "nowhere"], "--address: 'nowhere' has no port"),
        ([*TOY, "--metrics-address=:1"], "--metrics-address: ':1' has no host"),
        ([*TOY, "--device", "gpu"], "--device: 'gpu' is no device: give cpu, cuda or cuda:N"),
        ([*TOY, "--dtype", "float64"], "--dtype: is 'float64'; it must be 'auto', 'float32' or 'bfloat16'"),
        ([*TOY, "--max-sessions", "-1"], "--max-sessions: is '-1'; it must be at least 0"),
        ([*TOY, "--threads", "many"], "--threads: is 'many'; it must be a whole number"),
        ([*TOY, "--options", '{"a":'], "options"),
        ([*TOY, "--device", "x" * 100_000], "is no device"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(words: list[str], told: str) -> None:
    with pytest.raises(StartError) as raised:
        read_settings(StageSettings, words, "stage")
    assert told in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OMNISTAGE_LOG_LEVEL", "loud", "OMNISTAGE_LOG_LEVEL: is 'loud'; it must be 'debug', 'info', 'warning' or 'error'"),
        ("OMNISTAGE_GRACE", "soon", "OMNISTAGE_GRACE: is 'soon'; it must be a number"),
        ("OMNISTAGE_KEPT_PORT", "maybe", "OMNISTAGE_KEPT_PORT: is 'maybe'; it must be true or false"),
        ("OMNISTAGE_STAGES", "thinker", "OMNISTAGE_STAGES: must be KIND=HOST:PORT"),
        ("OMNISTAGE_STAGES", "thinker=50051", "OMNISTAGE_STAGES: '50051' has no host"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartError) as raised:
        read_settings(RouterSettings, ["--pipeline", "toy"], "router")
    assert told in str(raised.value)


@pytest.mark.parametrize("kind", [StageSettings, RouterSettings])
def test_help_is_for_people(kind: type[StageSettings | RouterSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read_settings(kind, ["--help"], "python -m omnistage.thinker")
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m omnistage.thinker ") and "--address HOST:PORT" in shown
    for internal in ("tuple", "str", "int", "dict", "__main__", "PydanticUndefined"):
        assert not re.search(rf"\b{internal}\b", shown), internal


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"type": "int_parsing", "msg": "..."}, "is 'x'; it must be a whole number"),
        ({"type": "less_than_equal", "msg": "...", "ctx": {"le": 2.0}}, "is 'x'; it must be at most 2"),
        ({"type": "literal_error", "msg": "...", "ctx": {"expected": "'a' or 'b'"}}, "is 'x'; it must be 'a' or 'b'"),
        ({"type": "value_error", "msg": "Value error, give more"}, "give more"),
        ({"type": "missing", "msg": "..."}, "is missing"),
        ({"type": "extra_forbidden", "msg": "..."}, "is no name of a setting here"),
        ({"type": "string_pattern", "msg": "Input should have 3 items"}, "must have 3 items"),
    ],
)
def test_what_pydantic_finds_is_told_in_the_same_words(fault: dict[str, Any], told: str) -> None:
    assert fault_found(fault, "'x'") == told


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("kind", [StageSettings, RouterSettings])
def test_no_number_is_infinite(kind: type[StageSettings | RouterSettings], value: str) -> None:
    for name in [name for name, field in kind.model_fields.items() if field.annotation is float]:
        option = "--" + name.replace("_", "-")
        with pytest.raises(StartError, match=f"{option}: is '{value}'; it must be a number"):
            read_settings(kind, [f"{option}={value}"], "server")


RUN_AND_LOOK = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules)
"""


def refused(family: ProcessFamily, module: str, *words: str) -> str:
    """The reason in the one line with which a server of this module ends. The server has not imported torch."""
    line, printed = family.refused(RUN_AND_LOOK, f"omnistage.{module}", *words)
    entry = json.loads(line)
    assert (entry["event"], entry["level"]) == ("server.cannot_start", "error")
    assert printed == "False\n", "torch was imported to find that out"
    return str(entry["reason"])


@lengths.drawn_cells(
    2,
    ("module", "words", "told"),
    [
        ("thinker", "", "--family is missing"),
        ("talker", "--family smoll", "no talker named 'smoll'; there are qwen2_5_omni, qwen3_omni, smol, toy"),
        ("diffusion", "--family smol", "no diffusion named 'smol'; there are diffusers, toy"),
        ("diffusion", '--family toy --options {"speed":3}', "unknown options ['speed']"),
        ("diffusion", '--family toy --options {"length":"long"}', "option length of the toy models is 'long'"),
        ("thinker", '--family smol --options {"speed":3}', "smol has no options, ['speed'] are given"),
        ("thinker", "--family toy --checkpoint /", "the models of toy have no weights"),
        ("talker", "--family smol --device cuda:0", "the talker of smol computes on cpu only"),
        ("talker", "--family smol --dtype bfloat16", "the talker of smol computes in float32 only"),
        ("talker", "--family smol --tensor-parallel-size 2", "the talker of smol computes on one device; for more answers at once"),
        ("talker", "--family smol --max-batch-size 2", "the talker of smol computes one session after the other; leave it out"),
        ("talker", "--family smol --max-batch-tokens 99", "max_batch_tokens 99: the talker of smol has no use for it; leave it out"),
        ("code2wav", "--family smol --kv-cache-bytes 99", "kv_cache_bytes 99: the code2wav of smol has no use for it"),
        ("code2wav", "--family smol --enable-cache false", "enable_cache false: the code2wav of smol has no use for it"),
        ("diffusion", "--family toy --threads 2", "threads 2: the diffusion of toy has no use for it"),
        ("thinker", "--family smol --tensor-parallel-size 0", "--tensor-parallel-size: is '0'; it must be at least 1"),
        ("talker", "--family toy --metrics-address 0.0.0.0:99999", "--metrics-address: '0.0.0.0:99999' has no possible port"),
        ("router", "--channelz-address 0.0.0.0:0", "--channelz-address: '0.0.0.0:0' can be reached from other hosts"),
        ("router", "--pipeline nothing", "no pipeline 'nothing'"),
        ("router", "--pipeline toy", "--stages thinker=HOST:PORT"),
        ("router", "--address localhost", "'localhost' has no port"),
    ],
)
def test_a_mistake_is_told_in_one_line(family: ProcessFamily, module: str, words: str, told: str) -> None:
    assert told in refused(family, module, *words.split())


@lengths.drawn_cells(1, "module", ["thinker", "talker", "code2wav"])
def test_a_folder_that_is_no_model(family: ProcessFamily, tmp_path: Path, module: str) -> None:
    words = ("--family", "smol", "--checkpoint", str(tmp_path))
    assert f"{tmp_path / module / 'config.json'} is missing" in refused(family, module, *words)
    (tmp_path / module).mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / module / name).write_text("{")
    assert "is not JSON" in refused(family, module, *words)
    (tmp_path / module / "config.json").write_text('{"model_type": "llama"}')
    assert "is a 'llama', not a" in refused(family, module, *words)


@pytest.mark.parametrize("option", ["--address", "--metrics-address"])
def test_a_taken_port_is_found_before_the_model_is_loaded(family: ProcessFamily, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        told = refused(family, "thinker", "--family", "smol", option, address)
    assert told.startswith(f"cannot listen on {address}: the port is taken by ")
    assert told.endswith(f"choose another {option}")
