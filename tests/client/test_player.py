"""Sound that is heard while it comes: every sample once and in order, no silence that need not be, an end whatever the player does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.processes import ProcessFamily, StartedProcess, wait_end
from helpers.sink import BLOCK_S, BUFFER_S, Sink
from helpers.waiting import until
from omnistage.client import AsyncOmni, Audio, AudioChunk, Loudspeaker, Omni, Player, PlayerLostError, RequestError
from omnistage.client.events import AudioArrival, play

RATE = 24_000
PATIENCE_S = 60.0
WAY_S = 0.25
"""From `write` to the device on a machine that has other things to do: far less than what is missing where a player waits for nothing."""

SHORT_S = 0.01


def noise(seed: int, seconds: float, rate_hz: int = RATE) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, round(seconds * rate_hz)).astype(np.float32)


def chunk(samples: NDArray[np.float32], first: int = 0, rate_hz: int = RATE, prebuffer_s: float | None = None) -> AudioChunk:
    return AudioChunk(samples, first, rate_hz, 0.0, prebuffer_s=prebuffer_s)


def is_alive(pid: int) -> bool:
    return not wait_end(pid, 0.0)


@pytest.mark.parametrize("rate_hz", [8000, 24_000, 48_000])
@pytest.mark.parametrize("speed", [0.0, 1.0])
def test_every_sample_is_heard_once_and_in_order(tmp_path: Path, seed: int, rate_hz: int, speed: float) -> None:
    sink, sound = Sink(tmp_path / "sink", speed=speed), noise(seed, 0.7, rate_hz)
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(sound), 9))
    with Player(sink.loudspeaker) as player:
        for first, piece in zip([0, *cuts], np.split(sound, cuts), strict=True):
            player.write(chunk(piece, first, rate_hz))
            player.write(chunk(piece[:0], first, rate_hz))
    np.testing.assert_array_equal(sink.samples(), sound)
    assert sink.rate_hz == rate_hz
    assert (player.heard.samples, player.heard.of, player.heard.seconds) == (len(sound), len(sound), len(sound) / rate_hz)
    assert not is_alive(sink.pid)


@pytest.mark.parametrize(("speed", "seconds"), [(0.6, 2.5), (1.7, 2.5), (0.0, 1.0)], ids=["slower", "faster", "a whole answer"])
def test_a_device_that_is_slower_or_faster_than_the_clock_plays_all(tmp_path: Path, seed: int, speed: float, seconds: float) -> None:
    sink, sound = Sink(tmp_path / "sink", speed=speed), noise(seed, seconds)
    with Player(sink.loudspeaker) as player:
        player.write(chunk(sound) if speed else Audio(sound, RATE))
    np.testing.assert_array_equal(sink.samples(), sound)


async def test_an_answer_that_is_whole_is_not_waited_for_and_what_was_written_may_be_changed(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink"), noise(seed, 0.2)
    mine = sound.copy()
    async with Player(sink.loudspeaker) as player:
        player.write(chunk(mine, prebuffer_s=1000.0))
        mine[:] = 0.0
    np.testing.assert_array_equal(sink.samples(), sound)
    assert player.heard.samples == player.heard.of


def test_an_answer_without_sound_has_nothing_to_wait_for(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "sink", "--deaf")
    with Player(sink.loudspeaker) as player:
        player.write(chunk(np.zeros(0, np.float32)))
    assert (player.heard.samples, player.heard.of) == (0, 0)


class Stalls:
    """How much later than it wanted to a thread of this process was woken, in all, where that was more than SHORT_S."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._over = threading.Event()

    def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.01
            if self._over.wait(0.01):
                return
            late_s = time.monotonic() - due
            self.total_s += late_s if late_s > SHORT_S else 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


async def arrive(player: Player, sound: NDArray[np.float32], times_s: Sequence[float], prebuffer_s: float) -> list[AudioArrival]:
    """Write equal pieces at these times, as well as this machine can; returns when that was, on the monotonic clock."""
    arrivals: list[AudioArrival] = []
    begin, first = time.monotonic(), 0
    for time_s, piece in zip(times_s, np.split(sound, len(times_s)), strict=True):
        await asyncio.sleep(begin + time_s - time.monotonic())
        arrivals.append(AudioArrival(time.monotonic(), first, len(piece), RATE, True))
        player.write(chunk(piece, first, prebuffer_s=None if first else prebuffer_s))
        first += len(piece)
    return arrivals


