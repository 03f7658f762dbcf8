"""Texts about a server that was lost in the middle of an answer."""

from __future__ import annotations

from omnistage.client.events import START_BUFFER_S, Failover, Timing, play


def sentence(failover: Failover, timing: Timing) -> str:
    """A sentence about a loss: which server was lost, how the answer went on, and what the listener noticed."""
    went_on = "it was back" if failover.replica == failover.lost else "another went on"
    return f"{failover.stage} lost at {failover.at_s:.2f} s, {went_on} after {pause(failover)}; {_effect_text(failover, timing)}"


def pause(failover: Failover) -> str:
    """The pause after a loss in words: 35 ms, or 1.24 s."""
    return f"{failover.pause_s * 1000:.0f} ms" if failover.pause_s < 1 else f"{failover.pause_s:.2f} s"


def as_object(failover: Failover) -> dict[str, str | float]:
    """The loss of a server as a JSON object, for scripts."""
    return {
        "stage": failover.stage,
        "lost": failover.lost,
        "replica": failover.replica,
        "reason": failover.reason,
        "at_s": round(failover.at_s, 6),
        "pause_s": round(failover.pause_s, 6),
    }


def waited_s(failover: Failover, timing: Timing) -> float:
    """Seconds of silence after a loss, because sound came late, for a listener with a buffer of START_BUFFER_S."""
    return sum(chunk.gap_s for chunk in play(timing.audio, START_BUFFER_S) if chunk.start_s >= failover.at_s)


def _effect_text(failover: Failover, timing: Timing) -> str:
    """The effect of a loss on the listener, in words."""
    if not timing.audio:
        return "nothing is missing"
    silence_s = waited_s(failover, timing)
    return "the listener noticed nothing" if silence_s < 0.005 else f"the listener waited {silence_s:.2f} s for sound after it"
