"""Grammars of a vocabulary: whatever is drawn among what they allow keeps to them, and a walk can begin anywhere in an answer. Constraints
of strangers that take minutes and gigabytes are refused by their field, and nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.waiting import until
from omnistage.engine.request import Constraint as Grammar
from omnistage.engine.request import Walk
from omnistage.models.conversation import ConstraintForm, TextConstraint, Turn
from omnistage.models.interface import BadRequest, Full, TextRequest
from omnistage.models.text import constraint as module
from omnistage.models.text.answer import Marks
from omnistage.models.text.constraint import MIN_GRAMMAR_BYTES, Constraints
from omnistage.models.text.grammar import FORMS

END, OTHER_END, TURN = 600, 601, 602
WORDS = ('{"', '":', '", "', '"}', ": ", "true", "null", "ab", "abc", "12", " the", "é", "日本", "ß\n", "-0", "0.5", "e+")
PIECES = [*(bytes([byte]) for byte in range(256)), *map(str.encode, WORDS)]
PIECES += [one + other for one in PIECES[97:123:2] for other in PIECES[97:123:3]]
VOCABULARY = 640
"""More than there are tokens, and not a multiple of anything but 32."""


IDS = {piece: token_id for token_id, piece in reversed([*enumerate(PIECES)])}


def encode(text: str) -> list[int]:
    """The longest pieces first."""
    data, ids, at = text.encode(), [], 0
    while at < len(data):
        size = next(size for size in range(12, 0, -1) if data[at : at + size] in IDS)
        ids.append(IDS[data[at : at + size]])
        at += size
    return ids


def piece(token_id: int) -> bytes:
    """Whatever is special may have any, and what is behind it has none."""
    return PIECES[token_id] if token_id < len(PIECES) else b"ab" if token_id <= TURN else b""


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(piece, encode, special={*range(len(PIECES), TURN + 1)}, end_ids=(END, OTHER_END), vocabulary=VOCABULARY)
    yield made
    asyncio.run(made.close())


async def grammar(constraints: Constraints, constraint: TextConstraint, history: tuple[int, ...] = (), client: str = "") -> Grammar:
    made = await constraints.of(TextRequest((Turn("user", ("x",)),), 1, constraint=constraint, history=history, client=client))
    assert made is not None
    return made


def allowed(words: Any) -> list[int]:
    return np.nonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))[0].tolist()


def drawn(grammar: Grammar, rng: random.Random, most: int = 400) -> tuple[list[int], list[list[int]]]:
    """A random answer, and what was allowed at each of its places. It likes to end, and loses its liking for what is long."""
    walk = grammar.begin()
    ids: list[int] = []
    choices: list[list[int]] = []
    while len(ids) < most:
        choices.append(allowed(walk.allowed()))
        assert choices[-1] and max(choices[-1]) < TURN, "nothing leads on, or a special token"
        assert walk.must_end == ({END, OTHER_END} >= set(choices[-1]))
        inside = [token_id for token_id in choices[-1] if token_id < END]
        if not inside or (END in choices[-1] and rng.random() < 0.3):
            assert {END, OTHER_END} <= set(choices[-1])
            return ids, choices
        closing = [token_id for token_id in inside if PIECES[token_id][:1] in (b'"', b"]", b"}", b",")]
        ids.append(rng.choice(closing if closing and rng.random() < 0.4 + len(ids) / 100 else inside))
        walk.note(ids[-1])
    return [], choices  # Cut: nothing can be said of it.


def text_of(ids: list[int]) -> str:
    return b"".join(PIECES[token_id] for token_id in ids).decode()


def any_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(
        ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "anyOf"] + ["object", "array"] * (depth < 3)
    )
    match kind:
        case "string":
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
        case "number":
            return {"type": "number", "minimum": -1.5, "exclusiveMaximum": rng.choice([2, 1000.25])}
        case "enum":
            return {"enum": rng.sample(["a", "é", 7, None, True, [1], {"b": 2}, "日本\n"], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice(["x", 0, {"a": [1, {}]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(ab|日+)c?$"])}
        case "anyOf":
            return {"anyOf": [any_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["a", "bc", "é", "with space", 'q"uote'], rng.randrange(4))
            properties = {name: any_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = rng.randrange(3)
            return {"type": "array", "items": any_schema(rng, depth + 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that `any_schema` speaks, from its definition."""
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(same(value, each) for each in schema["enum"])
    if "const" in schema:
        return same(value, schema["const"])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            fits = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1000)
            return fits and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
        case "integer":
            return number and value == int(value) and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return number and schema["minimum"] <= value < schema["exclusiveMaximum"]
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(each, schema["items"]) for each in value)
    fits = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
    return fits and all(is_valid(each, schema["properties"][name]) for name, each in value.items())


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@lengths.rounds(60, 3000)
async def test_text_that_keeps_to_a_schema_is_json_that_does(constraints: Constraints, seed: int, rounds: int) -> None:
    rng, whole = random.Random(seed), 0
    for _ in range(rounds):
        schema = any_schema(rng)
        made = await grammar(constraints, TextConstraint("json_schema", json.dumps(schema)))
        for _ in range(3):
            ids, _ = drawn(made, rng)
            if ids:
                whole += 1
                assert is_valid(json.loads(text_of(ids)), schema), f"{text_of(ids)} of {schema}"
    assert whole > rounds


