"""Grammars of a vocabulary: whatever is drawn among what they allow keeps to them, and a walk can begin anywhere in an answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from omnistage.engine.request import Constraint as EngineConstraint
from omnistage.engine.request import Walk
from omnistage.models.conversation import ConstraintForm, TextConstraint, Turn
from omnistage.models.interface import BadRequest, TextRequest
from omnistage.models.text.answer import Marks
from omnistage.models.text.constraint import Constraints
from omnistage.models.text.grammar import FORMS

END, OTHER_END, TURN = 600, 601, 602
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [
    word.encode()
    for word in ('{"', '":', '", "', '"}', ": ", "true", "null", "ab", "abc", "12", " the", "é", "日本", "ß\n", "-0", "0.5", "e+")
]
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
    made = Constraints(
        piece,
        encode,
        special={*range(len(PIECES), TURN + 1)},
        end_ids=(END, OTHER_END),
        vocabulary=VOCABULARY,
    )
    yield made
    asyncio.run(made.close())


async def grammar(constraints: Constraints, constraint: TextConstraint, history: tuple[int, ...] = ()) -> EngineConstraint:
    made = await constraints.of(TextRequest((Turn("user", ("x",)),), 1, constraint=constraint, history=history))
    assert made is not None
    return made


def allowed(words: Any) -> list[int]:
    return np.nonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))[0].tolist()


def drawn(grammar: EngineConstraint, rng: random.Random, most: int = 400) -> tuple[list[int], list[list[int]]]:
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
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(each, schema["items"]) for each in value)
            )
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
        and all(is_valid(each, schema["properties"][name]) for name, each in value.items())
    )


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
    "a{2,3}",
    "(no|yes), [0-9]{3}é?",
    "[^\\x00-\\x7f]{1,5}",
    "[0-9]+\\.[0-9]{2}",
    "(abc?|the| )*x",
    "[a-z_]{3}[ \\n][^a-z]",
    "(a|b)*a(a|b){5}c",
    "日本?",
    ".{1,9}",
    "a*",
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
    for constraint in (
        TextConstraint("json_schema", json.dumps(schema)),
        TextConstraint("regex", REGEXES[6]),
        TextConstraint("choice", choices=("a日", "a日b")),
    ):
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
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "true"),
        ("json_schema", "[" * 60_000),
        ("json_schema", '{"a":' * 10_000),
        ("json_schema", '{"type": "text"}'),
        ("json_schema", '{"enum": []}'),
        ("json_schema", '{"not": {}}'),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "number"}]}'),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
        ("json_schema", '{"$ref": "http://elsewhere/schema"}'),
        ("json_schema", json.dumps({"enum": [f"{number:x}" * 3 for number in range(9000)], "minLength": 1})),
        ("json_schema", '{"type": "string", "minLength": 1000, "maxLength": 100000, "pattern": "^(.*x.*y.*z)*$"}'),
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("regex", "[^\\s\\S]"),
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
