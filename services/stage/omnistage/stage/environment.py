"""What all sessions of a stage process share."""

from __future__ import annotations

from collections.abc import Callable, Collection

from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.link.channels import Channels
from omnistage.stage.allowlist import AllowList
from omnistage.stage.logic import StageLogic
from omnistage.v1 import stage_pb2
from omnistage.wire.kinds import kind_name


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
        on_post: Callable[[str, int], None] = lambda transport, size: None,
    ) -> None:
        """trusted_uids: users besides our own whose tensors are taken out of their shared memory, by copies. on_post: see Sender."""
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
        self.address = ""
        self.kind = kind_name(description.kind)

    def new_senders(self) -> Callable[[], Sender]:
        """Makes the senders of one session. All its streams have one share of the arena: a replaced one, whose log lives on, must not bring
        another."""
        share = self.arena.share() if self.arena is not None else None
        return lambda: Sender(self.arena, inline_limit=self.inline_limit, share=share, on_post=self._on_post)
