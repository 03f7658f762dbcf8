"""The token of a stack of processes: where they find it, who does not see it, and what a stage is without it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from helpers import lengths
from helpers.ask import ask, request
from helpers.processes import ProcessFamily, StartedProcess
from helpers.servers import CLIENT_OPTIONS, NotReady, ServerProcess, omni_stub, stack, stage_stub
from omnistage.client import Omni
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.token import KEY, Token

SECRET = "a-token-of-this-test-0123456789"
TOY = ("--family", "toy")


def refuses_to_start(folder: Path, *flags: str, **environment: str) -> str:
    """The log of a Talker that ends with 1."""
    with (
        ServerProcess("omnistage.talker", *TOY, *flags, log_folder=folder, environment=environment) as server,
        pytest.raises(NotReady) as raised,
    ):
        server.wait_ready()
    assert raised.value.exit_code == 1, raised.value.log
    assert SECRET not in raised.value.log and "Traceback" not in raised.value.log
    return raised.value.log


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_a_stage_without_a_token_does_not_listen_for_other_hosts(tmp_path: Path, address: str):
    log = refuses_to_start(tmp_path, "--address", address)
    assert "OMNISTAGE_TOKEN" in log and "listen on 127.0.0.1" in log


def test_a_stage_on_loopback_without_a_token_says_that_it_is_open(tmp_path: Path):
    with ServerProcess("omnistage.talker", *TOY, log_folder=tmp_path) as server:
        server.wait_ready()
        assert '"event": "stage.open"' in server.log()


@lengths.long_form(
    "stage/test_token.py::test_what_is_no_token",
    unkept="A server whose token file is missing, or is given beside a token, ends and says so without the token.",
)
def test_a_token_that_is_none_is_named_and_not_shown(tmp_path: Path):
    blank, binary = tmp_path / "blank", tmp_path / "binary"
    blank.write_text(f"{SECRET} {SECRET}\n")
    binary.write_bytes(SECRET.encode() + b"\xff")
    assert "cannot be read: No such file" in refuses_to_start(tmp_path, "--token-file", str(tmp_path / "missing"))
    assert "16 to 512" in refuses_to_start(tmp_path, "--token-file", str(blank))
    assert "16 to 512" in refuses_to_start(tmp_path, "--token-file", str(binary))
    assert "16 to 512" in refuses_to_start(tmp_path, OMNISTAGE_TOKEN="short")
    assert "give one of them" in refuses_to_start(tmp_path, "--token-file", str(blank), OMNISTAGE_TOKEN=SECRET)


async def test_a_stage_with_a_token_listens_everywhere_and_health_and_reflection_need_none(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    with ServerProcess(
        "omnistage.talker", *TOY, "--address", "0.0.0.0:0", log_folder=tmp_path, environment={"OMNISTAGE_TOKEN_FILE": str(file)}
    ) as server:
        server.wait_ready()
        address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel, stage_stub(address) as stub:
            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            replies = [reply async for reply in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=10)]
            assert "omnistage.v1.StageService" in {service.name for service in replies[0].list_services_response.service}
            for call in (
                channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=10),
                stub.Describe(stage_pb2.DescribeRequest(), timeout=10),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert (await stub.Describe(stage_pb2.DescribeRequest(), timeout=10, metadata=((KEY, SECRET),))).model == "toy-talker"
        assert SECRET not in server.log()


async def test_stages_and_a_router_with_one_token_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNISTAGE_TOKEN", SECRET)
    with stack(tmp_path) as running:
        async with omni_stub(running.address) as stub:
            (await ask(stub, request("hello", 3))).check_toy(3, "hello")
        for server in running.processes():
            assert SECRET not in server.log()


@lengths.long_form(
    "cli/test_layouts.py::test_a_new_token_is_one_that_a_server_reads_and_the_key_of_a_client_is_not_for_servers",
    "stage/test_token.py::test_a_call_without_the_token_is_refused_with_a_typed_error",
    "system/test_token.py::test_stages_and_a_router_with_one_token_answer",
    unkept="The token that the launcher makes is on no command line.",
)
def test_serve_makes_a_token_that_no_command_line_and_no_log_shows(family: ProcessFamily, tmp_path: Path):
    """And that nobody else has: a caller from outside is refused by every stage."""
    logs = tmp_path / "logs"
    logs.mkdir()
    command = [sys.executable, "-m", "omnistage.cli", "serve", "toy", "--address", "127.0.0.1:0", "--log-dir", str(logs)]
    with StartedProcess(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        try:
            line = launcher.stderr.readline()
            assert line.startswith("serving on "), line
            servers = [pid for pid in family.pids() if pid != launcher.pid]
            (token,) = {variable(pid, "OMNISTAGE_TOKEN") for pid in servers}
            assert len(servers) == 4 and len(token) >= 40
            assert not any(token.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [*servers, launcher.pid])
            with Omni(address=line.split()[2]) as omni:
                assert omni.generate("Hi").text
                stages = [replica.address for replica in omni.replicas()]
            assert len(stages) == 3
            for address in stages:
                with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel, pytest.raises(grpc.RpcError) as failed:
                    stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=10)
                assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert list(logs.iterdir()) and not any(token in log.read_text() for log in logs.iterdir())
        finally:
            launcher.terminate()
            assert launcher.wait(30) == 0


def variable(pid: int, name: str) -> str:
    """A variable of the environment that a process began with."""
    found = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))
    return found.get(name, "")


def make_token(*words: object) -> tuple[int, str]:
    """The exit status of the command that makes a token file, and its complaints."""
    command = [sys.executable, "-m", "omnistage.host.token", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_token_file_is_made_once_and_for_its_owner_only(tmp_path: Path):
    file = tmp_path / "token"
    before = os.umask(0)
    try:
        for _ in range(2):
            assert make_token(file) == (0, "")
            text = file.read_text()
            assert stat.S_IMODE(file.stat().st_mode) == 0o400 and Token(text.strip())
            assert list(tmp_path.iterdir()) == [file]
        assert text == file.read_text()
    finally:
        os.umask(before)
    of_gateway = tmp_path / "gateway"
    assert make_token(of_gateway, file) == (0, "")
    assert of_gateway.read_text().strip() == Token(text.strip()).for_gateway().secret
    file.unlink()
    assert make_token(file) == make_token(of_gateway, file) == (0, "")
    assert file.read_text() != text and of_gateway.read_text().strip() == Token(file.read_text().strip()).for_gateway().secret
    assert stat.S_IMODE(of_gateway.stat().st_mode) == 0o400 and {*tmp_path.iterdir()} == {file, of_gateway}
    for words, complaint in (((of_gateway, ""), "has no name"), ((tmp_path / "missing" / "token",), "No such file")):
        status, complaints = make_token(*words)
        assert status == 1 and complaint in complaints
