"""`omnistage status` and `omnistage pipelines`: they start nothing, find what runs, and fit the terminal; and metrics of a stack."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from helpers.command import omnistage
from helpers.http_servers import running
from helpers.metrics import value
from helpers.output import object_of, refusal
from helpers.processes import ProcessFamily
from helpers.terminal import terminal_after
from omnistage.cli.show.metrics import StackCollector, serve_stack_metrics
from omnistage.cli.show.tables import settings_lines
from omnistage.cli.stack.served import Served, register_stack
from omnistage.client import Omni
from omnistage.client.connection import Replica
from omnistage.client.errors import StackError
from omnistage.host.metrics import serve_metrics

WATCHED = """
import json, os, sys
del os.environ["OMNISTAGE_ROUTER"]  # the tests have it turned off
from omnistage.client import connection
connection.LOCAL_ADDRESS = sys.argv[1]  # that of this machine may have anything behind it
started = []
sys.addaudithook(lambda event, arguments: started.append(str(arguments[1])) if event == "subprocess.Popen" else None)
from omnistage.cli.main import app
try:
    app(sys.argv[2:], prog_name="omnistage")
finally:
    assert not started, started
    assert "torch" not in sys.modules
"""


def watched(default_address: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command where `omnistage serve` listens at this address by default. It has started nothing."""
    command = [sys.executable, "-c", WATCHED, default_address, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "AssertionError" not in done.stderr, done.stderr
    return done


def lines_on_terminal(width: int, *words: str) -> list[str]:
    """The lines that a terminal of this width shows of the command."""
    return [line for line in terminal_after(*words, size=(width, 24)).lines if line]


def objects(done: subprocess.CompletedProcess[str], key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = object_of(done)[key]
    return found


def test_status_where_nothing_runs(family: ProcessFamily, free_port: int) -> None:
    done = watched(f"127.0.0.1:{free_port}", "status")
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: nothing serves at 127.0.0.1:{free_port}"
    assert "omnistage serve" in hint and "--address" in hint


def test_stacks_elsewhere_are_named(family: ProcessFamily, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks of this user are named; a look at them that fails only costs the hint."""
    monkeypatch.setenv("OMNISTAGE_STATE", str(tmp_path / "state"))
    with register_stack(Served("127.0.0.1:7", os.getpid(), "toy", "", 5.0)):
        done = watched(f"127.0.0.1:{free_port}", "status")
        assert done.stderr.splitlines()[-1].endswith(" Stacks of yours serve elsewhere: --address 127.0.0.1:7.")
        (tmp_path / "state" / "run").chmod(0o777)
        done = watched(f"127.0.0.1:{free_port}", "status")
        assert done.stderr.splitlines()[-1].endswith(", or OMNISTAGE_ROUTER.")


def test_models_where_nothing_runs_are_those_that_come_with_it(family: ProcessFamily, free_port: int) -> None:
    done = watched(f"127.0.0.1:{free_port}", "pipelines", "--json")
    models = {model["name"]: model for model in objects(done, "pipelines")}
    omni = [f"{family}{end}" for family in ("qwen2_5_omni", "qwen3_omni") for end in ("", "-codes", "-text")]
    assert list(models) == ["diffusers", "picture", *omni, "smol", "toy", "toy-film", "toy-omni", "toy-picture"]
    assert (models["toy"]["stages"], models["toy"]["outputs"]) == (["thinker", "talker", "code2wav"], ["text", "audio"])
    assert f"nothing serves at 127.0.0.1:{free_port}" in done.stderr
    assert list(models["toy"]) == ["name", "stages", "inputs", "outputs", "voices", "description", "on_request"], (
        "none of them runs, in no state"
    )
    on_request = {name: model["on_request"] for name, model in models.items() if model["on_request"]}
    assert on_request == {"diffusers": ["latents", "pixels"], "picture": ["latents", "pixels"], "smol": ["alignment"]}


def test_what_runs_at_the_default_address_is_found(toy_address: str) -> None:
    replicas = objects(watched(toy_address, "status", "--json"), "replicas")
    assert [replica["stage"] for replica in replicas] == ["thinker", "talker", "code2wav"]
    keys = ["pipeline", "stage", "address", "pid", "state", "sessions", "queue", "transport", "settings"]
    for replica in replicas:
        assert list(replica) == keys and replica["state"] == "serving" and isinstance(replica["transport"], str)
        assert Path(f"/proc/{replica['pid']}").is_dir()
    assert [model["name"] for model in objects(watched(toy_address, "pipelines", "--json"), "pipelines")] == ["toy"]
    one_of_several = omnistage("status", "--json", "--address", f"no-such-host.invalid:50050,{toy_address}")
    assert objects(one_of_several, "replicas") == replicas, "one known host of several is enough"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("localhost", "localhost has no port; give HOST:PORT, such as localhost:50050"),
        ("http://127.0.0.1:50050", "http://127.0.0.1:50050 is a URL; give HOST:PORT alone, without http://"),
        ("no-such-host.invalid:50050", "no host 'no-such-host.invalid' is known here"),
        ("127.0.0.1:99999", "has port 99999; ports are 1 to 65535"),
        ("127.0.0.1:1,50050", "50050 has no host; give HOST:PORT, such as 127.0.0.1:50050"),
    ],
)
def test_a_wrong_address_is_told_in_its_own_words(address: str, told: str) -> None:
    lines = "\n".join(refusal("status", "--address", address))
    assert lines.startswith("error: --address: ") and told in lines
    assert "no server answers" not in lines, "nobody was waited for"


def test_status_tells_what_every_stage_chose(toy_address: str) -> None:
    for replica in objects(watched(toy_address, "status", "--json"), "replicas"):
        assert (replica["settings"]["family"], replica["settings"]["device"]) == ("toy", "cpu (default)")
    assert "family" not in watched(toy_address, "status").stdout, "that is for who asks for more"
    shown = watched(toy_address, "status", "-v").stdout.splitlines()
    for stage in ("thinker", "talker", "code2wav"):
        (line,) = [line for line in shown if line.startswith(f"{stage}  ") and "family" in line]
        assert "device cpu (default)" in line and "threads 1 (default)" in line


def test_bytes_are_written_for_people() -> None:
    settings = {
        "arena_bytes": ("536870912 (default)", "512 MiB (default)"),
        "context": ("32768 of the 32768 that the model was made for", "32768 of the 32768 that the model was made for"),
        "feature_cache_bytes": ("0", "0 B"),
        "kv_cache_bytes": ("2523136000, for 68512 tokens of 64 sessions", "2.35 GiB, for 68512 tokens of 64 sessions"),
        "other_bytes": ("as they come", "as they come"),
        "small_bytes": ("1023", "1023 B"),
    }
    values = {name: value for name, (value, _) in settings.items()}
    _, line = settings_lines([Replica("toy", "thinker", "toy", "x:1", 1, "serving", 0, 0, "", values)])
    shown = ", ".join(f"{name} {text}" for name, (_, text) in settings.items())
    assert re.sub(r"\[[^]]*\]", "", line).split("  ")[1] == shown


def test_settings_are_told_with_the_pipeline_where_several_have_such_a_stage() -> None:
    stages = [("one", "thinker"), ("one", "talker"), ("two", "thinker"), ("two", "diffusion")]
    replicas = [Replica(pipeline, stage, "toy", "x:1", 1, "serving", 0, 0, "", {"device": "cpu"}) for pipeline, stage in stages]
    _, *lines = settings_lines(replicas)
    assert [re.sub(r"\[[^]]*\]", "", line).split("  ")[0] for line in lines] == ["one/thinker", "talker", "two/thinker", "diffusion"]


@pytest.mark.parametrize(("width", "gone"), [(120, set()), (80, {"transport"}), (60, {"transport", "model", "pipeline"})])
def test_status_fits_the_terminal(toy_address: str, width: int, gone: set[str]) -> None:
    with Omni(address=toy_address) as omni:
        omni.generate("Hi")  # so that there are transports to show
        replicas = omni.replicas()
    header, *lines = lines_on_terminal(width, "status", "--address", toy_address)
    assert not any("…" in line or len(line) > width for line in (header, *lines))
    assert len(lines) == len(replicas) and gone.isdisjoint(header.split())
    assert {"stage", "address", "state", "sessions"} <= set(header.split())
    for row, replica in zip(lines, replicas, strict=True):
        assert {replica.stage, replica.address} <= set(row.split())
        assert {"serving", "draining", "lost"} & set(row.split())


@pytest.fixture(scope="module")
def two_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A stack with as many stages as the default one, of two pipelines, and a page: its address, and the folder of its user."""
    state = str(tmp_path_factory.mktemp("state"))
    words = ("serve", "toy", "toy-picture", "--detach", "--address", "127.0.0.1:0", "--http", "127.0.0.1:0")
    done = omnistage(*words, variables={"OMNISTAGE_STATE": state})
    assert done.returncode == 0, done.stderr
    try:
        address = done.stderr.split("serving on ")[1].split()[0]
        with Omni(address=address) as omni:
            omni.draw("A hill", pipeline="toy-picture")  # It starts after the first one.
            omni.generate("Hi", pipeline="toy")
        yield address, state
    finally:
        assert omnistage("stop", variables={"OMNISTAGE_STATE": state}).returncode == 0


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (34, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_status_of_two_pipelines_is_whole_on_a_small_terminal(
    two_pipelines: tuple[str, str], monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """No word is cut or broken, and on the usual terminal nothing scrolls away."""
    address, state = two_pipelines
    monkeypatch.setenv("OMNISTAGE_STATE", state)
    with Omni(address=address) as omni:
        replicas = omni.replicas()
    terminal = terminal_after("status", "--address", address, size=size)
    assert len(terminal.lines) < max(size[1], 12)
    assert all(len(line) < size[0] and "…" not in line for line in terminal.lines)
    words = " ".join(terminal.lines).replace(":", " ").split()
    for replica in replicas:
        port = replica.address.rpartition(":")[2]
        assert {replica.pipeline, replica.stage, replica.state, port} <= set(words)
    assert any(line.startswith("page") and "http://127.0.0.1:" in line for line in terminal.lines)
    assert "family" not in words


@pytest.mark.parametrize("words", ["pipelines", "list"])
def test_a_list_that_does_not_fit_into_columns_has_lines_for_each_row(words: str) -> None:
    terminal = terminal_after(words, size=(40, 10))
    (start,) = [number for number, line in enumerate(terminal.lines) if line == "smol"]
    told = " ".join(line.strip() for line in terminal.lines[start:])
    assert "takes: text gives: text, audio" in told
    assert all(len(line) <= 40 for line in terminal.lines)


# The pages of several processes as one


def serving(name: str, count: int) -> str:
    """The address of a page of one process."""
    registry = CollectorRegistry()
    Counter("seen", 'Said with "quotes", a \\ and\na second line.', ("who",), registry=registry).labels(who=f'the "{name}" \\').inc(count)
    Histogram("took_seconds", "How long.", registry=registry, buckets=(1, 2)).observe(count)
    if name == "router":
        Gauge("places", "Of the router alone.", registry=registry).set(7)
    return f"127.0.0.1:{serve_metrics('127.0.0.1', 0, registry)}"


def page(addresses: Mapping[str, str], accept: str = "text/plain") -> str:
    """The launcher's page of metrics."""
    shown = serve_stack_metrics("127.0.0.1:0", lambda: addresses)
    opener = build_opener(ProxyHandler({}))
    opener.addheaders = [("Accept", accept)]
    with opener.open(f"http://{shown}/metrics", timeout=60) as response:
        text: str = response.read().decode()
        return text


@contextmanager
def saying(answer: bytes | None) -> Iterator[str]:
    """A server that says this to each of its visitors, whatever they ask; None: that says nothing."""
    over = threading.Event()

    class Visit(BaseRequestHandler):
        def handle(self) -> None:
            if answer is None:
                over.wait(60)
            else:
                self.request.recv(1 << 16)
                self.request.sendall(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Visit)
    with running([server], over):
        yield f"127.0.0.1:{server.server_port}"


def test_families_of_all_processes_are_merged_and_every_sample_says_whose_it_is() -> None:
    text = page({"talker-0": serving("talker", 1), "talker-1": serving("talker", 2), "router": serving("router", 3)})
    lines = text.splitlines()
    for name in ("seen_total", "took_seconds", "places", "omnistage_process_up", "process_cpu_seconds_total"):
        assert [line.split()[1] for line in lines if line.split()[:1] == ["#"] and line.split()[2] == name] == ["HELP", "TYPE"], name
    families = list(text_string_to_metric_families(text))
    assert all("process" in sample.labels for family in families for sample in family.samples)
    assert value(families, "seen_total", process="talker-1", who='the "talker" \\') == 2
    assert [family.documentation for family in families if family.name == "seen"] == ['Said with "quotes", a \\ and\na second line.']
    assert value(families, "took_seconds_bucket", process="router", le="2.0") == 0
    assert (value(families, "took_seconds_count", process="router"), value(families, "places")) == (1, 7)
    assert {value(families, "omnistage_process_up", process=name) for name in ("talker-0", "talker-1", "router", "launcher")} == {1}


def test_the_page_is_good_in_the_other_format_too() -> None:
    text = page({"router": serving("router", 3)}, accept="application/openmetrics-text; version=1.0.0")
    assert value(list(open_metrics_families(text)), "seen_total", process="router") == 3


ANSWERS = {
    "nothing": None,
    "hangs up": b"",
    "no HTTP": b"nonsense\r\n\r\n",
    "an error": b"HTTP/1.0 500 Oh\r\nContent-Length: 13\r\n\r\nseen_total 1\n",
    "no metrics": b"HTTP/1.0 200 OK\r\nContent-Length: 18\r\n\r\nthis is { no page\n",
    "no text": b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n\xff\xfe\n",
    "cut off": b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nseen_total 1\n",
    "too long": b"HTTP/1.0 200 OK\r\nContent-Length: 99999999999\r\n\r\nseen_total 1\n",
    "no length": b"HTTP/1.0 200 OK\r\n\r\nseen_total 1\n",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_process_that_gives_no_page_is_left_out_and_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.cli.show.metrics.SILENCE_S", 0.3)
    good = serving("talker", 5)
    with saying(ANSWERS[name]) as bad:
        families = list(text_string_to_metric_families(page({"bad": bad, "ended": "", "talker": good})))
    assert {name: value(families, "omnistage_process_up", process=name) for name in ("bad", "ended")} == {"bad": 0, "ended": 0}
    assert {sample.labels["process"] for family in families if family.name == "seen" for sample in family.samples} <= {"talker"}


def test_a_look_ends_in_time_however_many_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are threads to ask them with: the last are not even asked."""
    monkeypatch.setattr("omnistage.cli.show.metrics.FETCHERS", 2)
    monkeypatch.setattr("omnistage.cli.show.metrics.SILENCE_S", 1.0)
    monkeypatch.setattr("omnistage.cli.show.metrics.LOOK_S", 0.5)
    with saying(None) as silent:
        families = list(StackCollector(lambda: {str(number): silent for number in range(20)}).collect())
    assert [value(families, "omnistage_process_up", process=str(number)) for number in range(20)] == [0] * 20
    assert value(families, "omnistage_process_up", process="launcher") == 1


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StackError, match=f"cannot listen on {address} for metrics") as failed:
            serve_stack_metrics(address, dict)
    assert "--metrics" in failed.value.hint
