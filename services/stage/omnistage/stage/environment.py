"""The objects that all sessions of a stage process share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.host.spans import Tracer
from omnistage.link.channels import Channels
from omnistage.stage.allowlist import AllowList
from omnistage.stage.logic import StageLogic
from omnistage.v1 import stage_pb2
from omnistage.wire.kinds import kind_name

OnPost = Callable[[str, int], None]
"""Called with the name of a tensor's transport and the tensor's size in bytes; see Sender."""


class NewSender(Protocol):
    """Makes a sender of tensors. on_post: called for each tensor."""

    def __call__(self, on_post: OnPost | None = None) -> Sender: ...


class SessionEnvironment:
    """The objects that all sessions of a process share."""

    def __init__(
        self,
        logic: StageLogic,
        description: stage_pb2.DescribeResponse,
        channels: Channels,
        allow_list: AllowList,
        arena: Arena | None,
        *,
        inline_limit: int,
        replay_limit: int,
        session_limit_s: float,
        trusted_uids: Collection[int] = (),
        on_post: OnPost = lambda transport, size: None,
        on_made: Callable[[str, int], None] = lambda port, items: None,
        tracer: Tracer | None = None,
    ) -> None:
        """arena: shared memory for tensors; None: there is none. inline_limit, replay_limit, trusted_uids: see StageSettings. on_post: see
        Sender. session_limit_s: longest session. on_made: called with the port and the number of items whenever items are made. tracer:
        gets a span of every session; None: no spans are made."""
        self.logic = logic
        self.description = description
        self.channels = channels
        self.allow_list = allow_list
        self.arena = arena
        self.inline_limit = inline_limit
        self.replay_limit = replay_limit
        self.session_limit_s = session_limit_s
        self.trusted_uids = frozenset(trusted_uids)
        self._on_post = on_post
        self.tracer = tracer or Tracer()
        self.on_made = on_made
        self.address = ""  # HOST:PORT of this stage, once it listens
        self.kind = kind_name(description.kind)

    def new_senders(self) -> NewSender:
        """Returns the function that makes the senders of one session, which report each tensor to this object's `on_post` too. All senders
        of a session have one share of the arena: the log of a replaced stream stays in use, so the stream after it must not get a second
        share."""
        share = self.arena.share() if self.arena is not None else None

        def new_sender(on_post: OnPost | None = None) -> Sender:
            def posted(transport: str, size: int) -> None:
                self._on_post(transport, size)
                if on_post is not None:
                    on_post(transport, size)

            return Sender(self.arena, inline_limit=self.inline_limit, share=share, on_post=posted)

        return new_sender
