"""The stack of docker-compose.yml in real containers: two Talkers, the default model, a daemon of the test's own, no network.

All that the images need is installed from wheels by the build. In the short form that is so for the router alone: images with torch begin
with the packages of this environment, which the set-up in the build finds installed and checks.

The tests go on from one another on one stack, as someone who runs it would: up, ask, lose a container, stop, down.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.asr import recognise, recogniser, word_error_rate
from helpers import daemon as daemons
from helpers import lengths
from helpers.daemon import Daemon, Machine, compose_program, processes_in

# Beside other tests, though it looks at the whole machine: what the daemon could change there is changed by no other test.
pytestmark = [pytest.mark.timeout(1200)]

BASE = "omnistage-test-base"
READY = "omnistage-test-ready"
"""Base images: nothing is installed, everything is."""
ROUTER_FROM_BASE = f"services: {{router: {{build: {{args: {{BASE_IMAGE: {BASE}}}}}}}}}\n"
"""Goes behind docker-compose.yml where BASE_IMAGE names the other one."""
ROUTER, OMNI_ROUTER = "127.0.0.1:50050", "127.0.0.1:50060"
GATEWAY = "127.0.0.1:8000"
CONTAINER_USER = 10001
SERVERS = ("gateway", "router", "thinker", "talker", "code2wav")
TALKERS = {"talker": 2}
BUILD_TIMEOUT_S = 900.0
IMPORT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
COMPOSE_TIMEOUT_S = 300.0
"""Also for containers of large models that become ready on a busy machine."""
KILLS = 3

QUESTION: dict[str, Any] = {"prompt": "What is a river?", "seed": 1, "max_tokens": 40}
LONG: dict[str, Any] = {"prompt": "Tell me about the moon.", "seed": 2, "max_tokens": 192, "ignore_eos": True}
"""Takes the stages several times as long as a second client to start, or a container to be found and killed. A client that pauses holds up
no stage: all of an answer finds room ahead of it."""


@dataclass
class Containers:
    """The stack, up since the first test. before: the machine without it. base: of its images, unless they say otherwise."""

    daemon: Daemon
    before: Machine
    base: str

    def compose(self, *arguments: str) -> str:
        return self.daemon.run(compose_program(), *arguments, timeout_s=COMPOSE_TIMEOUT_S)

    def make(self, target: str, arguments: str, timeout_s: float) -> str:
        asked = (f"COMPOSE={compose_program()}", f"ARGS={arguments}")
        return self.daemon.run("make", target, *asked, timeout_s=timeout_s, environment={"BASE_IMAGE": self.base})

    def of(self, service: str) -> list[str]:
        """The containers of a service, running or not."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def at(self, address: str) -> str:
        """The container that has HOST:PORT in the network of the stages."""
        template = '{{with index .NetworkSettings.Networks "omnistage_stages"}}{{.IPAddress}}{{end}}'
        host = address.rpartition(":")[0]
        (found,) = [container for service in SERVERS for container in self.of(service) if self.daemon.inspect(container, template) == host]
        return found

    def ask(self, asked: dict[str, Any], router: str = ROUTER) -> dict[str, Any]:
        """The account of a whole answer."""
        with self.asking(asked, router=router) as client:
            return client.read()

    @contextmanager
    def asking(self, asked: dict[str, Any], what: str = "ask", router: str = ROUTER) -> Iterator[Asker]:
        command = self.daemon.beside(sys.executable, str(Path(daemons.__file__).with_name("asker.py")), router, what, json.dumps(asked))
        with self.started(*command) as process:
            yield Asker(process)

    @contextmanager
    def started(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs beside the test and is ended with the block."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=daemons.ROOT, env=self.daemon.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def wait_logged(self, container: str, event: str) -> None:
        """Return when this container has logged the event."""
        # Servers log to stderr.
        follow = 'exec timeout "$1" docker logs --follow "$2" 2>&1'
        with self.started("sh", "-c", follow, "sh", str(ANSWER_TIMEOUT_S), container) as following:
            assert following.stdout is not None
            assert any(f'"event": "{event}"' in line for line in following.stdout), f"{container} logged no {event}"

    def wait_serving(self, **wanted: int) -> dict[str, list[str]]:
        """Addresses by stage, once the router has this many replicas that take sessions."""
        with self.asking(wanted, "serving") as client:
            return client.read()


@dataclass
class Asker:
    """A client that was started; see helpers/asker.py."""

    process: subprocess.Popen[str]

    def read(self) -> dict[str, Any]:
        """The next thing that it tells. Raises AssertionError with what it complained of."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, complaint = self.process.communicate(timeout=ANSWER_TIMEOUT_S)
            raise AssertionError(f"the client told nothing more:\n{complaint[-4000:]}")
        told: dict[str, Any] = json.loads(line)
        return told

    def go_on(self) -> None:
        """After a pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module", params=[pytest.param(READY, id="short"), pytest.param(BASE, id="long", marks=pytest.mark.long)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    if reason := daemons.obstacle():
        pytest.skip(reason)
    before = Machine.now(CONTAINER_USER)
    base = request.param
    if base == READY and (reason := daemons.missing_environment()):
        print(f"all is installed from wheels: {reason}")
        base = BASE
    with daemons.kept() if base == READY else nullcontext() as kept:
        daemon = Daemon(kept)
        try:
            daemon.start()
            import_bases(daemon, base, tmp_path_factory.mktemp("base") / "wheels")
            if base == READY:
                override = tmp_path_factory.mktemp("compose") / "override.yml"
                override.write_text(ROUTER_FROM_BASE)
                daemon.environment["COMPOSE_FILE"] = f"{daemons.ROOT / 'docker-compose.yml'}:{override}"
            running = Containers(daemon, before, base)
            try:
                # In the short form nobody asks the gateway, so its image is not built.
                services = ("router",) if base == READY else ()
                printed = running.make("up", " ".join(["--scale talker=2", *services]), BUILD_TIMEOUT_S)
                assert ROUTER in printed and f"http://{GATEWAY}" in printed, "make up does not say where to ask"
                yield running
            except BaseException as error:
                error.add_note(f"--- dockerd:\n{daemon.log()}\n--- containers:\n{running.compose('logs', '--tail', '30')}")
                raise
        finally:
            daemon.stop()


def import_bases(daemon: Daemon, base: str, wheels: Path) -> None:
    """Make the base images, where the daemon does not have them from the last run. Whatever else that left goes."""
    if containers := daemon.docker("container", "ls", "--all", "--quiet").split():
        daemon.docker("container", "rm", "--force", *containers)
    for thing, which in (("volume", "dangling=true"), ("network", "type=custom")):
        if left := daemon.docker(thing, "ls", "--quiet", f"--filter={which}").split():
            daemon.docker(thing, "rm", *left)
    wanted = {BASE, base}
    if wanted <= {*daemon.docker("images", "--format", "{{.Repository}}").split()}:
        return
    daemons.download(wheels, extras=daemons.ROUTER_EXTRAS if base == READY else daemons.EXTRAS)
    for name in sorted(wanted):
        daemon.import_image(name, partial(daemons.write_image, environment=name == READY), IMPORT_TIMEOUT_S)
        daemon.lay(name, daemons.files(wheels, environment=name == READY))


@pytest.fixture(scope="module")
def undisturbed(stack: Containers) -> dict[str, Any]:
    """The long answer as it is when nothing happens."""
    return stack.ask(LONG)


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """Word for word and sample for sample."""
    return all(answer[part] == other[part] for part in ("text", "samples", "sha256", "finish_reason"))


def test_a_question_through_the_published_port_is_answered_in_words_that_can_be_heard(stack: Containers, tmp_path: Path) -> None:
    answer = stack.ask({**QUESTION, "save": str(tmp_path / "samples.npy")})
    assert len(answer["text"].split()) > 5 and answer["loudness"] > 0.01
    samples = np.load(tmp_path / "samples.npy")
    assert word_error_rate([(answer["text"], recognise(recogniser(), samples, answer["sample_rate_hz"]))]) <= 0.1


OVER_HTTP = """
import http.client, json, sys
host, words = sys.argv[1], json.loads(sys.argv[2])
connection = http.client.HTTPConnection(host, timeout=100)
for name in (host, "evil.example"):
    connection.request("POST", "/v1/chat/completions", json.dumps(words), {"Content-Type": "application/json", "Host": name})
    answer = connection.getresponse()
    print(json.dumps({"status": answer.status, **json.loads(answer.read())}))
"""


@lengths.long_form(
    "gateway/test_chat.py::test_text_and_samples_are_those_over_grpc",
    "gateway/test_guard.py::test_names_of_this_machine_alone_lead_here_so_no_name_can_be_bound_to_this_address",
    unkept="The gateway of the compose file answers at its published port.",
)
def test_a_question_over_http_is_answered_as_over_grpc(stack: Containers) -> None:
    """By the names that it has there, and by no other."""
    if stack.base == READY:
        pytest.skip("no image of the gateway: with the other base")
    question = {"role": "user", "content": QUESTION["prompt"]}
    asked = {"model": "smol", "messages": [question], "seed": QUESTION["seed"], "max_completion_tokens": QUESTION["max_tokens"]}
    printed = stack.daemon.run(*stack.daemon.beside(sys.executable, "-c", OVER_HTTP, GATEWAY, json.dumps(asked)))
    answer, refused = map(json.loads, printed.splitlines())
    assert answer["choices"][0]["message"]["content"] == stack.ask(QUESTION)["text"]
    assert (refused["status"], refused["error"]["code"]) == (403, "host_not_allowed")


@lengths.long_form(
    "router/test_starting.py::test_replicas_come_and_go_with_the_addresses_of_their_name",
    "system/test_compose.py::test_an_answer_is_whole_when_its_talker_is_killed_in_the_middle_and_the_talker_comes_back",
)
def test_both_talkers_are_found_by_their_name_and_both_work(stack: Containers) -> None:
    found = stack.wait_serving(**TALKERS)["talker"]
    assert sorted(map(stack.at, found)) == sorted(stack.of("talker"))
    with stack.asking({**LONG, "pause": 1, "held": True}) as one, stack.asking({**LONG, "pause": 2, "held": True}) as other:
        assert one.read() == other.read() == {}
        one.go_on()
        assert len(one.read()["talkers"]) == 1
        other.go_on()
        assert sorted(other.read()["talkers"]) == sorted(found)
        one.go_on()
        other.go_on()
        assert same(one.read(), other.read())


@lengths.long_form(
    "system/test_compose.py::test_a_question_through_the_published_port_is_answered_in_words_that_can_be_heard",
    unkept="The client of the compose file reaches the router from inside the network.",
)
def test_a_client_inside_the_network_gets_an_answer(stack: Containers) -> None:
    printed = stack.compose("run", "--rm", "--no-TTY", "ask", QUESTION["prompt"], "--seed", "1", "--max-tokens", "40", "--json")
    told = json.loads(printed.strip().splitlines()[-1])
    assert told["text"] and told["audio_s"] > 1


@lengths.long_form(
    "system/test_omni_speech.py::test_text_codes_and_sound_are_those_of_transformers",
    "house/test_tree.py::test_every_stage_is_built_as_its_kind",
    unkept="The containers of the profile of Qwen2.5-Omni start and answer.",
)
def test_qwen2_5_omni_speaks_in_its_profile(stack: Containers, omni_checkpoint: Path) -> None:
    if stack.base == READY:
        pytest.skip("three more servers: in the long form")
    profile = ("--profile", "qwen2_5_omni")
    stack.daemon.environment["CHECKPOINT"] = str(omni_checkpoint)
    stack.compose(*profile, "up", "--detach", "--wait", "omni-router")
    answer = stack.ask({"prompt": "What is a river?", "seed": 1, "max_tokens": 20, "max_frames": 50}, OMNI_ROUTER)
    assert answer["text"] and answer["loudness"] > 0.001 and 0 < answer["samples"] <= 50 * 480 and not answer["samples"] % 480
    stack.compose(*profile, "rm", "--stop", "--force", "omni-router", "omni-thinker", "omni-talker", "omni-code2wav")


def test_an_answer_is_whole_when_its_talker_is_killed_in_the_middle_and_the_talker_comes_back(
    stack: Containers, undisturbed: dict[str, Any]
) -> None:
    """On a busy machine the Talker may have said all before it is killed, or the Thinker before it may be too slow to answer, and is opened
    anew with other hops behind it: then again."""
    for _ in range(KILLS):
        stack.wait_serving(**TALKERS)
        with stack.asking({**LONG, "pause": 1}) as client:
            (address,) = client.read()["talkers"]
            killed = stack.at(address)
            stack.daemon.crash(killed)
            client.go_on()
            answer = client.read()
        assert same(answer, undisturbed)
        print(answer["failovers"])
        lost = [failover for failover in answer["failovers"] if failover["stage"] == "talker"]
        if lost:
            break
    assert lost and lost[0]["lost"] == address != lost[0]["replica"]
    stack.wait_serving(**TALKERS)
    assert stack.daemon.inspect(killed, "{{.RestartCount}}") != "0"


@lengths.long_form(
    "system/test_host.py::test_sigterm_lets_a_running_session_end_and_refuses_a_new_one",
    "router/test_sharing.py::test_a_draining_router_finishes_and_refuses",
    "gateway/test_disconnect.py::test_a_gateway_that_is_told_to_end_lets_answers_end",
    "house/test_tree.py::test_a_server_has_time_to_drain_and_comes_back_when_it_dies",
)
def test_a_stop_lets_a_running_answer_end_and_every_server_drains(stack: Containers, undisturbed: dict[str, Any]) -> None:
    (router,) = stack.of("router")
    with stack.asking({**LONG, "pause": 1}) as client:
        client.read()
        with stack.started(compose_program(), "stop") as stopping:
            stack.wait_logged(router, "server.draining")
            client.go_on()
            assert same(client.read(), undisturbed)
            printed, _ = stopping.communicate(timeout=ANSWER_TIMEOUT_S)
            assert stopping.returncode == 0, printed
    for service in SERVERS:
        for container in stack.of(service):
            assert stack.daemon.inspect(container, "{{.State.Status}} {{.State.ExitCode}}") == "exited 0", service
            log = stack.daemon.docker("logs", container)
            events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
            assert events[events.index("server.draining") :][-1] == "server.stopped" and "drain.cut" not in events, log


def test_nothing_is_left(stack: Containers) -> None:
    daemon = stack.daemon
    stack.make("down", "--volumes", ANSWER_TIMEOUT_S)
    daemon.docker("image", "prune", "--force", timeout_s=ANSWER_TIMEOUT_S)  # Those of the code before this.
    assert daemon.docker("ps", "--all", "--quiet") == ""
    assert daemon.docker("volume", "ls", "--quiet") == ""
    assert set(daemon.docker("network", "ls", "--format", "{{.Name}}").split()) == {"bridge", "host", "none"}
    namespace = Path(f"/proc/{daemon.pid}/ns/pid").readlink()
    assert processes_in(str(namespace)) and daemon.cgroups()
    daemon.stop()
    assert processes_in(str(namespace)) == []
    assert daemon.cgroups() == []
    assert not daemon.folder.exists()
    assert Machine.now(CONTAINER_USER) == stack.before
