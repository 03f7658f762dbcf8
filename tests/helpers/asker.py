"""A client in a process of its own, so that it can run in another network: `python asker.py ADDRESS ask|serving JSON`.

ask: streams the answer to the arguments of `Omni.stream` and prints its account. "save" names an .npy file for the samples. With "pause": N
it stops at the first sound, prints {"talkers": [...]} once N Talkers have a session, and reads on when it gets a line.
serving: waits until that many replicas of each named stage take sessions, {"talker": 2}, and prints their addresses.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

from omnistage.client import AudioChunk, Done, Failover, Omni, TextDelta

SETTLE_S = 60.0


def ask(omni: Omni, pause: int = 0, save: str = "", **asked: Any) -> dict[str, Any]:
    texts: list[str] = []
    sounds: list[AudioChunk] = []
    failovers: list[dict[str, str]] = []
    for event in omni.stream(**asked):
        match event:
            case TextDelta():
                texts.append(event.text)
            case AudioChunk():
                sounds.append(event)
                if pause and len(sounds) == 1:
                    tell({"talkers": busy_talkers(omni, pause)})
                    sys.stdin.readline()
            case Failover():
                failovers.append({"stage": event.stage, "lost": event.lost, "replica": event.replica})
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


def busy_talkers(omni: Omni, count: int) -> list[str]:
    """The addresses of the Talkers that have a session, once the router knows of this many."""
    deadline = time.monotonic() + SETTLE_S
    found: list[str] = []
    while time.monotonic() < deadline:
        found = [replica.address for replica in omni.replicas() if replica.stage == "talker" and replica.sessions]
        if len(found) == count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"wanted {count} Talkers with a session, found {found}")


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
