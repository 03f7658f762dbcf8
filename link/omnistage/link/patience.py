"""Decides what a stream does about a silent replica: give it up, or, if there is no other replica, wait for it and log that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import copy_context

import structlog

from omnistage.link.deadline import Deadline

log = structlog.get_logger(__name__)


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
        self._known = process_fields
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
        self._session.run(log.warning, event, stage=self._stage, address=self._address, **fields, **self._known())
