"""The shared part of Thinkers with encoders: turning a request with media into a prompt, and handing its rows to a Talker."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.request import Constraint, Given, Prompt, SequenceRequest
from omnistage.models.conversation import Media, Streamed, Turn
from omnistage.models.encoders.encoder import Features, MediumExtent, PromptLayout
from omnistage.models.encoders.prompt import PromptRows, ThinkerSizes
from omnistage.models.encoders.reader import RequestMedium
from omnistage.models.encoders.starting import Ready
from omnistage.models.interface import Array, BadRequest, Failed, Full, Load, Piece, TensorRows, TextRequest, Wanted
from omnistage.models.media.decoder import Source
from omnistage.models.media.spool import Files, Spool, Spooled
from omnistage.models.media.terms import BadMedia, DecoderBroken, DecoderFailed, DecoderFull
from omnistage.models.requests import check_place, refuse_unfit
from omnistage.models.speech.talker import HIDDEN, PLACES, PROMPT
from omnistage.models.text.answer import AnswerAssembler
from omnistage.models.text.chat import ChatTokenizer
from omnistage.models.text.thinker import USUAL_TOKENS, EngineThinker, Tokenized

MEDIA_FIELD = "thinker.messages.parts.media"
MAX_MEDIA = 64
"""Largest number of media in one conversation."""


@dataclass(frozen=True, slots=True)
class PreparedConversation(Tokenized):
    """A conversation in which one token stands for each medium. media: in order; the bytes of a Streamed medium are still to come. files:
    store these bytes. grammar: constraint of the text; None: the text is free."""

    media: tuple[RequestMedium | Streamed, ...]
    files: Files
    grammar: Constraint | None


@dataclass(frozen=True, slots=True)
class Handed:
    """The part of a prompt that a Talker gets. ready: rows that are ready before anything is computed. slots: slots of the prompt whose
    taps the Talker gets, int64; None: all slots."""

    ready: tuple[TensorRows, ...] = ()
    slots: NDArray[np.int64] | None = None


class MediaThinker(EngineThinker[PreparedConversation]):
    """A Thinker with encoders; implements `ThinkerModel`. config: its sizes, in the family's own type. prompt_rows: the family's class that
    orders the rows of a prompt."""

    config: ThinkerSizes
    tokenizer: ChatTokenizer
    prompt_rows: ClassVar[type[PromptRows]]

    def __init__(self, ready: Ready, tokenizer: ChatTokenizer, row_of: Callable[[int], Array] | None = None) -> None:
        """ready: the running parts, which `close` ends. row_of: makes a token's row for a Talker from its id; None: the row is the token's
        tap."""
        # A thought may be long, and the answer comes after it, so a model that thinks may use its whole context.
        is_long = tokenizer.thinks is not None and tokenizer.thinks.is_open
        info = replace(ready.info, usual_tokens=ready.context if is_long else USUAL_TOKENS)
        super().__init__(ready.engine, tokenizer, info, ready.context, workers=[ready.encoders], team=ready.team)
        self.config, self.reader, self._row_of = ready.config, ready.reader, row_of
        self._unread = 0
        """Number of requests whose media are not read yet."""
        self._spool = Spool()

    def load(self) -> Load:
        """See Model.load. Requests that wait for media count as waiting too."""
        load = super().load()
        return replace(load, queued=load.queued + self._unread)

    async def warm_up(self) -> None:
        """Answer one short question about a picture: this touches the weights, starts the process that decodes, and leaves the default
        system prompt in the prefix cache."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        await self._answer_once(Media("image/png", file.getvalue()), "Hello!")

    async def close(self) -> None:
        await super().close()
        await self.reader.close()

    # Before the run: media are read when the answer runs, since that may take longer than a caller waits for the session to open ---------

    def _check(self, request: TextRequest) -> None:
        super()._check(request)
        if (count := len(_media(request.turns))) > MAX_MEDIA:
            raise BadRequest(MEDIA_FIELD, f"at most {MAX_MEDIA} media in one conversation, there are {count}")

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """See EngineThinker.prompt; one token stands for each medium."""
        return tuple(self.tokenizer.template.token_ids(turns, [part.kind for part in _media(turns)]))

    def lay_out(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent]) -> PromptLayout:
        """The rows of a prompt. prompt_ids: one token stands for each medium. extents: of the media, in order."""
        return self.prompt_rows(self.config).lay_out(prompt_ids, extents)

    def hand_over(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent], layout: PromptLayout, ports: Wanted) -> Handed:
        """The rows of the prompt that a Talker gets. prompt_ids, extents: arguments of the `lay_out` that made `layout`. Raises
        BadRequest."""
        return Handed(rows_known(PLACES, layout.positions.T, ports))

    def _prepared(
        self, request: TextRequest, prompt_ids: tuple[int, ...], said_ids: tuple[int, ...], grammar: Constraint | None
    ) -> PreparedConversation:
        """See EngineThinker. It also checks the request by the engine, and makes files for streamed media."""
        if request.finished is None and prompt_ids:  # Verbatim text for a model without rows has no prompt, and needs no engine.
            with refuse_unfit("thinker"):
                # Without the rows of the media: faults of the request itself are reported before anything is read.
                max_items = min(request.max_tokens, self._context - len(prompt_ids))
                self.engine.check(self._make_request(request, grammar, Prompt.of_tokens(prompt_ids), max_items, said_ids=said_ids))
        parts = _media(request.turns)
        streamed = [part for part in parts if isinstance(part, Streamed)]
        files = self._spool.files(streamed, lambda part: self.reader.most_bytes(part.kind), request.client)
        media = tuple(part if isinstance(part, Streamed) else self._medium(part, part.data, part.digest, request) for part in parts)
        return PreparedConversation(request, prompt_ids, said_ids, media, files, grammar)

    def _medium(self, part: Media | Streamed, source: Source, sha256: bytes, request: TextRequest) -> RequestMedium:
        return self.reader.medium(part, source, sha256, scope=request.scope, client=request.client)

    # The run ---------------------------------------------------------------------------------------------------------------------------

    async def _begin(
        self, prepared: PreparedConversation, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> tuple[AnswerAssembler, SequenceRequest]:
        """See EngineThinker. It reads the media first, and waits for streamed media."""
        features = await self._read(prepared, inputs)
        return await self._worker.run(partial(self._assemble, prepared, features, ports))

    def _assemble(
        self, prepared: PreparedConversation, features: Sequence[Features], ports: Wanted
    ) -> tuple[AnswerAssembler, SequenceRequest]:
        """Lay out the prompt, and return what `_begin` returns. features: of the media, in order. Raises BadRequest."""
        request, said_ids = prepared.request, prepared.said_ids
        extents = [each.extent for each in features]
        layout = self.lay_out(prepared.prompt_ids, extents)
        handed = self.hand_over(prepared.prompt_ids, extents, layout, ports)
        answer = AnswerAssembler(
            Detokenizer(self.tokenizer.piece, () if said_ids else request.stop),
            ports,
            history=request.history,
            finished=request.finished,
            max_tokens=len(said_ids) + 1 if said_ids else min(request.max_tokens, self._context - len(layout)),
            row_port=HIDDEN,
            last_row=False,
            row_of=self._row_of,
            prompt_port=PROMPT,
            prompt_rows=len(layout),
            prompt_slots=handed.slots,
            ready=handed.ready,
            thought=self._thought(request),
        )
        with refuse_unfit("thinker"):
            prompt = Prompt(layout.ids[:, None], _given_vectors(layout, features), layout.positions, layout.delta, request.scope.encode())
            taps_from = answer.first_slot
            engine_request = self._make_request(request, prepared.grammar, prompt, answer.items, said_ids=said_ids, taps_from=taps_from)
        return answer, engine_request

    async def _read(self, prepared: PreparedConversation, inputs: AsyncIterator[Piece]) -> list[Features]:
        """The features of all media of a request, in order. It waits for streamed media, and stores them in files until they are read."""
        if not prepared.media:
            return []
        async with prepared.files as files:
            await files.take_all(inputs)
            media = [
                part if isinstance(part, RequestMedium) else self._of_spooled(files.complete_media[part.port], prepared.request)
                for part in prepared.media
            ]
            self._unread += 1
            try:
                return await self._features(media, self._context - len(prepared.prompt_ids))
            finally:
                self._unread -= 1

    def _of_spooled(self, spooled: Spooled, request: TextRequest) -> RequestMedium:
        return self._medium(spooled.streamed, spooled.file, spooled.digest, request)

    async def _features(self, media: Sequence[RequestMedium], room: int) -> list[Features]:
        """Read media one after the other. room: number of rows that the prompt still has room for."""
        features = list[Features]()
        for number, medium in enumerate(media, 1):
            features.append(await self._features_of(medium, room, number))
            # One row was counted before: that of the token which stands for the medium.
            room -= self.reader.rows_of(features[-1].extent) - 1
        return features

    async def _features_of(self, medium: RequestMedium, room: int, number: int) -> Features:
        """The features of a medium. room: rows that it may have. number: of the medium in the request, for errors. Raises BadRequest, Full
        or Failed."""
        try:
            return await self.reader.features(medium, room)
        except BadMedia as error:
            refusal: Callable[[], Exception] = partial(BadRequest, MEDIA_FIELD, str(error), medium=str(number))
        except (DecoderFull, DecoderFailed) as error:
            refusal = partial(Full, str(error))
        except DecoderBroken as error:
            refusal = partial(Failed, str(error))
        # Raised outside of `except`: otherwise the refusal would keep the caught error, and with its traceback the pixels.
        raise refusal()


def rows_known(port: str, rows: NDArray[np.int64], ports: Wanted) -> tuple[TensorRows, ...]:
    """Integer rows of a prompt for a port, as int32 [n, width], from the first wanted row on; (): the port is not wanted. Raises BadRequest
    if the port would begin after its end."""
    if port not in ports:
        return ()
    check_place(ports, port, len(rows), "rows of the prompt")
    return (TensorRows(port, np.ascontiguousarray(rows[ports[port] :], np.int32), last=True),)


def _media(turns: Sequence[Turn]) -> list[Media | Streamed]:
    return [part for turn in turns for part in turn.parts if not isinstance(part, str)]


def _given_vectors(layout: PromptLayout, features: Sequence[Features]) -> tuple[Given, ...]:
    """The features of media as the given vectors of a prompt, in the slots that `layout` has for them."""
    return tuple(
        Given(placed.first, medium.rows if placed.order is None else medium.rows[torch.from_numpy(placed.order)], medium.digest)
        for placed, medium in zip(layout.media, features, strict=True)
    )
