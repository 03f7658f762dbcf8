"""The figures of an answer, on arrivals that can be checked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from omnistage.client.events import AudioArrival, TextArrival, Timing, buffer_levels, is_audible, play

RATE = 1000


def chunks(*arrivals: tuple[float, int, bool]) -> list[AudioArrival]:
    """(arrival, samples, audible) each."""
    result, first = [], 0
    for arrival_s, samples, audible in arrivals:
        result.append(AudioArrival(arrival_s, first, samples, RATE, audible))
        first += samples
    return result


def test_first_sound_is_the_first_audible_chunk_not_the_first_chunk() -> None:
    timing = Timing([], chunks((0.1, 200, False), (0.3, 200, True), (0.4, 200, True)), 0.5)
    assert timing.ttfa_s == 0.3


def test_an_answer_of_silence_has_no_first_sound() -> None:
    assert Timing([], chunks((0.1, 200, False)), 0.5).ttfa_s is None


@pytest.mark.parametrize(("level", "audible"), [(0.0, False), (0.0099, False), (0.0101, True), (-0.0101, True)])
def test_audible_means_above_minus_40_dbfs(level: float, audible: bool) -> None:
    samples = np.zeros(100, np.float32)
    samples[57] = level
    assert is_audible(samples) is audible


def test_no_samples_are_not_audible() -> None:
    assert not is_audible(np.zeros(0, np.float32))


def test_first_text_is_the_first_text_that_is_not_empty() -> None:
    assert Timing([TextArrival(0.1, 0), TextArrival(0.2, 3)], [], 0.5).ttft_s == 0.2


def test_real_time_factor_is_last_sound_over_audio() -> None:
    timing = Timing([], chunks((0.2, 1000, True), (0.5, 1000, True)), 0.9)
    assert timing.audio_s == 2.0
    assert timing.rtf == 0.25


def test_without_sound_there_is_no_real_time_factor() -> None:
    timing = Timing([TextArrival(0.1, 3)], [], 0.5)
    assert timing.rtf is None
    assert timing.underrun_s == 0.0
    assert timing.is_continuous


def test_underrun_is_the_largest_lateness_of_a_chunk() -> None:
    arrivals = chunks((1.0, 100, True), (1.05, 100, True), (1.5, 100, True), (1.55, 100, True), (1.9, 100, True))
    by_definition = max(chunk.arrival_s - 1.0 - chunk.first_sample / RATE for chunk in arrivals)
    timing = Timing([], arrivals, 2.0)
    assert timing.underrun_s == pytest.approx(by_definition)
    assert not timing.is_continuous


def test_a_player_waits_for_a_late_chunk_and_goes_on() -> None:
    played = play(chunks((1.0, 100, True), (1.3, 100, True), (1.31, 100, True)))
    assert [(round(p.start_s, 6), round(p.gap_s, 6)) for p in played] == [(1.0, 0.0), (1.3, 0.2), (1.4, 0.0)]


def test_sound_that_arrives_in_time_plays_without_gaps() -> None:
    timing = Timing([], chunks((0.2, 500, True), (0.3, 500, True), (0.6, 500, True)), 0.7)
    assert timing.underrun_s == 0.0


def test_who_waits_as_it_was_told_hears_no_gap() -> None:
    late = chunks((1.0, 100, True), (1.3, 100, True), (1.31, 100, True))
    for told, gaps_s in ((None, 0.2), (0.0, 0.2), (0.15, 0.05), (0.2, 0.0), (3.0, 0.0)):
        timing = Timing([], [replace(late[0], prebuffer_s=told), *late[1:]], 2.0)
        assert timing.prebuffer_s == told and timing.starved_s == pytest.approx(gaps_s)
        assert timing.underrun_s == pytest.approx(0.2)


def test_a_player_with_a_buffer_starts_when_it_is_full() -> None:
    arrivals = chunks((1.0, 300, True), (1.2, 300, True), (1.9, 100, True))
    assert [round(p.start_s, 6) for p in play(arrivals, 0.5)] == [1.2, 1.5, 1.9]
    assert [round(p.start_s, 6) for p in play(arrivals)] == [1.0, 1.3, 1.9]


def test_a_player_with_a_buffer_starts_with_less_when_that_is_all() -> None:
    assert [round(p.start_s, 6) for p in play(chunks((1.0, 200, True), (1.4, 100, True)), 0.5)] == [1.4, 1.6]


def test_the_buffer_is_what_was_received_and_not_played() -> None:
    levels = buffer_levels(chunks((1.0, 300, True), (1.2, 300, True), (2.0, 200, True)), 0.5)
    assert [(round(level.at_s, 6), round(level.buffered_s, 6)) for level in levels] == [
        (1.0, 0.0),
        (1.0, 0.3),
        (1.2, 0.3),
        (1.2, 0.6),
        (1.5, 0.3),
        (1.8, 0.0),  # the listener waits
        (2.0, 0.0),
        (2.0, 0.2),
        (2.2, 0.0),
    ]


def test_the_buffer_is_empty_only_where_the_listener_waits(seed: int) -> None:
    random = np.random.default_rng(seed)
    arrivals = chunks(*((float(at_s), 200, True) for at_s in np.sort(random.uniform(0.0, 4.0, 20))))
    played = play(arrivals, 0.5)
    for level in buffer_levels(arrivals, 0.5):
        if played[0].start_s < level.at_s < arrivals[-1].arrival_s and level.buffered_s < 1e-9:
            assert any(chunk.start_s - chunk.gap_s - 1e-9 <= level.at_s <= chunk.start_s + 1e-9 for chunk in played)
    assert sum(level.buffered_s < 1e-9 for level in buffer_levels(arrivals, 0.5)) >= 2 * sum(chunk.gap_s > 1e-9 for chunk in played)


def test_no_sound_fills_no_buffer() -> None:
    assert buffer_levels([]) == []
