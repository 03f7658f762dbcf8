"""Which codes become sound together, how long a player waits for it, and when a second thread helps; the beginning of a speech takes no
more time and memory than its rows need, however they come; and the facts that a Code2Wav finds out about itself, with nets whose answers
are known."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from helpers import lengths
from omnistage.engine.memory import PAGE_ROWS
from omnistage.models.interface import BadRequest, Piece, Profile
from omnistage.models.qwen2_5_omni.wave.config import CONTEXT, SCHEDULES, schedule_of
from omnistage.models.smol import code2wav
from omnistage.models.speech import code2wav as trial_module
from omnistage.models.speech.code2wav import SIZES, Trial, try_windows
from omnistage.models.speech.pace import HORIZON_S, Arrivals, Halving, prebuffer_s
from omnistage.models.speech.schedule import Schedule, Window
from omnistage.models.speech.talker import AXES, Opening
from omnistage.models.steps.loop import Aside
from omnistage.models.worker import Worker

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
            assert window.past <= codes and (window.last or (window.ahead_codes == ahead * BLOCK and not window.end % BLOCK))
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
        schedule = Schedule(sizes, ahead_blocks=0, block=source.randint(1, 3), context=source.randint(1, 40), refresh=0)
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
    arrivals.record(5.0, 3)
    assert arrivals.interval_s == 0
    arrivals.record(5.5, 0)
    arrivals.record(6.0, 4)
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


# The beginning of a speech --------------------------------------------------------------------------------------------------------------


WIDTH, ROOM = 8, 40_000


@pytest.fixture
def opening() -> Opening:
    return Opening(AXES, torch.zeros(1, WIDTH), ROOM)


def piece(port: str, rows: int, *, last: bool = False) -> Piece:
    size, dtype = (3, np.int32) if port == "places" else (WIDTH, np.float32)
    return Piece(port, 0, last, np.zeros((rows, size), dtype))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("order", [("places", "prompt"), ("prompt", "places")])
def test_rows_that_come_one_by_one_are_counted_once(opening: Opening, order: tuple[str, str]) -> None:
    """Summed up for each, these would take minutes, and everybody's event loop."""
    count, pages = 20_000, 0
    for port in order:
        for number in range(count):
            opening.take(piece(port, 1, last=number == count - 1))
            if opening.readable:
                pages += len(opening.read())
    assert pages == count // PAGE_ROWS
    opening.take(piece("hidden", 1))
    assert opening.complete and sum(len(rows) for rows, _ in opening.read()) == count % PAGE_ROWS + 2


def test_of_an_answer_no_more_is_kept_than_can_be_spoken(opening: Opening) -> None:
    """Until the places of a conversation ended, which they may never do."""
    for _ in range(100):
        opening.take(piece("hidden", 999))
    assert sum(map(len, opening.reply)) == ROOM and len(opening.reply) == ROOM // 999 + 1
    opening.take(piece("hidden", 1, last=True))
    opening.take(piece("prompt", 1, last=True))
    opening.take(piece("places", 1, last=True))
    assert opening.complete and opening.has_ended and sum(map(len, opening.reply)) == ROOM


@pytest.mark.parametrize("port", ["prompt", "places"])
def test_of_a_conversation_no_more_is_taken_than_fits(opening: Opening, port: str) -> None:
    opening.take(piece(port, ROOM - 2))
    with pytest.raises(BadRequest, match="the Talker takes 39998 rows") as refused:
        opening.take(piece(port, 1))
    assert refused.value.field == "thinker.messages"


@pytest.mark.parametrize("order", [("places", "prompt"), ("prompt", "places")])
@pytest.mark.parametrize("counts", [{"prompt": 80, "places": places} for places in (0, 1, 79, 81)])
def test_rows_and_places_of_different_numbers_are_refused(opening: Opening, order: tuple[str, str], counts: dict[str, int]) -> None:
    first, second = order
    opening.take(piece(first, counts[first], last=True))
    with pytest.raises(
        BadRequest, match=f"a conversation of {counts['prompt']} rows has {counts['places']} places: give each row one"
    ) as refused:
        opening.take(piece(second, counts[second], last=True))
    assert refused.value.field == "talker"


# The trial of a Code2Wav ----------------------------------------------------------------------------------------------------------------


Job = tuple[str, Window, int]