REGEXES = [
    *("a{2,3}", "(no|yes), [0-9]{3}é?", "[^\\x00-\\x7f]{1,5}", "[0-9]+\\.[0-9]{2}", "(abc?|the| )*x", "[a-z_]{3}[ \\n][^a-z]"),
    *("(a|b)*a(a|b){5}c", "日本?", ".{1,9}", "a*"),
]


@pytest.mark.parametrize("regex", REGEXES)
async def test_text_that_keeps_to_an_expression_matches_it(constraints: Constraints, regex: str, seed: int) -> None:
    rng = random.Random(seed)
    made = await grammar(constraints, TextConstraint("regex", regex))
    answers = [text_of(drawn(made, rng)[0]) for _ in range(60)]
    assert all(re.fullmatch(regex, answer) for answer in answers if answer), answers
    assert len(set(answers)) > 1


async def test_one_of_the_choices_is_said_and_each_can_be(constraints: Constraints, seed: int) -> None:
    rng = random.Random(seed)
    choices = ("a", "ab", "abc", "日本", "日", 'q"\\/\n\t', "(a|b)*", "\x00\x1f", "x" * 150, "\U0001f600 ok")
    made = await grammar(constraints, TextConstraint("choice", choices=choices))
    said = set()
    for _ in range(5_000):  # Some are said once in fifty times.
        said.add(text_of(drawn(made, rng)[0]))
        if said >= set(choices):
            break
    assert said == set(choices)


