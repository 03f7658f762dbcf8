"""The Python client of omnistage: ask for spoken answers, whole or as they are made.

from omnistage.client import Omni

with Omni() as omni:                       # or Omni(address="host:50050")
    answer = omni.generate("What is a kite?")
    print(answer.text)
    answer.save("answer.wav")
"""

import types
from typing import TYPE_CHECKING

from omnistage.client import grpc_import as grpc_import  # the first import: before anything that imports gRPC
from omnistage.client.answer import Answer as Answer
from omnistage.client.answer import Audio as Audio
from omnistage.client.answer import SoundFile as SoundFile
from omnistage.client.async_omni import AsyncOmni as AsyncOmni
from omnistage.client.connection import Pipeline as Pipeline
from omnistage.client.connection import Replica as Replica
from omnistage.client.errors import BadRequestError as BadRequestError
from omnistage.client.errors import CancelledError as CancelledError
from omnistage.client.errors import ClosedError as ClosedError
from omnistage.client.errors import DeadlineError as DeadlineError
from omnistage.client.errors import FieldViolation as FieldViolation
from omnistage.client.errors import ForkedError as ForkedError
from omnistage.client.errors import NotAvailableError as NotAvailableError
from omnistage.client.errors import NotSpokenError as NotSpokenError
from omnistage.client.errors import OmniError as OmniError
from omnistage.client.errors import OverloadedError as OverloadedError
from omnistage.client.errors import PlayerLostError as PlayerLostError
from omnistage.client.errors import ProtocolError as ProtocolError
from omnistage.client.errors import RequestError as RequestError
from omnistage.client.errors import RouterLostError as RouterLostError
from omnistage.client.errors import ServerError as ServerError
from omnistage.client.errors import StackError as StackError
from omnistage.client.errors import StageLostError as StageLostError
from omnistage.client.errors import StalledError as StalledError
from omnistage.client.errors import StartingError as StartingError
from omnistage.client.errors import SupersededError as SupersededError
from omnistage.client.errors import UnavailableError as UnavailableError
from omnistage.client.errors import UnknownModelError as UnknownModelError
from omnistage.client.errors import WrongLoopError as WrongLoopError
from omnistage.client.events import Alignment as Alignment
from omnistage.client.events import AudioChunk as AudioChunk
from omnistage.client.events import Done as Done
from omnistage.client.events import Event as Event
from omnistage.client.events import Failover as Failover
from omnistage.client.events import Picture as Picture
from omnistage.client.events import Progress as Progress
from omnistage.client.events import Rows as Rows
from omnistage.client.events import SpeechCodes as SpeechCodes
from omnistage.client.events import SpokenWord as SpokenWord
from omnistage.client.events import StageReport as StageReport
from omnistage.client.events import TextDelta as TextDelta
from omnistage.client.events import ThoughtDelta as ThoughtDelta
from omnistage.client.events import Timing as Timing
from omnistage.client.events import TokenLogprob as TokenLogprob
from omnistage.client.events import TokensDelta as TokensDelta
from omnistage.client.events import Usage as Usage
from omnistage.client.events import VideoDelta as VideoDelta
from omnistage.client.files import Film as Film
from omnistage.client.files import SoundEncoder as SoundEncoder
from omnistage.client.loudspeaker import Loudspeaker as Loudspeaker
from omnistage.client.loudspeaker import find_loudspeaker as find_loudspeaker
from omnistage.client.media import AudioLike as AudioLike
from omnistage.client.media import MediaLike as MediaLike
from omnistage.client.media import Video as Video
from omnistage.client.media import VideoLike as VideoLike
from omnistage.client.omni import Omni as Omni
from omnistage.client.options import ImageLike as ImageLike
from omnistage.client.options import Options as Options
from omnistage.client.options import StackSettings as StackSettings
from omnistage.client.player import Heard as Heard
from omnistage.client.player import Player as Player
from omnistage.client.request import Conversation as Conversation
from omnistage.client.routers import UnencryptedKeyWarning as UnencryptedKeyWarning

# Each name that is imported here is one of the client's public names. The modules of this package are not.
__all__ = sorted(
    name for name, value in vars().items() if name[0] != "_" and name != "TYPE_CHECKING" and not isinstance(value, types.ModuleType)
)

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return `__version__`. A search through the installed packages finds it, so it is made only when it is read."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from omnistage.client.version import version

        return version()
