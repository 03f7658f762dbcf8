"""Which codes become sound together, how long a player waits for it, and when a second thread helps."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from helpers import lengths
from omnistage.models.interface import Profile
from omnistage.models.qwen2_5_omni.wave.config import CONTEXT, SCHEDULES, schedule_of
from omnistage.models.smol import code2wav
from omnistage.models.speech.pace import HORIZON_S, Arrivals, Halving, prebuffer_s
from omnistage.models.speech.schedule import Schedule, Window

BLOCK = 12


def all_windows(schedule: Schedule, codes: int, steps: list[int]) -> list[Window]:
    """The windows of a speech, codes of which come so many at a time."""
    made, came = list[Window](), 0
    for step in steps:
        came = min(came + step, codes)
        while not (made and made[-1].last) and (window := schedule.window(len(made), came, has_ended=came == codes)) is not None:
            made.append(window)
    return made


@pytest.mark.parametrize("schedules", [SCHEDULES, code2wav.SCHEDULES], ids=["qwen2_5_omni", "smol"])
def test_every_profile_has_a_schedule(schedules: Mapping[str, object]) -> None:
    assert {*schedules} == {*Profile}


@pytest.mark.parametrize("profile", SCHEDULES)
def test_windows_are_a_function_of_their_number(profile: str, seed: int) -> None:
    """They follow each other without a gap, begin and end with blocks, and are fresh where the schedule says."""
    source, (sizes, ahead) = random.Random(seed), SCHEDULES[profile]
    schedule = schedule_of(sizes, ahead, BLOCK)
    for codes in (1, 11, 12, 24, 25, *(source.randrange(1, 1500) for _ in range(30))):
        at_once = all_windows(schedule, codes, [codes])
        assert all_windows(schedule, codes, [source.randint(1, 60) for _ in range(codes)] + [codes]) == at_once
        borders = [(window.begin, window.end) for window in at_once]
        assert [begin for begin, _ in borders] == [0, *(end for _, end in borders[:-1])] and borders[-1][1] == codes
        assert [window.last for window in at_once] == [False] * (len(at_once) - 1) + [True]
        for number, window in enumerate(at_once):
            assert window.begin == schedule.begin(number) and not window.begin % BLOCK
            assert window.first == window.begin - window.context and window.context == (CONTEXT * BLOCK if number and window.fresh else 0)
            assert window.past <= codes and (window.last or (window.ahead == ahead * BLOCK and not window.end % BLOCK))
            code = source.randrange(window.begin, window.end)
            entry = schedule.entry(code)
            assert at_once[entry].fresh
            between = at_once[entry + 1 : number + 1]
            assert not any(each.fresh for each in between if each.begin <= code - ahead * BLOCK)
            assert schedule.first_code(entry) == at_once[entry].first


def test_without_refreshes_nothing_is_computed_twice_and_a_session_begins_far_enough_back(seed: int) -> None:
    """With the last window from which on all is there that the wanted one depends on."""
    source = random.Random(seed)
    for _ in range(60):
        sizes = tuple(sorted(source.randint(1, 9) for _ in range(source.randint(1, 5))))
        schedule = Schedule(sizes, ahead=0, block=source.randint(1, 3), context=source.randint(1, 40), refresh=0)
        codes = source.randint(1, 400)
        windows = all_windows(schedule, codes, [codes])
        assert all(window.first == window.begin and window.fresh == (window.begin == 0) for window in windows)
        for number, window in enumerate(windows):
            code = source.randrange(window.begin, window.end)
            assert schedule.holding(code) == number
            least = max(window.begin - schedule.context * schedule.block, 0)
            entry = schedule.entry(code)
            assert windows[entry].begin <= least < windows[entry].end and schedule.first_code(entry) == windows[entry].begin
        assert schedule.entry(codes) <= len(windows)


@lengths.rounds(60, 2000)
def test_who_waits_as_told_never_runs_dry(seed: int, rounds: int) -> None:
    """Codes that come one by one and windows that are computed one after the other, both at any pace; who waits less runs dry."""
    source = random.Random(seed)
    for _ in range(rounds):
        sizes, ahead = SCHEDULES[source.choice(["latency", "balanced", "quality"])]
        schedule, code_s = schedule_of(sizes, ahead, BLOCK), 0.02
        interval_s, start_s, block_s = source.uniform(0.002, 0.03), source.uniform(0, 0.05), source.uniform(0.005, 0.28)

        def decode_s(window: Window, start_s: float = start_s, block_s: float = block_s) -> float:
            return start_s + block_s * (window.past - window.first) / BLOCK

        there, done, sounds = list[float](), 0.0, list[tuple[float, float]]()
        while (window := schedule.window(len(sounds), 1 << 62, has_ended=False)) is not None and window.end * code_s < HORIZON_S:
            there.append(window.past * interval_s)
            done = max(there[-1], done) + decode_s(window)
            sounds.append((done, (window.end - window.begin) * code_s))
        wait = prebuffer_s(schedule, code_s, interval_s, decode_s, there[0], sounds[0][0])
        for patience, dry in ((wait + 1e-9, False), (wait - 0.01, wait > 0.01)):
            at, late = sounds[0][0] + patience, 0.0
            for done, seconds in sounds[: len(sounds)]:
                late = max(late, done - at)
                at += seconds
            assert (late > 1e-6) == dry or patience < 0


def test_codes_tell_their_pace() -> None:
    arrivals = Arrivals()
    assert arrivals.interval_s == 0
    arrivals.came(5.0, 3)
    assert arrivals.interval_s == 0
    arrivals.came(5.5, 0)
    arrivals.came(6.0, 4)
    assert arrivals.interval_s == 0.25


def test_a_second_thread_that_is_of_no_use_is_asked_less_and_less() -> None:
    halving = Halving({"a": 1.0, "c": 1.0})
    assert not halving.worth("b")
    pauses = []
    for _ in range(6):
        assert halving.worth("a")
        halving.took("a", 1.1)
        pauses.append(next(steps for steps in range(1000) if halving.worth("a")))
        halving.took("a", 0.95 if len(pauses) % 2 else 2.0)
        while not halving.worth("a"):
            pass
    assert pauses == [8, 32, 64, 64, 64, 64]
    assert halving.worth("c"), "what is so of one shape says nothing of another"
    halving.took("a", 0.6)
    assert all(halving.worth("a") for _ in range(100))
    halving.took("a", 1.1)
    assert [halving.worth("a") for _ in range(9)] == [False] * 8 + [True]
