"""The addresses that a process calls: the channel of each, its signs of life, and what a stream does about silence. A stage that is silent
for too long counts as lost, as if it had been killed, unless there is no other replica: then the stream waits for it and logs that.

A stage whose event loop is blocked, or that was stopped, keeps its connections: the kernel and gRPC's own threads answer for it. So the
link listens to a signal that only the loop can send. While a stream to an address is open or opening, and a little longer, one `Watch` of
the address reports ten times a second, however many streams there are.

Time is counted in ticks of this process, not in seconds of a clock. If this process comes late, because the machine or its own loop was
busy, the whole delay is one tick, and everything that came meanwhile is read before the next look. So only an observer that was able to
listen judges silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from types import TracebackType

import grpc
import grpc.aio
import structlog

from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import MAX_MESSAGE_BYTES, Credentials, client_options
from omnistage.wire.errors import LOST_HERE, Reason, StageError
from omnistage.wire.proto_values import duration
from omnistage.wire.token import Token

log = structlog.get_logger("omnistage.link.patience")

LAST_S = 0.5
"""Seconds before the end of the request's time at which a silent replica without an alternative is given up, so that the caller learns
which stage was silent."""


class StreamLost(StageError):
    """The replica is gone, as this end of the stream saw: no Ended came and none will."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__("STAGE_LOST", message, metadata={"stage": stage})

    @property
    def meaning(self) -> Reason:
        return LOST_HERE


class Deadline:
    """The end of a request's time. It makes the error for a stream that ends, because a stream that ends at the deadline was not lost."""

    def __init__(self, at: float) -> None:
        """at: in time.monotonic() seconds."""
        self._at = at

    @property
    def remaining_s(self) -> float:
        return max(self._at - time.monotonic(), 0.0)

    @property
    def is_near(self) -> bool:
        """Whether so little time is left that the caller must now learn which stage the request waits for."""
        return self.remaining_s <= LAST_S

    def silence(self, stage: str, message: str) -> StageError:
        """The error of a stream whose replica was given up because it was silent: DEADLINE near the end of the time, else StreamLost."""
        if self.is_near:
            return StageError("DEADLINE", f"{message}, until the time of the request was over", metadata={"stage": stage})
        return self.loss(stage, message)

    def loss(self, stage: str, message: str) -> StageError:
        """The error of a stream that ended without Ended: DEADLINE at the end of the time, else StreamLost."""
        if self.remaining_s <= 0.01:
            return StageError("DEADLINE", "the deadline of the request has passed", metadata={"stage": stage})
        return StreamLost(stage, message)


class Patience:
    """The patience of one stream with one replica. The end of a process that hangs ends its connection, so even a wait for the only replica
    has an end."""

    def __init__(
        self, stage: str, address: str, deadline: Deadline, is_alone: Callable[[], bool], process_fields: Callable[[], Mapping[str, object]]
    ) -> None:
        """stage: its name, for the log. is_alone: returns whether there is no other replica to go to. process_fields: returns the state of
        the replica's process, as fields for a log line."""
        self._stage = stage
        self._address = address
        self._deadline = deadline
        self._process_fields = process_fields
        self._since: float | None = None  # when the present wait began; None: no wait
        # `may_leave` is called from a task that all sessions share. Its log lines need the context of the session that made this object.
        self._session = copy_context()
        self.is_alone = is_alone

    def may_leave(self, reason: str) -> bool:
        """Whether to give up a replica that is silent or does not answer. The stream asks this repeatedly; until it is true, the stream
        waits."""
        if self._deadline.is_near or not self.is_alone():
            return True
        if self._since is None:
            self._since = time.monotonic()
            self._log("link.waits", why=reason)
        return False

    def answers(self) -> None:
        """Note that the replica has given a sign of life: log how long it was waited for, if it was silent."""
        self._end(answers=True)

    def over(self) -> None:
        """Note that the stream has ended, or its Open went elsewhere: the wait for this replica is over."""
        self._end(answers=False)

    def _end(self, answers: bool) -> None:
        """End the wait, if there is one, and log its length. answers: whether the replica gave a sign of life."""
        if self._since is not None:
            waited_s, self._since = time.monotonic() - self._since, None
            self._log("link.waited", answers=answers, waited_s=round(waited_s, 3))

    def _log(self, event: str, **fields: object) -> None:
        self._session.run(log.warning, event, stage=self._stage, address=self._address, **fields, **self._process_fields())


