"""The picture of an answer, where its numbers are made."""

from pathlib import Path

import pytest

from omnistage.cli.timeline import draw, opened_at
from omnistage.client.events import Done, StageReport, Usage
from omnistage.client.playback import AudioArrival, TextArrival, Timing


def report(stage: str, port: str, first_output_s: float, total_s: float) -> StageReport:
    return StageReport(stage, "127.0.0.1:1", 0.0, first_output_s, total_s, {}, {port: 10}, 0, 0)


def done(stages: tuple[StageReport, ...], timing: Timing, queued_s: float = 0.0) -> Done:
    return Done("s", "toy", 1, "stop", Usage(stages, queued_s, 0.0, 0.0, 0.0), timing)


STAGES = (report("thinker", "text", 0.10, 0.50), report("talker", "codes", 0.15, 0.60), report("code2wav", "audio", 0.20, 0.80))
TEXT = (TextArrival(0.0, 0), TextArrival(0.13, 5), TextArrival(0.54, 5))
AUDIO = (AudioArrival(0.24, 0, 24000, 24000, True), AudioArrival(1.9, 24000, 24000, 24000, True))


def test_the_chain_was_opened_as_late_as_no_arrival_forbids() -> None:
    assert opened_at(done(STAGES, Timing(TEXT, AUDIO, 1.95))) == pytest.approx(0.03)


def test_the_chain_was_not_opened_before_admission() -> None:
    assert opened_at(done(STAGES, Timing(TEXT, AUDIO, 1.95), queued_s=0.05)) == 0.05


@pytest.mark.parametrize(
    ("stages", "timing", "text"),
    [
        (STAGES, Timing(TEXT, AUDIO, 1.95), "It costs $5 or $6."),
        (STAGES, Timing(TEXT, (AudioArrival(0.24, 0, 240000, 24000, True),), 0.6), "Longer to hear than to make."),
        (STAGES[:1], Timing(TEXT, (), 0.55), "word " * 200),
        (STAGES, Timing((), (), 0.1), ""),
        ((report("diffusion", "image", 0.1, 0.2),), Timing((), (), 0.3), "x" * 400),
    ],
)
def test_every_kind_of_answer_can_be_drawn(tmp_path: Path, stages: tuple[StageReport, ...], timing: Timing, text: str) -> None:
    path = tmp_path / "picture.png"
    draw(path, done(stages, timing), text)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000
