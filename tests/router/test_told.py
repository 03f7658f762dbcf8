"""Facts that stages tell the client: the words that were not spoken, notes, and whether the seed mattered."""

from __future__ import annotations

import structlog

from helpers.ask import WholeAnswer, ask, request
from helpers.chain import addresses_of
from helpers.converse import ConverseStream
from helpers.servers import local_chain, local_router, omni_stub
from omnistage.models.toy import formulas
from omnistage.stage.logic import SessionTiming

COUNTED = "omnistage_stage_unspoken_characters_total"


def drew(answer: WholeAnswer) -> list[bool | None]:
    """Whether the seed mattered, for each stage in pipeline order."""
    assert answer.usage is not None
    return [report.drew if report.HasField("drew") else None for report in answer.usage.stages]


async def test_what_is_not_spoken_is_told_to_the_client_and_counted_for_all_others() -> None:
    """Also of text that nobody asked for, and of an answer in a conversation; logs and metrics have no word of it."""
    with structlog.testing.capture_logs() as lines:
        async with (
            local_chain({"mute_every": 5}) as stages,
            local_router(addresses_of(stages)) as router,
            omni_stub(router.address) as stub,
        ):
            answer = await ask(stub, request("hello", 3))
            answer.check_unspoken(5)
            unheard = await ask(stub, request("hello", 3, outputs=["audio"]))
            given = await ask(stub, request("", 3, thinker={"messages": [], "verbatim": "one two three"}))
            conversation = ConverseStream(stub)
            (await conversation.turn(request("hello", 3))).check_unspoken(5)
            await conversation.end()
            assert answer.usage is not None and unheard.usage is not None
            assert unheard.usage.stages[1].unspoken == answer.usage.stages[1].unspoken > 0
            given.check_whole()
            registry = stages["talker"].registry
            labels = {"stage": "talker", "model": "toy-talker"}
            ended = [line for line in lines if line["event"] == "answer.done"]
            assert registry.get_sample_value(COUNTED, labels) == sum(line["unspoken"] for line in ended) > 0
            assert [line["unspoken"] for line in ended[:2]] == [answer.usage.stages[1].unspoken] * 2
            assert drew(answer) == drew(unheard) == [True, False, False]
    words = {formulas.word(token).strip() for token in answer.tokens()[::5]}
    assert not [word for word in words if f"{word}'" in repr(lines) or f"{word} " in repr(lines)]


def test_what_is_told_has_a_bound() -> None:
    timing = SessionTiming()
    for number in range(9):
        timing.note(f"{number}" * 300)
        timing.note(f"{number}" * 300)
    assert timing.notes == [f"{number}" * 200 for number in range(4)]
    for run in ("你好", "😀" * 61, "世界", "x" * 1000):
        timing.not_spoken([run])
    assert timing.unspoken == 2 + 61 + 2 + 1000
    assert timing.unspoken_runs == ["你好", "😀" * 61, "世"]