TICK_S = 0.1
"""Seconds between two looks, and the period in which a stage is asked to beat."""

LATE_S = 0.05
"""If a look is later than this, in seconds, the process waits as long a second time, to read the beats that wait in its sockets."""

SILENCE = 10
"""Ticks without a beat after which a stage counts as lost."""

HESITATION = 2
"""Ticks without a beat, beyond the stage's period, after which it is better to send an Open to another replica."""

PERIODS = 3
GAPS = 4
LONGEST = 30
"""Silence is also at least three periods of a stage, which matters for an older stage that beats once a second. And it is at least four
times the longest recent gap between beats, up to LONGEST ticks, because on a busy machine stages get slow before they look dead."""

DECAY = 0.995
"""Share of the longest gap that each beat keeps: half of it is forgotten after 14 s."""

LINGER_S = 3.0
MEMORY_S = 60.0
"""Seconds for which a stage is watched after its last stream, if it beats and if it is quiet. While a quiet stage is watched, other
replicas are asked first."""

RETRY_S = 0.2
"""Seconds from the end of a Watch that broke off to the next."""

Metadata = Sequence[tuple[str, str]]

GiveUp = Callable[[str], None]
"""Receives the reason why a stream must be given up."""


class Rhythm:
    """How many ticks a peer has been quiet since its last beat, and how many are too many. The listener counts the ticks."""

    def __init__(self) -> None:
        self._period = 1  # the longest gap that the peer promises, in ticks
        self._longest = 0.0  # the longest recent gap between beats
        self.quiet_ticks = 0
        """Ticks since the last beat."""

    def tick(self) -> None:
        self.quiet_ticks += 1

    def beat(self, period_s: float) -> None:
        """Note a beat. period_s: longest time to the next beat, as the peer says; more than a second, which the contract does not have,
        counts as a second. A gap in which the peer could be given up as silent does not count as part of its rhythm."""
        if self.quiet_ticks < self.silence:
            self._longest = max(float(self.quiet_ticks), DECAY * self._longest)
        self._period = min(max(1, round(period_s / TICK_S)), SILENCE)
        self.quiet_ticks = 0

    @property
    def hesitation(self) -> int:
        """Ticks after which a new stream should not have to wait for this peer."""
        return self._period + HESITATION

    @property
    def silence(self) -> int:
        """Ticks after which the peer is given up."""
        return max(SILENCE, PERIODS * self._period, min(round(GAPS * self._longest), LONGEST))


class Attendance:
    """One stream that listens to a pulse. It calls `give_up` at most once, when the stream must be given up; after that, or after `leave`,
    it hears nothing."""

    def __init__(self, pulse: Pulse, give_up: GiveUp, may_hedge: Callable[[], bool] | None, patience: Patience | None) -> None:
        """Use `Pulse.attend`."""
        self._pulse = pulse
        self._first_tick = pulse.ticks  # number of the tick at which the stream began to listen
        self._may_hedge = may_hedge
        self._patience = patience
        self._report = give_up

    def now_tells(self, give_up: GiveUp) -> None:
        """Call `give_up` from now on, and only for silence, not for hesitation: the stream has come a step further."""
        self._may_hedge = None
        self._report = give_up

    def leave(self) -> None:
        """Stop listening. References to other objects are dropped, because this object may be in a cycle with its owner."""
        patience, self._patience, self._may_hedge = self._patience, None, None
        if patience is not None:
            patience.over()
        self._pulse.leave(self)

    def hear(self) -> None:
        """Note that the peer beats again after it was quiet: the patience with it starts anew."""
        if self._patience is not None:
            self._patience.answers()

    def look(self, rhythm: Rhythm) -> None:
        """Give the stream up if the peer has been quiet for too long. Time before the stream began does not count: the peer may just have
        woken."""
        silent_ticks = min(rhythm.quiet_ticks, self._pulse.ticks - self._first_tick)
        if silent_ticks >= rhythm.silence and (self._patience is None or self._patience.may_leave(_silence(silent_ticks))):
            self._give_up(silent_ticks)
        elif self._may_hedge is not None and silent_ticks >= rhythm.hesitation:
            may_hedge, self._may_hedge = self._may_hedge, None
            if may_hedge():
                self._give_up(silent_ticks)

    def _give_up(self, silent_ticks: int) -> None:
        self.leave()
        self._report(_silence(silent_ticks))