@pytest.mark.parametrize(
    ("times_s", "prebuffer_s"),
    [
        pytest.param([0.0, *[0.01] * 9], 0.0, id="at once"),
        pytest.param([0.1 * number for number in range(10)], 0.0, id="twice as fast as it is played"),
        pytest.param([0.28 * number for number in range(10)], 1.0, id="slower than it is played, with a wait that is enough"),
        pytest.param([0.0, 0.05, 0.1, 0.15, *[1.6] * 6], 0.0, id="late in the middle"),
    ],
)
async def test_there_is_no_gap_that_the_timeline_does_not_have(tmp_path: Path, seed: int, times_s: list[float], prebuffer_s: float) -> None:
    sink, sound, stalls = Sink(tmp_path / "sink"), noise(seed, 2.0), Stalls()
    with stalls.watched():
        async with Player(sink.loudspeaker) as player:
            await until(lambda: sink.pid)
            arrivals = await arrive(player, sound, times_s, prebuffer_s)
    np.testing.assert_array_equal(sink.samples(), sound)
    timeline_s = sum(played.gap_s for played in play(arrivals, wait_s=prebuffer_s))
    machine_s = stalls.total_s + sum(max(block.late_s - BUFFER_S, 0.0) for block in sink.blocks())
    assert sink.gap_s() <= timeline_s + machine_s + WAY_S
    assert sink.blocks()[0].taken_at >= arrivals[0].arrival_s + prebuffer_s


async def test_it_plays_while_the_event_loop_is_held_up(tmp_path: Path, seed: int) -> None:
    sink = Sink(tmp_path / "sink")
    async with Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, 3.0)))
        await until(sink.blocks)
        before, limit_s = len(sink.blocks()), time.monotonic() + 60
        while len(sink.blocks()) == before:  # Without a turn of the loop.
            assert time.monotonic() < limit_s
            time.sleep(0.01)  # noqa: ASYNC251
        assert player.heard.samples > 0


async def test_the_event_loop_is_not_held_up_while_it_finishes(tmp_path: Path, seed: int) -> None:
    sink, turns = Sink(tmp_path / "sink"), 0
    async with Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, 1.0)))
        finished = asyncio.ensure_future(player.afinish())
        while not finished.done():
            await asyncio.sleep(0.01)
            turns += 1
    assert turns > 5 and (await finished).samples == RATE


async def test_who_waits_for_the_end_can_be_cancelled(tmp_path: Path, seed: int) -> None:
    sink = Sink(tmp_path / "sink")

    async def hear() -> None:
        async with Player(sink.loudspeaker) as player:
            player.write(chunk(noise(seed, 100.0)))

    hearing = asyncio.create_task(hear())
    await until(sink.blocks)
    hearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hearing
    await until(lambda: not is_alive(sink.pid))
    assert len(sink.samples()) < 100 * RATE


def test_ten_minutes_at_once_take_the_memory_of_their_samples_once(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink", speed=0.0), noise(seed, 600.0)
    tracemalloc.start()
    try:
        with Player(sink.loudspeaker) as player:
            player.write(chunk(sound))
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(sink.samples(), sound) and peak < 1.05 * sound.nbytes and left < 0.05 * sound.nbytes


async def test_stop_is_silence_and_tells_how_much_was_heard(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink"), noise(seed, 20.0)
    with Player(sink.loudspeaker) as player:
        player.write(chunk(sound))
        await until(lambda: len(sink.blocks()) > 30)
        before = time.monotonic()
        heard = player.stop()
        assert wait_end(sink.pid, PATIENCE_S)
        taken = len(sink.samples())
        assert heard == player.stop() == player.heard
        player.write(chunk(sound))
    assert sink.played(before) <= heard.samples <= taken + BLOCK_S * RATE
    assert taken <= heard.samples + (BUFFER_S + BLOCK_S) * RATE and heard.of == len(sound)
    assert player.finish() == player.heard
    assert (player.heard.samples, player.heard.of, player.lost) == (heard.samples, 2 * len(sound), None)
    np.testing.assert_array_equal(sink.samples(), sound[:taken])


def test_what_has_not_begun_can_be_stopped(tmp_path: Path, seed: int) -> None:
    sink = Sink(tmp_path / "sink")
    with Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, 1.0), prebuffer_s=1000.0))
        assert player.stop().samples == 0
    assert not len(sink.samples()) and Player(sink.loudspeaker).stop().of == 0


def test_an_error_in_the_middle_is_silence(tmp_path: Path, seed: int) -> None:
    sink = Sink(tmp_path / "sink")
    with pytest.raises(ZeroDivisionError), Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, 100.0)))
        _ = 1 / 0
    assert player.finish().samples < 100 * RATE and (not sink.pid or wait_end(sink.pid, PATIENCE_S))


