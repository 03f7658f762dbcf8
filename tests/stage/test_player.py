"""The listener that Code2Wav imagines."""

from __future__ import annotations

import random

import pytest

from omnistage.code2wav.stage import GRACE_S, Playhead


def test_who_always_has_something_to_play_is_not_starved() -> None:
    player = Playhead()
    for now, seconds in ((1.0, 0.5), (1.4, 0.2), (1.7 + GRACE_S / 2, 0.3)):
        player.hear(now, seconds)
    assert (player.underruns, player.starved_s) == (0, 0.0)


def test_silence_is_counted_as_often_and_as_long_as_it_is(seed: int) -> None:
    """Beside a player that asks at every millisecond whether there is something to play."""
    source = random.Random(seed)
    for _ in range(50):
        wait_s, now = source.choice([0.0, 0.3]), 0
        sounds = [(now := now + source.randint(1, 500), source.randint(1, 500)) for _ in range(30)]
        player = Playhead()
        for at, length in sounds:
            player.hear(at / 1000, length / 1000, wait_s)
        begins, held, silences = sounds[0][0] + round(1000 * wait_s), 0, list[int]()
        came = dict(sounds)
        silent = 0
        for at in range(sounds[0][0], sounds[-1][0] + 1):
            if at in came:
                held += came[at]
                silences += [silent] * (silent > 0)
                silent = 0
            if at >= begins:
                silent += held == 0
                held -= held > 0
        counted = [length for length in silences if length > 1000 * GRACE_S]
        assert player.underruns == pytest.approx(len(counted), abs=2)
        assert player.starved_s == pytest.approx(sum(counted) / 1000, abs=0.002 * len(sounds) + 0.04)
