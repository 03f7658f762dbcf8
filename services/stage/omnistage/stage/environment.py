"""What all sessions of a stage process share."""

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
"""As of a Sender: the way and the bytes of a tensor."""


class NewSender(Protocol):
    """Makes a sender of tensors."""

    def __call__(self, on_post: OnPost | None = None) -> Sender: ...


class SessionEnvironment:
    """What all sessions of a process share."""

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
        """trusted_uids: users besides our own whose tensors are taken out of their shared memory, by copies. on_post: see Sender. on_made:
        called with the port and the items of whatever is made. tracer: gets a span of every session; None: nobody does."""
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
        self.address = ""
        self.kind = kind_name(description.kind)

    def new_senders(self) -> NewSender:
        """Makes the senders of one session, and tells `on_post` of what they post too. All its streams have one share of the arena: a
        replaced one, whose log lives on, must not bring another."""
        share = self.arena.share() if self.arena is not None else None

        def new_sender(on_post: OnPost | None = None) -> Sender:
            def posted(transport: str, size: int) -> None:
                self._on_post(transport, size)
                if on_post is not None:
                    on_post(transport, size)

            return Sender(self.arena, inline_limit=self.inline_limit, share=share, on_post=posted)

        return new_sender
