"""The calls of the client that blocks. `python -m tools.options` makes this file from AsyncOmni."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar, Unpack

from omnistage.client.answer import Answer
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Pipeline, Replica
from omnistage.client.events import Event
from omnistage.client.media import Audios, Images, Videos
from omnistage.client.options import DEFAULT_TIMEOUT_S, DRAWING, SPEECH, Options
from omnistage.client.request import Conversation, checked_seconds, time_limit_s
from omnistage.client.wording import explain_calls, takes_options

T = TypeVar("T")


class BlockingCalls(ABC):
    """Each of these is the call of AsyncOmni with this name."""

    _client: AsyncOmni

    @abstractmethod
    def _run(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T: ...

    @abstractmethod
    def _iterate(self, limit_s: float, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]: ...

    @takes_options()
    def chat(self, conversation: Conversation, **options: Unpack[Options]) -> Answer:
        """Answer the last turn of a conversation; `answer["content"]` is the text. See `request.Conversation` for the form of a turn."""
        return self._run(
            time_limit_s(options),
            self._client.chat(conversation, **options),
        )

    @takes_options(SPEECH)
    def say(self, text: str, **options: Unpack[Options]) -> Answer:
        """Speak exactly this text. Raises NotSpokenError if nothing of it could be spoken."""
        return self._run(
            time_limit_s(options),
            self._client.say(text, **options),
        )

    @takes_options(DRAWING)
    def draw(self, prompt: str, *, images: Images = (), **options: Unpack[Options]) -> Answer:
        """Draw a picture, with a drawing pipeline. `answer.images` has it, `answer.pictures` has it encoded, and `answer.rows` has its
        latents and pixels if `outputs` names them. If there are several `results`, only the first has previews. In a private stack of
        the default pipelines the first drawing starts the pipeline that draws, and waits for it."""
        return self._run(
            time_limit_s(options),
            self._client.draw(prompt, images=images, **options),
        )

    @takes_options(DRAWING)
    def film(self, prompt: str, *, image: Images = (), **options: Unpack[Options]) -> Answer:
        """Make a film of a prompt, with a pipeline that makes films: `answer.videos[0].save("x.webm")`, or .mp4 if `media_type` is
        video/mp4. image: the picture with which it begins; or two, the first and the last one, if the model takes them. `answer.rows`
        has its latents and pixels if `outputs` names them."""
        return self._run(
            time_limit_s(options),
            self._client.film(prompt, image=image, **options),
        )

    @takes_options(DRAWING)
    def sound(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Make the sound that a prompt describes, `seconds` long, with a pipeline that makes sounds: `answer.audio`,
        `answer.save("x.wav")`. To have a text spoken, call `say`."""
        return self._run(
            time_limit_s(options),
            self._client.sound(prompt, **options),
        )

    @takes_options()
    def stream(
        self, prompt: str, *, images: Images = (), audios: Audios = (), videos: Videos = (), **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """The events of an answer to one prompt, as they come. Closing the generator cancels the answer."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream(prompt, images=images, audios=audios, videos=videos, **options),
        )

    @takes_options()
    def stream_chat(self, conversation: Conversation, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The events of an answer to a conversation, as they come."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream_chat(conversation, **options),
        )

    @takes_options(SPEECH)
    def stream_say(self, text: str, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The events while exactly this text is spoken, as they come; NotSpokenError at the end if there was no sound."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream_say(text, **options),
        )

    @takes_options(DRAWING)
    def stream_draw(self, prompt: str, *, images: Images = (), **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The progress, previews and pictures for a prompt, as they come; see `draw`."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream_draw(prompt, images=images, **options),
        )

    @takes_options(DRAWING)
    def stream_film(self, prompt: str, *, image: Images = (), **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The progress and the pieces of the film for a prompt, as they come; see `film`. The pieces, joined in order, are the file;
        those that have come can be played already."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream_film(prompt, image=image, **options),
        )

    @takes_options(DRAWING)
    def stream_sound(self, prompt: str, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The progress and the samples of the sound for a prompt, as they come; see `sound`."""
        return self._iterate(
            time_limit_s(options),
            self._client.stream_sound(prompt, **options),
        )

    @explain_calls
    def pipelines(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Pipeline]:
        """The pipelines of the router, also those that are still starting."""
        return self._run(
            checked_seconds("timeout_s", timeout_s),
            self._client.pipelines(timeout_s=timeout_s),
        )

    @explain_calls
    def voices(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, tuple[str, ...]]:
        """The voices of each pipeline that speaks, by its name; the first voice is its default."""
        return self._run(
            checked_seconds("timeout_s", timeout_s),
            self._client.voices(timeout_s=timeout_s),
        )

    @explain_calls
    def replicas(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Replica]:
        """The stage servers and their states."""
        return self._run(
            checked_seconds("timeout_s", timeout_s),
            self._client.replicas(timeout_s=timeout_s),
        )
