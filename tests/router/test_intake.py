"""Memory for what clients stream: bounded for a turn, and for all turns together."""

from __future__ import annotations

from omnistage.router.intake import REPLAY_BYTES, WINDOW, Intake, ReplayRoom
from omnistage.v1 import stage_pb2


def test_what_is_kept_for_replays_is_bounded_together() -> None:
    """Who comes when all is taken keeps nothing: its turn ends where its stage is lost."""
    room = ReplayRoom(REPLAY_BYTES * 5 // 2)
    given = [room.take() for _ in range(4)]
    assert given == [REPLAY_BYTES, REPLAY_BYTES, REPLAY_BYTES // 2, 0]
    room.give_back(given[0])
    assert (room.take(), room.take()) == (REPLAY_BYTES, 0)


def test_ports_share_the_window_of_a_turn() -> None:
    async def tell(credit: stage_pb2.Credit) -> None:
        raise AssertionError("no answer runs yet")

    for count, each in ((0, WINDOW), (1, WINDOW), (3, WINDOW // 3), (8, WINDOW // 8), (9, 2)):
        ports = [stage_pb2.Port(name=f"media{n}", payload=stage_pb2.PAYLOAD_MEDIA) for n in range(count)]
        intake = Intake(ports, tell, stall_s=1, replay_bytes=0)
        assert intake.window == each
        assert intake.waits_for == [port.name for port in ports]
