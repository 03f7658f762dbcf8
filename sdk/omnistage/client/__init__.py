"""The Python client of omnistage: ask for spoken answers, whole or as they are made.

from omnistage.client import Omni

with Omni() as omni:                       # or Omni(address="host:50050")
    answer = omni.generate("What is a kite?")
    print(answer.text)
    answer.save("answer.wav")
"""

from typing import TYPE_CHECKING

from omnistage.client import grpc_import as grpc_import  # the first import: before anything that imports gRPC
from omnistage.client.about import ImageLike
from omnistage.client.answer import Answer, Audio, SoundFile
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Pipeline, Replica
from omnistage.client.errors import (
    BadRequestError,
    CancelledError,
    ClosedError,
    DeadlineError,
    FieldViolation,
    ForkedError,
    NotAvailableError,
    NotSpokenError,
    OmniError,
    OverloadedError,
    PlayerLostError,
    ProtocolError,
    RequestError,
    RouterLostError,
    ServerError,
    StackError,
    StageLostError,
    StalledError,
    StartingError,
    SupersededError,
    UnavailableError,
    UnknownModelError,
    WrongLoopError,
)
from omnistage.client.events import (
    Alignment,
    AudioChunk,
    Done,
    Event,
    Failover,
    Picture,
    Progress,
    Rows,
    SpeechCodes,
    SpokenWord,
    StageReport,
    TextDelta,
    ThoughtDelta,
    Timing,
    TokenLogprob,
    TokensDelta,
    Usage,
    VideoDelta,
)
from omnistage.client.files import Film, SoundEncoder
from omnistage.client.loudspeaker import Loudspeaker, find_loudspeaker
from omnistage.client.media import AudioLike, MediaLike, Video, VideoLike
from omnistage.client.omni import Omni
from omnistage.client.options import Options, StackSettings
from omnistage.client.player import Heard, Player
from omnistage.client.request import Conversation
from omnistage.client.routers import UnencryptedKeyWarning

__all__ = [
    "Alignment",
    "Answer",
    "AsyncOmni",
    "Audio",
    "AudioChunk",
    "AudioLike",
    "BadRequestError",
    "CancelledError",
    "ClosedError",
    "Conversation",
    "DeadlineError",
    "Done",
    "Event",
    "Failover",
    "FieldViolation",
    "Film",
    "ForkedError",
    "Heard",
    "ImageLike",
    "Loudspeaker",
    "MediaLike",
    "NotAvailableError",
    "NotSpokenError",
    "Omni",
    "OmniError",
    "Options",
    "OverloadedError",
    "Picture",
    "Pipeline",
    "Player",
    "PlayerLostError",
    "Progress",
    "ProtocolError",
    "Replica",
    "RequestError",
    "RouterLostError",
    "Rows",
    "ServerError",
    "SoundEncoder",
    "SoundFile",
    "SpeechCodes",
    "SpokenWord",
    "StackError",
    "StackSettings",
    "StageLostError",
    "StageReport",
    "StalledError",
    "StartingError",
    "SupersededError",
    "TextDelta",
    "ThoughtDelta",
    "Timing",
    "TokenLogprob",
    "TokensDelta",
    "UnavailableError",
    "UnencryptedKeyWarning",
    "UnknownModelError",
    "Usage",
    "Video",
    "VideoDelta",
    "VideoLike",
    "WrongLoopError",
    "find_loudspeaker",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return `__version__`. A search through the installed packages finds it, so it is made only when it is read."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from omnistage.client.version import version

        return version()