class Sums:
    """Windows of two stages: `read` has the same bits in any company, `sing` has other ones where more than `most` are together."""

    halves = True

    def __init__(self, most: int) -> None:
        self._most = most
        self.device, self.code_s = torch.device("cpu"), 0.02
        self.stages: Mapping[str, int] = {"read": 3, "sing": 1}

    def form(self, window: Window) -> Hashable:
        return window.end - window.begin, window.context

    def random_job(self, stage: str, window: Window, seed: int) -> Job:
        return stage, window, seed

    def shape(self, job: Job) -> Hashable:
        stage, window, _ = job
        return stage, self.form(window)

    def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
        if aside is not None:
            aside(lambda: None).result()
        wrong = jobs[0][0] == "sing" and len(jobs) > self._most
        return [torch.tensor([window.begin, seed, int(wrong)]) for _, window, seed in jobs]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, no net is taken for a slow one."""
    monkeypatch.setattr(trial_module, "SLOW_SECONDS", math.inf)
    monkeypatch.setattr(trial_module, "TRIAL_SECONDS", math.inf)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(f"window {number}", 1) for number in range(2)]
    yield made
    for worker in made:
        asyncio.run(worker.close())


TRIED: Mapping[str, Schedule] = {
    Profile.BALANCED: Schedule((1, 2), ahead_blocks=1, block=12, context=2, refresh=4),
    Profile.OFFLINE: Schedule((), ahead_blocks=0, block=12, context=2, refresh=4),
}


def trial_of(sums: Sums, workers: Sequence[Worker], *, most: int = 0) -> Trial:
    return try_windows(sums, TRIED, workers, max_windows=most)


@pytest.mark.parametrize("exact", [1, 2, 4])
def test_windows_are_together_where_that_changes_no_bit(exact: int, workers: list[Worker]) -> None:
    trial = trial_of(Sums(exact), workers)
    sizes = SIZES["cpu"]
    assert set(trial.together) == {"read", "sing"}
    assert set(trial.together["read"].values()) == {tuple(sizes)}
    assert set(trial.together["sing"].values()) == {tuple(size for size in sizes if size <= exact)}
    for stage, most in (("read", max(sizes)), ("sing", exact)):
        for shape in trial.together[stage]:
            assert [trial.choose_batch_size(shape, there) for there in (1, 2, 3, 4, 9)] == [min(most, there) for there in (1, 2, 2, 4, 4)]
    told = trial.reasons["batch"]
    shapes = len(trial.together["sing"])
    sung = f"up to {exact} windows together, in {shapes} of {shapes} shapes" if exact > 1 else "one window at a time"
    assert told == f"read: up to 4 windows together, in {shapes} of {shapes} shapes; sing: {sung}: what has the same bits together as alone"


def test_every_form_of_a_speech_has_its_seconds_and_no_more_are_together_than_asked(workers: list[Worker]) -> None:
    trial = trial_of(Sums(4), workers, most=2)
    assert {size for sizes in trial.together.values() for each in sizes.values() for size in each} == {2}
    # The first window, those of the last size, and a refreshed one, which has context.
    assert set(trial.seconds) == {(12, 0), (24, 0), (24, 24)} and min(trial.seconds.values()) > 0
    assert trial.speakers > 0 and trial.workers == 2


def test_results_are_of_one_window_of_each_shape_and_the_same_again(workers: list[Worker]) -> None:
    """They are a part of the revision."""
    digests = {hashlib.sha256(torch.stack(list(trial_of(Sums(4), workers).results)).numpy().tobytes()).digest() for _ in range(2)}
    assert len(digests) == 1 and len(trial_of(Sums(4), workers).results) == 2 * 3


@pytest.mark.parametrize("limit", ["SLOW_SECONDS", "TRIAL_SECONDS"])
def test_a_slow_net_computes_one_window_at_a_time(limit: str, workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, limit, -math.inf)
    trial = trial_of(Sums(4), workers)
    assert {size for sizes in trial.together.values() for size in sizes.values()} == {()} and len(trial.results) == 2 * 3
    assert trial.reasons["batch"].startswith("read: one window at a time; sing: one window at a time")


def test_a_shape_without_a_trial_is_computed_alone(workers: list[Worker]) -> None:
    assert trial_of(Sums(4), workers).choose_batch_size(("read", "never seen"), 9) == 1


def test_a_step_that_leaves_nothing_to_a_second_thread_is_not_tried_on_two(workers: list[Worker]) -> None:
    class WholeSums(Sums):
        halves = False

        def step(self, jobs: Sequence[Job], aside: Aside | None) -> list[torch.Tensor]:
            assert aside is None
            return super().step(jobs, None)

    trial = trial_of(WholeSums(4), workers)
    assert not trial.halved and set(trial.together["sing"].values()) == {tuple(SIZES["cpu"])}
