"""The behaviour that all server processes share: start, be asked how it is, drain, stop. The token of a stack: where processes find it, who
does not see it, and what a stage is without it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from helpers import lengths, waiting
from helpers.ask import ask, request
from helpers.memory import has_huge_pages, huge_kib
from helpers.metrics import described, documented, fetched, value
from helpers.processes import ProcessFamily, StartedProcess
from helpers.run import RunStream, open_of, row_chunks
from helpers.servers import CLIENT_OPTIONS, NotReady, ServerProcess, ServerProcesses, omni_stub, stack, stage_flags, stage_stub, watch_until
from omnistage.client import Omni
from omnistage.models.smol.store import model_directory
from omnistage.models.toy import formulas
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.token import KEY, Token

ROWS = np.stack([formulas.row(token) for token in range(8)])
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    """A stage and a router."""
    with stack(tmp_path_factory.mktemp("logs"), kinds=("diffusion",), pipeline="toy-picture") as running:
        yield running


def servers(pair: ServerProcesses) -> list[tuple[ServerProcess, str]]:
    assert pair.router is not None
    return [(pair.stages["diffusion"], "omnistage.v1.StageService"), (pair.router, "omnistage.v1.OmniService")]


def fails_to_start(folder: Path, module: str, *flags: str) -> NotReady:
    with ServerProcess(module, *flags, log_folder=folder) as server, pytest.raises(NotReady) as raised:
        server.wait_ready()
    return raised.value


def ready_line(server: ServerProcess) -> dict[str, Any]:
    """The line of its log that says the same as the line that it prints."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    (ready,) = [line for line in lines if line["event"] == "server.ready"]
    return ready


# Starting ------------------------------------------------------------------------------------------------------------------------------


def test_the_ready_line_and_the_log_say_the_same(pair: ServerProcesses):
    for server, _ in servers(pair):
        ready = ready_line(server)
        assert (ready["address"], ready["pid"], ready["kind"]) == (server.address, server.pid, server.kind)


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel has no huge pages that can be asked for")
async def test_a_server_that_is_ready_soon_has_its_memory_in_huge_pages(pair: ServerProcesses):
    """Huge pages make a killed server gone, and noticed, at once: the kernel frees memory before it closes sockets. The test counts private
    memory without a file as far as it lies in whole blocks of a huge page: where in a mapping of a few MiB these begin is chance."""

    def is_mostly(pid: int) -> bool:
        held, possible = huge_kib(pid)
        return held > possible / 2 > 0

    for server, _ in servers(pair):
        await waiting.until(partial(is_mostly, server.pid))


def test_a_second_server_on_a_taken_port_says_so(pair: ServerProcesses, tmp_path: Path):
    taken = pair.stages["diffusion"]
    failure = fails_to_start(tmp_path, "omnistage.diffusion", "--family", "toy", "--address", taken.address)
    assert failure.exit_code == 1
    assert f"cannot listen on {taken.address}" in failure.log and "--address" in failure.log and "Traceback" not in failure.log
    failure = fails_to_start(tmp_path, "omnistage.diffusion", "--family", "toy", "--metrics-address", taken.metrics_address)
    assert failure.exit_code == 1
    assert f"cannot listen on {taken.metrics_address}" in failure.log and "Traceback" not in failure.log


def test_weights_that_are_damaged_are_one_line_and_no_traceback(tmp_path: Path):
    weights = Path(shutil.copytree(model_directory() / "talker", tmp_path / "talker")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    failure = fails_to_start(tmp_path, "omnistage.talker", "--family", "smol", "--checkpoint", str(tmp_path))
    (line,) = [line for line in failure.log.splitlines() if line.startswith("{")]
    assert (failure.exit_code, json.loads(line)["event"]) == (1, "server.cannot_start")
    assert f"{weights} is damaged" in json.loads(line)["reason"] and "Traceback" not in failure.log


# Being asked ---------------------------------------------------------------------------------------------------------------------------


async def test_health_and_reflection_answer(pair: ServerProcesses):
    for server, service in servers(pair):
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", service, "readiness", "liveness"):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
            assert raised.value.code() == grpc.StatusCode.NOT_FOUND

            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            replies = [reply async for reply in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=10)]
            names = {listed.name for listed in replies[0].list_services_response.service}
            assert names == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            asked = iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)])
            replies = [reply async for reply in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=10)]
            assert replies[0].file_descriptor_response.file_descriptor_proto

            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=10)
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED, "channelz names other clients"