def test_a_player_that_dies_is_told_and_the_answer_goes_on(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink", "--dies-after", "4800", speed=0.0), noise(seed, 1.0)
    with Player(sink.loudspeaker) as player:
        for first in range(0, 100 * RATE, RATE):
            player.write(chunk(sound, first))
        with pytest.raises(PlayerLostError, match=r"^sink ended in the middle of the sound with code 1: sink: the device is gone"):
            player.finish()
        assert player.lost is not None and "OMNISTAGE_PLAYER" in player.lost.hint
        heard = player.heard
    assert 0 < heard.samples < heard.of == 100 * RATE


@pytest.mark.parametrize(("before_s", "after_s"), [(10.0, 1.0), (0.9, 0.0)], ids=["while it comes", "behind the last write"])
async def test_a_player_that_is_killed_is_told(tmp_path: Path, seed: int, before_s: float, after_s: float) -> None:
    sink = Sink(tmp_path / "sink")
    async with Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, before_s)))
        await until(sink.blocks)
        os.kill(sink.pid, signal.SIGKILL)
        if after_s:
            await until(lambda: player.lost)
            player.write(chunk(noise(seed, after_s)))
        with pytest.raises(PlayerLostError, match="with signal SIGKILL"):
            await player.afinish()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("true",), r"a player ended (in the middle of|before) the sound with code 0"),
        (("sleep", "0.5"), r"a player ended (in the middle of|before) the sound with code 0"),
        (("/nowhere/gone",), "a player cannot be started: No such file"),
    ],
)
def test_a_player_that_ends_well_but_early_or_cannot_be_started_is_told(seed: int, command: tuple[str, ...], told: str) -> None:
    with pytest.raises(PlayerLostError, match=told), Player(Loudspeaker("a player", command)) as player:
        player.write(chunk(noise(seed, 0.1)))


@pytest.mark.parametrize(
    ("option", "seconds", "says"),
    [("--deaf", 0.1, "does not come to an end"), ("--deaf", 10.0, "takes no sound any more"), ("--stays", 0.1, "does not come to an end")],
)
def test_a_player_that_hangs_is_given_up(tmp_path: Path, seed: int, option: str, seconds: float, says: str) -> None:
    sink = Sink(tmp_path / "sink", option)
    with Player(sink.loudspeaker) as player:
        player.write(chunk(noise(seed, seconds)))
        with pytest.raises(PlayerLostError, match=says):
            player.finish()
    assert not is_alive(sink.pid)


def test_what_cannot_be_played_is_refused(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink", speed=0.0), noise(seed, 0.1)
    with Player(sink.loudspeaker) as player:
        player.write(chunk(sound))
        with pytest.raises(RequestError, match="24000 samples a second, these are 16000"):
            player.write(chunk(sound, rate_hz=16_000))
        with pytest.raises(RequestError, match=r"samples are \[n\] or \[n, channels\], these are \[600, 2, 2\]"):
            player.write(chunk(sound.reshape(-1, 2, 2)))
        player.finish()
        with pytest.raises(ValueError, match="finished"):
            player.write(chunk(sound))
    np.testing.assert_array_equal(sink.samples(), sound)


def test_of_several_channels_the_mean_is_heard(tmp_path: Path, seed: int) -> None:
    sink, sound = Sink(tmp_path / "sink", speed=0.0), noise(seed, 0.1)
    with Player(sink.loudspeaker) as player:
        player.write(chunk(np.stack([sound, 0 * sound], axis=1)))
        player.finish()
    np.testing.assert_array_equal(sink.samples(), sound / 2)


def test_what_waits_has_a_bound(tmp_path: Path) -> None:
    with Player(Sink(tmp_path / "sink").loudspeaker) as player:
        for first in range(0, 3600 * 100, 600 * 100):
            player.write(chunk(np.zeros(600 * 100, np.float32), first, 100, prebuffer_s=1000.0))
        with pytest.raises(RequestError, match="more than 3600 s of sound"):
            player.write(chunk(np.zeros(1, np.float32), rate_hz=100))
        player.stop()


async def test_a_forgotten_player_leaves_nothing(tmp_path: Path, seed: int) -> None:
    sink = Sink(tmp_path / "sink")
    player = Player(sink.loudspeaker)
    player.write(chunk(noise(seed, 100.0)))
    await until(sink.blocks)
    del player
    await until(lambda: not is_alive(sink.pid))


def test_an_answer_of_a_router_is_heard_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_address: str) -> None:
    sink, sounds = Sink(tmp_path / "sink", speed=0.0), []
    monkeypatch.setenv("OMNISTAGE_PLAYER", sink.variable)
    with Omni(address=toy_address) as omni, Player() as player:
        for event in omni.stream_say("one two three four"):
            if isinstance(event, AudioChunk):
                player.write(event)
                sounds.append(event.samples)
    np.testing.assert_array_equal(sink.samples(), np.concatenate(sounds))


