"""The process that makes grammars on trial: `python -m omnistage.models.text.grammar_child DESCRIPTOR PARENT`.

    parent --(vocabulary)--> this process --"ready"-->
    parent --(constraint, pipe)--> this process --fork--> one trial --> "passed", "unfit" or how it ended --> parent

It gets messages on a socket of packets: first the vocabulary, then one constraint after the other, each with a pipe that its parent closes
when nobody waits any more. A trial is a fork of this process, which has the vocabulary in llguidance's form: the memory and the processor
time of each are bounded by the kernel, whatever the library does. This process itself never reads a constraint.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llguidance import LLTokenizer

from omnistage.host.child import PIECE_BYTES, die_with_parent, read_start
from omnistage.models.conversation import TextConstraint
from omnistage.models.text.grammar import (
    TRIAL_BYTES,
    TRIAL_CPU_S,
    TRIAL_LIMIT_S,
    TokenPieces,
    UnfitConstraint,
    check_fits_some,
    new_matcher,
    next_mask,
)

READY, RECEIPT = b"ready", b"taken"


class GreedyTokenizer:
    """Turns text into ids, always the longest piece that comes next: nearly as the model's tokenizer does, which is not here."""

    def __init__(self, vocabulary: TokenPieces) -> None:
        special = set(vocabulary.special)
        self._ids = {piece: number for number, piece in enumerate(vocabulary.pieces) if piece and number not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> Sequence[int]:
        data, ids = text.encode(), list[int]()
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def serve(channel: socket.socket) -> None:
    """Try the constraints that come on `channel`, until the parent closes it."""
    vocabulary: TokenPieces = pickle.loads(_read_message(channel)[0])  # from the parent, whom this process trusts
    tokenizer = vocabulary.tokenizer(GreedyTokenizer(vocabulary))
    # A fork takes some memory whatever it makes.
    fork_bytes: int = _try(tokenizer, vocabulary, TextConstraint("regex", "a?"), channel.fileno()).get("passed", 0)
    channel.send(READY)
    while True:
        content, descriptors = _read_message(channel)
        if not content:
            return
        channel.send(RECEIPT)
        form, text, choices = json.loads(content)
        outcome = _try(tokenizer, vocabulary, TextConstraint(form, text, tuple(choices)), descriptors[0])
        if "passed" in outcome:
            outcome["passed"] = max(outcome["passed"] - fork_bytes, 0)
        channel.send(json.dumps(outcome).encode())
        os.close(descriptors[0])


def _read_message(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next message: the content of its first descriptor, and its other descriptors. The content is empty at the end."""
    message, descriptors, _, _ = socket.recv_fds(channel, PIECE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return b"", []
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        return file.read(), descriptors[1:]


def _try(tokenizer: LLTokenizer, vocabulary: TokenPieces, constraint: TextConstraint, pipe: int) -> dict[str, Any]:
    """Make a grammar and its first mask in a fork. Returns {"passed": bytes that the grammar takes}, {"unfit": why}, {"ended": the number
    of the signal or the status with which the fork ended}, {"late": True}, or {"left": True} if the other end of `pipe` was closed."""
    reading, writing = os.pipe()
    parent = os.getpid()
    trial = os.fork()
    if trial == 0:
        os.close(reading)
        _make(tokenizer, vocabulary, constraint, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        outcome = _wait(answer.fileno(), pipe)
        if outcome:
            os.kill(trial, signal.SIGKILL)
        _, status = os.waitpid(trial, 0)
        if not outcome and (content := answer.read()):  # Without content the fork ended before it answered.
            outcome = json.loads(content)
        return outcome or {"ended": os.waitstatus_to_exitcode(status)}


def _wait(answer: int, pipe: int) -> dict[str, Any]:
    """Wait for the fork's answer. Returns {} if it came or the fork ended, else why the wait ended."""
    events = select.poll()
    events.register(answer, select.POLLIN)
    events.register(pipe, 0)
    ready = dict(events.poll(1000 * TRIAL_LIMIT_S))
    if answer in ready:
        return {}
    return {"left": True} if pipe in ready else {"late": True}


def _make(tokenizer: LLTokenizer, vocabulary: TokenPieces, constraint: TextConstraint, answer: int, parent: int) -> NoReturn:
    """Within the fork of the process `parent`: limit it, make the grammar, answer and end."""
    die_with_parent(parent)
    size, before = _memory_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (size + TRIAL_BYTES, size + TRIAL_BYTES))
    signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
    try:
        try:
            matcher = new_matcher(tokenizer, constraint)
            check_fits_some(next_mask(matcher, vocabulary.mask_words))
            outcome: dict[str, Any] = {"passed": _memory_bytes()[1] - before}
        except UnfitConstraint as error:
            outcome = {"unfit": str(error)}
        except MemoryError:  # The library itself ends the process with SIGABRT.
            outcome = {"ended": -signal.SIGABRT}
        os.write(answer, json.dumps(outcome).encode())
    finally:
        os._exit(0)  # Whatever the library raises ends here: this process is not the one that serves.


def _memory_bytes() -> tuple[int, int]:
    """The address space and the resident memory of this process."""
    with Path("/proc/self/statm").open() as file:
        pages = file.read().split()
    size = resource.getpagesize()
    return int(pages[0]) * size, int(pages[1]) * size


def main() -> None:
    """Limit this process, then serve. Standard error is dropped: the library prints a stranger's words there."""
    descriptor, _ = read_start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(0, 2)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel)


if __name__ == "__main__":
    main()