async def test_a_walk_begins_anywhere_in_an_answer(constraints: Constraints, seed: int) -> None:
    """The tokens so far decide what may come next, and nothing else does."""
    rng = random.Random(seed)
    schema = {"type": "array", "items": any_schema(rng), "minItems": 3, "maxItems": 5}
    others = TextConstraint("regex", REGEXES[6]), TextConstraint("choice", choices=("a日", "a日b"))
    for constraint in (TextConstraint("json_schema", json.dumps(schema)), *others):
        ids: list[int] = []
        while not ids:
            ids, choices = drawn(await grammar(constraints, constraint), rng)
        for cut in range(len(ids) + 1):
            walk = (await grammar(constraints, constraint, tuple(ids[:cut]))).begin()
            assert allowed(walk.allowed()) == choices[cut], f"{constraint} after {cut} tokens"
        strange = next(token_id for token_id in range(len(PIECES)) if token_id not in choices[-2])
        for history in ((*ids[:-1], strange), (*ids, strange), (TURN,), (*ids[:1], END)):
            with pytest.raises(BadRequest, match="do not keep to") as refused:
                await grammar(constraints, constraint, history)
            assert refused.value.field == "resume.history"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *[("json_schema", text) for text in ("{", "[1]", "true", "[" * 60_000, '{"a":' * 10_000)],
        *[("json_schema", text) for text in ('{"type": "text"}', '{"enum": []}', '{"not": {}}', '{"$ref": "http://elsewhere/schema"}')],
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "number"}]}'),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
        ("json_schema", json.dumps({"enum": [f"{number:x}" * 3 for number in range(9000)], "minLength": 1})),
        ("json_schema", '{"type": "string", "minLength": 1000, "maxLength": 100000, "pattern": "^(.*x.*y.*z)*$"}'),
        *[("regex", text) for text in ("(", "(?=a)b", "[^\\s\\S]")],
    ],
    ids=lambda value: value[:20],
)
async def test_what_cannot_be_is_refused_with_a_short_reason(constraints: Constraints, form: ConstraintForm, text: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await grammar(constraints, TextConstraint(form, text))
    assert refused.value.field == f"thinker.constraint.{form}"
    assert 5 < len(refused.value.description) <= 200 and "\n" not in refused.value.description
    assert (await grammar(constraints, TextConstraint("choice", choices=("a",)))).begin().allowed().any()


@pytest.mark.parametrize("regex", ["(((a?){100}){100}){100}", "(x|a)a{1000000}", ".*".join(["(\\w{1,50}|\\d{3})"] * 10)])
async def test_what_becomes_too_much_on_the_way_leads_nowhere(constraints: Constraints, regex: str) -> None:
    """In bounded time, and it is not asked for ever."""
    walk = (await grammar(constraints, TextConstraint("regex", regex))).begin()
    for _ in range(300):
        if not walk.allowed().any():
            break
        walk.note(PIECES.index(b"a"))
    assert not walk.allowed().any() and not walk.must_end and not walk.complete


async def test_a_request_without_use_for_one_has_no_grammar(constraints: Constraints) -> None:
    bad = TextConstraint("regex", "(")
    for asked in (TextRequest((), 1), TextRequest((), 1, verbatim="Say this.", constraint=bad)):
        assert await constraints.of(asked) is None
    assert set(FORMS) == {"json_schema", "regex", "choice"}


async def test_what_is_thought_before_an_answer_is_kept_to_nothing(constraints: Constraints) -> None:
    """But an answer does not end within it."""
    marks = Marks(opens=1, closes=2, is_open=True)
    thought, said = encode("cc"), encode("c")

    async def walk(*history: int) -> Walk:
        request = TextRequest((Turn("user", ("x",)),), 1, constraint=TextConstraint("choice", choices=("c",)), history=history)
        made = await constraints.of(request, marks)
        assert made is not None
        return made.begin()

    whole = await walk()
    for token_id in (*thought, marks.closes):
        assert not whole.complete and not whole.must_end
        assert allowed(whole.allowed()) == [each for each in range(VOCABULARY) if each not in (END, OTHER_END)]
        whole.note(token_id)
    rest = await walk(*thought, marks.closes)
    assert allowed(whole.allowed()) == allowed(rest.allowed()) == said
    for each in (whole, rest):
        each.note(said[0])
        assert each.complete and each.must_end


# Constraints of strangers ---------------------------------------------------------------------------------------------------------------


BYTES_END = 256
TRIES = 5
SLOWEST = TextConstraint(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b.*"} for number in range(20)]})
)
"""For minutes, by itself."""
GOOD = TextConstraint("choice", choices=("yes", "no"))


def byte_piece(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < BYTES_END else b""


@pytest.fixture
async def by_bytes() -> AsyncIterator[Constraints]:
    """Each byte is a token."""
    result = Constraints(byte_piece, lambda text: [*text.encode()], special={BYTES_END}, end_ids=(BYTES_END,), vocabulary=BYTES_END + 1)
    yield result
    await result.close()


async def grammar_in_time(constraints: Constraints, constraint: TextConstraint) -> Grammar:
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


def references(count: int) -> TextConstraint:
    """Each of two more, to the last."""
    next_of = [{"$ref": f"#/$defs/a{number + 1}"} for number in range(count)]
    definitions = {f"a{number}": {"anyOf": [each, {"items": each}]} for number, each in enumerate(next_of)}
    return schema({"$defs": {**definitions, "a500": {"type": "string"}}, "$ref": "#/$defs/a0"})


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
    "references": lambda chance: references(chance.randint(50, 500)),
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
async def test_whatever_is_slow_or_large_is_refused_by_its_field_or_has_a_grammar(by_bytes: Constraints, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for number in range(rounds):
        kind = [*SLOW][(seed + number) % len(SLOW)]
        constraint = SLOW[kind](chance)
        try:
            await grammar_in_time(by_bytes, constraint)
        except BadRequest as error:
            assert error.field == f"thinker.constraint.{constraint.form}" and error.description, kind
            refused += 1
        assert (await grammar_in_time(by_bytes, GOOD)).begin().allowed().any()
    assert refused, "nothing was slow"


@pytest.mark.parametrize("name", ["evil", "evil/{}"], ids=["a client", "a host that invents keys"])
async def test_nobody_waits_for_the_constraints_of_another(by_bytes: Constraints, name: str) -> None:
    """At most for the one that is being tried."""
    slow = [asyncio.create_task(grammar(by_bytes, SLOWEST, client=name.format(number))) for number in range(20)]
    await asyncio.sleep(0)
    await grammar(by_bytes, GOOD, client="honest")
    assert sum(task.done() for task in slow) <= 2
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_client_that_leaves_ends_its_trial(by_bytes: Constraints) -> None:
    await grammar(by_bytes, GOOD)
    before = pid(by_bytes)
    for again_after_s in (0.0, 0.0005, 0.05):
        leaving = asyncio.create_task(grammar(by_bytes, SLOWEST))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.sleep(again_after_s)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await grammar(by_bytes, GOOD)
    assert pid(by_bytes) == before


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_lost_while_it_has_nothing_to_do_costs_nothing(by_bytes: Constraints, blow: signal.Signals) -> None:
    await grammar(by_bytes, GOOD)
    before = pid(by_bytes)
    os.kill(before, blow)
    await grammar(by_bytes, GOOD)
    assert pid(by_bytes) != before


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_is_lost_during_a_trial_is_told(by_bytes: Constraints, blow: signal.Signals) -> None:
    await grammar(by_bytes, GOOD)
    trial = asyncio.create_task(grammar(by_bytes, SLOWEST))
    await until(lambda: Path(f"/proc/{pid(by_bytes)}/task/{pid(by_bytes)}/children").read_text())
    os.kill(pid(by_bytes), blow)
    with pytest.raises(Full, match="ask again later"):
        await trial
    await grammar(by_bytes, GOOD)


async def test_a_process_that_cannot_start_is_told(by_bytes: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage starts without it: answers without constraints need none."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        await by_bytes.warm_up()
        with pytest.raises(Full, match="did not start"):
            await grammar(by_bytes, GOOD)
    await grammar(by_bytes, GOOD)


async def test_grammars_of_running_answers_have_a_bound_together(by_bytes: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_GRAMMARS_BYTES", 3 * MIN_GRAMMAR_BYTES)
    walks = [(await grammar(by_bytes, GOOD, client=f"client {number}")).begin() for number in range(3)]
    with pytest.raises(Full, match="grammars of running answers take"):
        await grammar(by_bytes, GOOD, client="late")
    del walks[0]
    gc.collect()
    await grammar(by_bytes, GOOD, client="late")


async def test_a_host_leaves_room_for_the_grammars_of_others(by_bytes: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_GRAMMARS_BYTES", 8 * MIN_GRAMMAR_BYTES)
    walks = [(await grammar(by_bytes, GOOD, client=f"greedy/{number}")).begin() for number in range(6)]
    with pytest.raises(Full, match="grammars of running answers take 96 MiB of 128"):
        await grammar(by_bytes, GOOD, client="greedy/new")
    walks += [(await grammar(by_bytes, GOOD, client=name)).begin() for name in ("one", "other")]
    del walks[:6]
    gc.collect()
    assert await grammar(by_bytes, GOOD, client="greedy")
