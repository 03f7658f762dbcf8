"""Loading fetches nothing, whatever a checkpoint names and whenever the libraries were imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from helpers import lengths
from helpers.drawings import writable
from omnistage.models.checkpoint.files import CONSTANTS, DIALS, OFFLINE_VARIABLES, BadCheckpoint
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load

FETCH = """
import sys
from pathlib import Path
token = Path.home() / "hub" / "token"
token.parent.mkdir(parents=True)
token.write_text("hf_secret")
opened = []
sys.addaudithook(lambda event, what: opened.append(str(what[0])) if event == "open" else None)
if sys.argv[2] == "imported before":
    import huggingface_hub, transformers, diffusers
from omnistage.models.reports import LoadError
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
try:
    load("diffusers", "diffusion", LoadOptions(path=Path(sys.argv[1])))
except LoadError as error:
    print(f"{type(error).__name__}: {error}")
print([name for name in opened if name == str(token)])
"""
FETCHING: dict[str, dict[str, Any]] = {
    "a backbone": {"model_type": "dpt", "backbone": "evil/evil", "use_pretrained_backbone": True, "is_hybrid": False},
    "a config": {"model_type": "dpt", "backbone": "evil/evil", "use_pretrained_backbone": False, "is_hybrid": False},
}


def naming(what: str, folder: Path) -> Path:
    """A checkpoint whose config names something that a library would fetch."""
    made = writable("z-image", folder)
    index = made / "model_index.json"
    values = json.loads(index.read_text()) | {"text_encoder": ["transformers", "DPTForDepthEstimation"]}
    index.write_text(json.dumps(values))
    (made / "text_encoder" / "config.json").write_text(json.dumps(FETCHING[what]))
    return made


HOOKED: list[list[tuple[str, object]]] = []
"""Where the events of this process go now. Python removes no hook, so there is one for all tests."""


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if HOOKED and event in ("open", *DIALS):
        HOOKED[-1].append((event, arguments[1] if event == "socket.connect" else arguments[0]))


@pytest.fixture(scope="module")
def hook() -> None:
    sys.addaudithook(_see)


@pytest.fixture
def seen(hook: None) -> Iterator[list[tuple[str, object]]]:
    """Files that this process opens, and hosts that it looks up or connects to, each with its event."""
    HOOKED.append([])
    yield HOOKED[-1]
    HOOKED.clear()


@pytest.mark.parametrize("what", FETCHING)
def test_nobody_is_asked_for_what_a_config_names(
    what: str, seen: list[tuple[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries were imported long ago, and nobody has told them to be offline. No host is looked up, and the token of whoever runs
    this is not read."""
    token = tmp_path / "token"
    token.write_text("hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(token))
    for name in CONSTANTS:
        monkeypatch.setattr(huggingface_hub.constants, name, False)
    for name in (*OFFLINE_VARIABLES, "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    folder = naming(what, tmp_path / "m")
    seen.clear()
    with pytest.raises(BadCheckpoint, match=f"{folder}/text_encoder"):
        load("diffusers", "diffusion", LoadOptions(path=folder))
    assert [where for event, where in seen if event != "open"] == []
    opened = [str(where) for event, where in seen if event == "open"]
    assert str(folder / "text_encoder" / "config.json") in opened and str(token) not in opened


@lengths.long_form(unkept="a process of its own asks nobody either")
@pytest.mark.parametrize(
    ("what", "when"), [("a backbone", "imported before"), ("a config", "imported by it"), ("a backbone", "imported by it")]
)
def test_a_process_of_its_own_asks_nobody_either(what: str, when: str, tmp_path: Path) -> None:
    """A socket that listens where the hub is said to be: nobody connects, and the token of whoever runs this is not read."""
    folder = naming(what, tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        environment = {**others, "HF_ENDPOINT": endpoint, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run([sys.executable, "-c", FETCH, folder, when], capture_output=True, text=True, timeout=200, env=environment)
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):
            hub.accept()
    said, opened = done.stdout.splitlines()
    assert said.startswith(f"BadCheckpoint: {folder}/text_encoder")
    assert opened == "[]"


DIAL = """
import socket, sys
from omnistage.models.checkpoint.files import Unreachable, offline
address = ("127.0.0.1", int(sys.argv[1]))
for dial, *where in ((socket.create_connection, address), (socket.getaddrinfo, "localhost", 1), (socket.gethostbyname, "localhost")):
    with offline():
        try:
            dial(*where)
        except Unreachable as error:
            print(error)
socket.create_connection(address).close()
ours, theirs = socket.socketpair()
with offline():
    ours.send(b"x")
    print(theirs.recv(1))
"""


def test_a_library_that_listens_to_nobody_is_stopped_at_the_socket() -> None:
    """While a model is loaded, and no longer; what is between processes of ours goes on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", DIAL, str(listening.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    *refused, exchanged = done.stdout.splitlines()
    assert len(refused) == 3 and all("loading fetches nothing" in line for line in refused)
    assert exchanged == "b'x'"