def _silence(silent_ticks: int) -> str:
    return f"no sign of life for {TICK_S * silent_ticks:.1f} s"


class Pulse:
    """The beat of one address, watched while a stream attends to it."""

    def __init__(self, pulses: Pulses, address: str, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """Use `Pulses.of`."""
        self._pulses = pulses
        self._address = address
        self._metadata = tuple(metadata)
        self._stub = stage_pb2_grpc.StageServiceStub(channel)
        self._rhythm = Rhythm()
        self._attending: set[Attendance] = set()
        self._mute = False  # whether the peer has no Watch that works
        self._end: asyncio.TimerHandle | None = None  # ends the Watch if no stream attends until then
        self.ticks = 0  # ticks counted so far
        self.listening = asyncio.create_task(self._listen())

    @property
    def is_quiet(self) -> bool:
        """Whether the peer did not beat in time when a stream last listened to it: then ask another peer."""
        return not self._mute and self._rhythm.quiet_ticks >= self._rhythm.hesitation

    def attend(self, give_up: GiveUp, may_hedge: Callable[[], bool] | None = None, patience: Patience | None = None) -> Attendance:
        """Listen on behalf of a stream. give_up: called with the reason when the stream must be given up. may_hedge: called once, when the
        peer hesitates; if it returns true, the stream is given up. patience: asked repeatedly, while the peer is silent, whether to give
        the peer up; None: silence always ends the stream."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        attendance = Attendance(self, give_up, may_hedge, patience)
        self._attending.add(attendance)
        self._pulses.start_ticks(self)
        return attendance

    def leave(self, attendance: Attendance) -> None:
        """Stop listening on behalf of a stream. Idempotent."""
        if attendance in self._attending:
            self._attending.remove(attendance)
            if not self._attending:
                self._end_later()

    def _end_later(self) -> None:
        """Called when no stream attends any more: count no more ticks, and end the Watch after a while."""
        self._pulses.stop_ticks(self)
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(MEMORY_S if self.is_quiet else LINGER_S, self._pulses.drop, self._address, self)

    def tick(self) -> None:
        """Count a tick without a beat, and let every stream judge a peer that is quiet."""
        self.ticks += 1
        self._rhythm.tick()
        if self.is_quiet:
            for attendance in tuple(self._attending):
                attendance.look(self._rhythm)

    def _beat(self, report: stage_pb2.WatchResponse) -> None:
        """Note a report of the peer as a beat, and call `hear` of the streams if the peer was quiet before."""
        was_quiet = self.is_quiet
        # An older stage names no period, and beats once a second.
        self._rhythm.beat(report.period.seconds + report.period.nanos / 1e9 if report.HasField("period") else 1.0)
        if was_quiet:
            if not self._attending:
                self._end_later()  # A peer that beats is watched for a shorter time.
            for attendance in tuple(self._attending):
                attendance.hear()

    async def _listen(self) -> None:
        """Receive the reports of the peer until this pulse is dropped. A peer that has no Watch, or whose Watch fails, is mute: it still
        answers, and does not count as quiet."""
        request = stage_pb2.WatchRequest(period=duration(TICK_S))
        while True:
            call = self._stub.Watch(request, wait_for_ready=True, metadata=self._metadata)
            try:
                async for report in call:
                    if report is not None:  # grpc.aio gives None for bytes that it cannot decode.
                        self._mute = False
                        self._beat(report)
            except grpc.aio.AioRpcError as error:
                # A peer that cannot be reached does not become mute by that.
                self._mute = self._mute or error.code() != grpc.StatusCode.UNAVAILABLE
            finally:
                call.cancel()  # If this task is cancelled while the call waits for a connection, gRPC does not end the call.
            await asyncio.sleep(RETRY_S)


class Pulses:
    """The pulses of one process, by address."""

    def __init__(
        self,
        channel: Callable[[str], grpc.aio.Channel],
        metadata: Metadata = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """channel: returns the channel of an address. metadata: sent with every call. sleep: waits for seconds."""
        self._channel = channel
        self._metadata = metadata
        self._sleep = sleep
        self._pulses: dict[str, Pulse] = {}
        self._ticked: set[Pulse] = set()
        self._ticking: asyncio.Task[None] | None = None

    def of(self, address: str) -> Pulse:
        """The pulse of an address, made and listened to if there is none yet."""
        if address not in self._pulses:
            self._pulses[address] = Pulse(self, address, self._channel(address), self._metadata)
        return self._pulses[address]

    def is_quiet(self, address: str) -> bool:
        """Whether the peer at this address did not beat in time: then ask other replicas first."""
        return address in self._pulses and self._pulses[address].is_quiet

    def start_ticks(self, pulse: Pulse) -> None:
        """Count the silence of this pulse: a stream attends to it."""
        self._ticked.add(pulse)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())

    def stop_ticks(self, pulse: Pulse) -> None:
        """Do not count the silence of this pulse any more: no stream attends to it."""
        self._ticked.discard(pulse)

    def drop(self, address: str, pulse: Pulse) -> None:
        pulse.listening.cancel()
        if self._pulses.get(address) is pulse:
            del self._pulses[address]

    async def close(self) -> None:
        tasks = [pulse.listening for pulse in self._pulses.values()]
        if self._ticking is not None:
            tasks.append(self._ticking)
        self._pulses.clear()
        self._ticked.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _tick(self) -> None:
        """Tick all pulses that streams attend to, every TICK_S, until there is none."""
        loop = asyncio.get_running_loop()
        while self._ticked:
            due = loop.time() + TICK_S
            await self._sleep(TICK_S)
            if loop.time() > due + LATE_S:
                await self._sleep(LATE_S)
            for pulse in tuple(self._ticked):
                pulse.tick()


SHARE = 0.05
BURST = 4.0
"""At most one Open in twenty, and a few at once: if all replicas are slow, asking twice makes them slower."""


class Hedges:
    """The number of second Opens that one process may still send: it grows by SHARE with each Open, up to BURST."""

    def __init__(self) -> None:
        self._budget = BURST

    def count_open(self) -> None:
        """Count an Open, at any replica."""
        self._budget = min(self._budget + SHARE, BURST)

    def take(self) -> bool:
        """Take one second Open from the budget and return True; return False if the budget holds less than one."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True


class Channels:
    """One channel per address, kept for the life of the process or until it is forgotten. Addresses come from a configuration, or from a
    name in it; the code that follows a name forgets the addresses that the name no longer has.

    metadata: sent with every call of a stage, for the stage's guard. token: shown in it; None: the stages need no token.
    """

    def __init__(self, credentials: Credentials, max_message_bytes: int = MAX_MESSAGE_BYTES, token: Token | None = None) -> None:
        self.metadata = token.metadata if token is not None else ()
        self._credentials = credentials
        self._options = client_options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.pulses = Pulses(self.get, self.metadata)
        """Signs of life of the addresses."""
        self.hedges = Hedges()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, made at the first call."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._credentials.channel(address, self._options)
        return channel

    def forget(self, address: str) -> None:
        """Drop the channel of the address: the next `get` makes a new one, and the old one ends with its last user."""
        self._channels.pop(address, None)

    async def close(self) -> None:
        await self.pulses.close()
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Channels:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