async def test_many_answers_are_heard_at_once(tmp_path: Path, toy_address: str) -> None:
    async def hear(number: int, omni: AsyncOmni) -> None:
        sink, sounds = Sink(tmp_path / str(number), speed=0.0), []
        async with Player(sink.loudspeaker) as player:
            async for event in omni.stream_say(f"one two {number}"):
                if isinstance(event, AudioChunk):
                    player.write(event)
                    sounds.append(event.samples)
        np.testing.assert_array_equal(sink.samples(), np.concatenate(sounds))

    async with AsyncOmni(address=toy_address) as omni, asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(hear(number, omni))


PROGRAM = """
import os, signal, sys, time
import numpy as np
from omnistage.client import Audio, Player

player = Player()
def write(seconds):
    player.write(Audio(np.full(round(24000 * seconds), 0.5, np.float32), 24000))
"""


@contextmanager
def program(sink: Sink, code: str, family: ProcessFamily) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, in a process group of its own, which a terminal would send Ctrl-C to. It leaves no process."""
    command, variables = [sys.executable, "-c", PROGRAM + textwrap.dedent(code)], {**os.environ, "OMNISTAGE_PLAYER": sink.variable}
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with StartedProcess(command, env=variables, text=True, start_new_session=True, **pipes) as process:
        yield process
    assert family.wait_ended() == []


def ended(process: subprocess.Popen[str]) -> str:
    """The output of a process that ended well and printed nothing else."""
    printed, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (0, "")
    return printed


@pytest.mark.parametrize(
    ("act", "seconds", "told"),
    [
        pytest.param('print("not now", flush=True)', 2.0, "not now\nFalse\n", id="it is for the program and not for its player"),
        pytest.param("player.stop()", 600.0, "True\n", id="stop may be called from the handler"),
    ],
)
async def test_ctrl_c(tmp_path: Path, family: ProcessFamily, act: str, seconds: float, told: str) -> None:
    sink = Sink(tmp_path / "sink")
    code = f"""
    signal.signal(signal.SIGINT, lambda number, frame: {act})
    write({seconds})
    print(player.finish().seconds < {seconds})
    """
    with program(sink, code, family) as process:
        await until(sink.blocks)
        os.killpg(process.pid, signal.SIGINT)
        assert ended(process) == told
    assert seconds == 600.0 or len(sink.samples()) == 48_000


async def test_stop_from_a_handler_gets_through_wherever_it_comes(tmp_path: Path, family: ProcessFamily) -> None:
    code = """
    stopped = []
    def stop(number, frame):
        player.stop()
        stopped.append(number)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.0003)
    while len(stopped) < 500:
        write(0.01)
        player.heard
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    print(player.finish().of > 0)
    """
    with program(Sink(tmp_path / "sink"), code, family) as process:
        assert ended(process) == "True\n"


async def test_a_killed_program_leaves_no_player(tmp_path: Path, family: ProcessFamily) -> None:
    sink = Sink(tmp_path / "sink")
    with program(sink, "write(600.0)\nplayer.finish()", family) as process:
        await until(sink.blocks)
        process.kill()
    assert len(sink.samples()) < 600 * RATE


async def test_a_program_that_just_ends_leaves_no_player(tmp_path: Path, family: ProcessFamily) -> None:
    sink = Sink(tmp_path / "sink")
    with program(sink, f"write(600.0)\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)", family) as process:
        await until(sink.blocks)
        (tmp_path / "go").touch()
        assert ended(process) == ""


async def test_a_fork_does_not_keep_the_player_alive(tmp_path: Path, family: ProcessFamily) -> None:
    sink = Sink(tmp_path / "sink")
    code = """
    import warnings
    warnings.simplefilter("ignore")
    write(0.5)
    while not player.heard.samples:
        time.sleep(0.01)
    ready, told = os.pipe()
    if not (child := os.fork()):
        os.read(ready, 1)
        sys.exit(0)
    print(player.finish().samples)
    os.write(told, b"x")
    print(os.waitpid(child, 0)[1])
    """
    with program(sink, code, family) as process:
        assert ended(process).split() == ["12000", "0"]
