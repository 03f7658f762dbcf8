"""A client in a process of its own, so that it can run in another network: `python asker.py ADDRESS ask|serving JSON`.

ask: streams the answer to the arguments of `Omni.stream` and prints its account. "save" names an .npy file for the samples. With "pause": N
it all but stops at the first sound, prints {"talkers": [...]} once N Talkers have a session, and reads on when it gets a line. With
"held" it first prints {} and asks when it gets a line: to start it takes longer than many an answer.
serving: waits until that many replicas of each named stage take sessions, {"talker": 2}, and prints their addresses.
"""

from __future__ import annotations

import hashlib
import json
import select
import sys
import time
from typing import Any

import numpy as np

from omnistage.client import AudioChunk, Done, Failover, Omni, TextDelta

SETTLE_S = 60.0

SIP_S = 1.0
"""A paused client reads an event so often: a client that leaves its answer unread for some seconds loses it."""


def ask(omni: Omni, pause: int = 0, save: str = "", held: bool = False, **asked: Any) -> dict[str, Any]:
    if held:
        tell({})
        sys.stdin.readline()
    texts: list[str] = []
    sounds: list[AudioChunk] = []
    failovers: list[dict[str, str]] = []
    paused: AskerPause | None = None
    for event in omni.stream(**asked):
        if paused and paused.is_over():
            paused = None
        match event:
            case TextDelta():
                texts.append(event.text)
            case AudioChunk():
                sounds.append(event)
                if pause and len(sounds) == 1:
                    paused = AskerPause(omni, pause)
            case Failover():
                failovers.append({"stage": event.stage, "lost": event.lost, "replica": event.replica, "reason": event.reason})
            case Done():
                samples = np.concatenate([sound.samples for sound in sounds])
                if save:
                    np.save(save, samples)
                return {
                    "text": "".join(texts),
                    "sha256": hashlib.sha256(samples.tobytes()).hexdigest(),
                    "samples": len(samples),
                    "sample_rate_hz": sounds[0].sample_rate_hz,
                    "loudness": float(np.sqrt(np.mean(samples**2))),
                    "finish_reason": event.finish_reason,
                    "failovers": failovers,
                }
    raise AssertionError("the stream ended without its account")


class AskerPause:
    """Tells the addresses of the Talkers that have a session, once the router knows of so many, and is over when a line has come."""

    def __init__(self, omni: Omni, talkers: int) -> None:
        self._omni, self._talkers = omni, talkers
        self._deadline = time.monotonic() + SETTLE_S
        self._told = False

    def is_over(self) -> bool:
        """Waits for it until the next event is to be read."""
        sip = time.monotonic() + SIP_S
        while not self._told and time.monotonic() < sip:
            found = [replica.address for replica in self._omni.replicas() if replica.stage == "talker" and replica.sessions]
            if len(found) == self._talkers:
                tell({"talkers": found})
                self._told = True
            elif time.monotonic() > self._deadline:
                raise AssertionError(f"wanted {self._talkers} Talkers with a session, found {found}")
            else:
                time.sleep(0.02)
        if not (self._told and select.select([sys.stdin], [], [], max(0.0, sip - time.monotonic()))[0]):
            return False
        sys.stdin.readline()
        return True


def serving(omni: Omni, **wanted: int) -> dict[str, list[str]]:
    deadline = time.monotonic() + SETTLE_S
    found: dict[str, list[str]] = {}
    while time.monotonic() < deadline:
        found = {stage: [] for stage in wanted}
        for replica in omni.replicas():
            if replica.stage in found and replica.state == "serving":
                found[replica.stage].append(replica.address)
        if {stage: len(addresses) for stage, addresses in found.items()} == wanted:
            return found
        time.sleep(0.1)
    raise AssertionError(f"wanted {wanted}, serving are {found}")


def tell(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    address, what, arguments = sys.argv[1:]
    with Omni(address=address) as client:
        call = ask if what == "ask" else serving
        tell(call(client, **json.loads(arguments)))
