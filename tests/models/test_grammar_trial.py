"""Constraints of strangers that take minutes and gigabytes: refused by their field, and nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths
from helpers.waiting import until
from omnistage.engine.request import Constraint
from omnistage.models.conversation import TextConstraint, Turn
from omnistage.models.interface import BadRequest, Full, TextRequest
from omnistage.models.text import constraint
from omnistage.models.text.constraint import MIN_GRAMMAR_BYTES, Constraints

END = 256
TRIES = 5
SLOWEST = TextConstraint(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b.*"} for number in range(20)]})
)
"""For minutes, by itself."""
GOOD = TextConstraint("choice", choices=("yes", "no"))


@pytest.fixture
async def constraints() -> AsyncIterator[Constraints]:
    """Each byte is a token."""
    result = Constraints(
        lambda number: bytes([number]) if number < END else b"",
        lambda text: [*text.encode()],
        special={END},
        end_ids=(END,),
        vocabulary=END + 1,
    )
    yield result
    await result.close()


async def grammar(constraints: Constraints, constraint: TextConstraint, client: str = "") -> Constraint:
    result = await constraints.of(TextRequest((Turn("user", ("x",)),), 1, constraint=constraint, client=client))
    assert result is not None
    return result


async def grammar_in_time(constraints: Constraints, constraint: TextConstraint) -> Constraint:
    """On a busy machine half a second of a processor can take longer than a trial may, and the client is told to ask again."""
    for _ in range(TRIES - 1):
        with suppress(Full):
            return await grammar(constraints, constraint)
    return await grammar(constraints, constraint)


def pid(constraints: Constraints) -> int:
    process = constraints._trials._process
    assert process is not None
    return process.pid


def schema(value: dict[str, Any]) -> TextConstraint:
    return TextConstraint("json_schema", json.dumps(value))


def tree(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string", "pattern": f"(a|b)*a(a|b){{{chance.randint(10, 60)}}}"}
    each = {f"k{number}": tree(chance, depth - 1) for number in range(chance.randint(2, 4))}
    return chance.choice([{"type": "object", "properties": each}, {"anyOf": [*each.values()]}, {"allOf": [*each.values()]}])


def word(chance: random.Random, length: int) -> str:
    return "".join(chance.choices("abcdefgh ", k=length))


SLOW: dict[str, Callable[[random.Random], TextConstraint]] = {
    "all of many patterns": lambda chance: schema(
        {"allOf": [{"type": "string", "pattern": f".*{chance.choice('abc')}.{{{number}}}b.*"} for number in range(chance.randint(11, 30))]}
    ),
    "patterns of names": lambda chance: schema(
        {"type": "object", "patternProperties": {f"^(a|b)*a(a|b){{{number}}}$": {} for number in range(chance.randint(10, 60))}}
    ),
    "a tree of patterns": lambda chance: schema(tree(chance, chance.randint(2, 5))),
    "many names": lambda chance: schema(
        {"type": "object", "properties": {word(chance, 20): {"type": "string"} for _ in range(chance.randint(1000, 6000))}}
    ),
    "many values": lambda chance: schema({"enum": [word(chance, 40) for _ in range(chance.randint(5000, 30_000))]}),
    "deep": lambda chance: TextConstraint("json_schema", '{"items":' * (depth := chance.randint(50, 20_000)) + "{}" + "}" * depth),
    "references": lambda chance: schema(
        {
            "$defs": {
                f"a{number}": {"anyOf": [{"$ref": f"#/$defs/a{number + 1}"}, {"items": {"$ref": f"#/$defs/a{number + 1}"}}]}
                for number in range(chance.randint(50, 500))
            }
            | {"a500": {"type": "string"}},
            "$ref": "#/$defs/a0",
        }
    ),
    "counts of counts": lambda chance: TextConstraint(
        "regex", f"((x?y{{1,{chance.randint(20, 900)}}}){{1,{chance.randint(20, 900)}}}z?){{3}}"
    ),
    "classes": lambda chance: TextConstraint("regex", f"(\\p{{L}}|\\p{{N}}\\p{{P}}){{1,{chance.randint(50, 2000)}}}[^x]{{0,900}}"),
    "words": lambda chance: TextConstraint("regex", ".*(" + "|".join(word(chance, 12) for _ in range(chance.randint(500, 20_000))) + ").*"),
    "brackets": lambda chance: TextConstraint("regex", "(" * (depth := chance.randint(100, 60_000)) + "a" + ")" * depth),
    "choices": lambda chance: TextConstraint("choice", choices=tuple(word(chance, 900) for _ in range(chance.randint(50, 1000)))),
}


@pytest.mark.timeout(600)
@lengths.rounds(20, 300)
async def test_whatever_is_slow_or_large_is_refused_by_its_field_or_has_a_grammar(constraints: Constraints, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for number in range(rounds):
        kind = [*SLOW][(seed + number) % len(SLOW)]
        constraint = SLOW[kind](chance)
        try:
            await grammar_in_time(constraints, constraint)
        except BadRequest as error:
            assert error.field == f"thinker.constraint.{constraint.form}" and error.description, kind
            refused += 1
        assert (await grammar_in_time(constraints, GOOD)).begin().allowed().any()
    assert refused, "nothing was slow"


@pytest.mark.parametrize("name", ["evil", "evil/{}"], ids=["a client", "a host that invents keys"])
async def test_nobody_waits_for_the_constraints_of_another(constraints: Constraints, name: str) -> None:
    """At most for the one that is being tried."""
    slow = [asyncio.create_task(grammar(constraints, SLOWEST, name.format(number))) for number in range(20)]
    await asyncio.sleep(0)
    await grammar(constraints, GOOD, "honest")
    assert sum(task.done() for task in slow) <= 2
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_client_that_leaves_ends_its_trial(constraints: Constraints) -> None:
    await grammar(constraints, GOOD)
    before = pid(constraints)
    for again_after_s in (0.0, 0.0005, 0.05):
        leaving = asyncio.create_task(grammar(constraints, SLOWEST))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.sleep(again_after_s)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await grammar(constraints, GOOD)
    assert pid(constraints) == before


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_lost_while_it_has_nothing_to_do_costs_nothing(constraints: Constraints, blow: signal.Signals) -> None:
    await grammar(constraints, GOOD)
    before = pid(constraints)
    os.kill(before, blow)
    await grammar(constraints, GOOD)
    assert pid(constraints) != before


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_is_lost_during_a_trial_is_told(constraints: Constraints, blow: signal.Signals) -> None:
    await grammar(constraints, GOOD)
    trial = asyncio.create_task(grammar(constraints, SLOWEST))
    await until(lambda: Path(f"/proc/{pid(constraints)}/task/{pid(constraints)}/children").read_text())
    os.kill(pid(constraints), blow)
    with pytest.raises(Full, match="ask again later"):
        await trial
    await grammar(constraints, GOOD)


async def test_a_process_that_cannot_start_is_told(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(Full, match="did not start"):
            await grammar(constraints, GOOD)
    await grammar(constraints, GOOD)


async def test_a_stage_starts_without_it(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers without constraints need none."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        await constraints.warm_up()
    await grammar(constraints, GOOD)


async def test_grammars_of_running_answers_have_a_bound_together(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "ALL_GRAMMARS_BYTES", 3 * MIN_GRAMMAR_BYTES)
    walks = [(await grammar(constraints, GOOD, f"client {number}")).begin() for number in range(3)]
    with pytest.raises(Full, match="grammars of running answers take"):
        await grammar(constraints, GOOD, "late")
    del walks[0]
    gc.collect()
    await grammar(constraints, GOOD, "late")


async def test_a_host_leaves_room_for_the_grammars_of_others(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "ALL_GRAMMARS_BYTES", 8 * MIN_GRAMMAR_BYTES)
    walks = [(await grammar(constraints, GOOD, f"greedy/{number}")).begin() for number in range(6)]
    with pytest.raises(Full, match="grammars of running answers take 96 MiB of 128"):
        await grammar(constraints, GOOD, "greedy/new")
    walks += [(await grammar(constraints, GOOD, name)).begin() for name in ("one", "other")]
    del walks[:6]
    gc.collect()
    assert await grammar(constraints, GOOD, "greedy")