async def test_channelz_answers_on_a_port_of_its_own(tmp_path: Path):
    flags = ["--family", "toy", "--channelz-address", "127.0.0.1:0"]
    with ServerProcess("omnistage.diffusion", *flags, log_folder=tmp_path) as server:
        server.wait_ready()
        ready = ready_line(server)
        async with grpc.aio.insecure_channel(ready["channelz_address"]) as channel:
            listed = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=10)
            assert len(listed.server) == 2


async def test_health_check_command(pair: ServerProcesses, free_port: int):
    for address, code in ((pair.address, 0), (pair.addresses["diffusion"], 0), (f"127.0.0.1:{free_port}", 1)):
        command = [sys.executable, "-m", "omnistage.host.healthcheck", address]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        async with asyncio.timeout(30):
            assert await process.wait() == code


async def test_metrics_page_shows_every_family(pair: ServerProcesses):
    async with stage_stub(pair.addresses["diffusion"]) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        caller = RunStream(stub)
        await caller.send(open=open_of(description))
        (await caller.finish()).check_whole(["image", "progress"])
    pages = {server.kind: await asyncio.to_thread(fetched, server.metrics_address) for server, _ in servers(pair)}
    for kind, section, who in (
        ("router", "Router", {""}),
        ("diffusion", "Stages", {"all", "those with shared memory", "those that make pictures"}),
    ):
        rows = {row.name for row in documented() if row.section == section and (row.who or "") in who}
        assert len(rows) > 5 and rows <= described(pages[kind]).keys()
    stage = pages["diffusion"]
    assert value(stage, "omnistage_stage_sessions_total", reason="OK") == 1 == value(stage, "omnistage_stage_first_output_seconds_count")


# Stopping ------------------------------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_a_running_session_end_and_refuses_a_new_one(tmp_path: Path):
    with ServerProcess("omnistage.talker", *stage_flags(), log_folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_ready)
        async with stage_stub(server.address) as stub, grpc.aio.insecure_channel(server.address) as channel:
            description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
            running = RunStream(stub)
            await running.send(open=open_of(description))
            await running.opened()
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
            assert (await health.read()).status == SERVING

            server.terminate()
            assert (await health.read()).status == NOT_SERVING
            assert (await watch_until(server.address, lambda report: report.draining)).sessions == 1
            refused = RunStream(stub)
            await refused.send(open=open_of(description))
            await refused.expect("DRAINING", grpc.StatusCode.UNAVAILABLE)

            await running.send(chunk=row_chunks("hidden", ROWS, [8])[0])
            heard = await running.finish()
            heard.check_whole(["codes"])
            np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))
            assert await asyncio.to_thread(server.wait) == 0


async def test_a_session_that_outlasts_the_grace_is_cut(tmp_path: Path):
    with ServerProcess("omnistage.talker", *stage_flags(), "--grace", "0.3", log_folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_ready)
        async with stage_stub(server.address) as stub:
            running = RunStream(stub)
            await running.send(open=open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)))
            await running.opened()
            server.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await running.read()
                await running.read()
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(server.wait) == 0
        assert "drain.cut" in server.log()


async def test_a_server_whose_parent_is_gone_ends(tmp_path: Path):
    with stack(tmp_path, kinds=("diffusion",), pipeline="toy-picture") as running:
        for server in running.processes():
            server.cut_lifeline()
            assert await asyncio.to_thread(server.wait) == 0


async def test_a_server_is_not_serving_before_it_is_ready_and_can_be_stopped_then(tmp_path: Path, free_port: int):
    """The router waits for a stage that is not there: nothing listens on port 1."""
    address = f"127.0.0.1:{free_port}"
    flags = ["--pipeline", "toy-picture", "--stages", "diffusion=127.0.0.1:1", "--address", address]
    with ServerProcess("omnistage.router", *flags, log_folder=tmp_path) as router:
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "readiness", "omnistage.v1.OmniService"):
                asked = health_pb2.HealthCheckRequest(service=name)
                assert (await health.Check(asked, wait_for_ready=True, timeout=30)).status == NOT_SERVING
        router.terminate()
        assert await asyncio.to_thread(router.wait) == 0


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
    "stage/test_settings.py::test_what_is_no_token",
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
    "stage/test_settings.py::test_a_call_without_the_token_is_refused_with_a_typed_error",
    "system/test_host.py::test_stages_and_a_router_with_one_token_answer",
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
