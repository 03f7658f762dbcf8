"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.models.common.answer import AnswerAssembler
from omnistage.models.common.constraint import Grammar
from omnistage.models.common.requests import fitting
from omnistage.models.common.spool import Files, Spool, Spooled
from omnistage.models.common.thinker import EngineThinker, Tokenized
from omnistage.models.common.worker import Worker
from omnistage.models.interface import BadRequest, Full, Media, ModelInfo, Piece, Streamed, TextRequest, Turn, Wanted
from omnistage.models.media.errors import BadMedia, DecoderFailed, DecoderFull
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.features import Features
from omnistage.models.qwen2_5_omni.media import MediaReader, Medium, rows_of
from omnistage.models.qwen2_5_omni.prompt import Layout, laid_out
from omnistage.models.qwen2_5_omni.text import OmniTokenizer

PROMPT, HIDDEN = "prompt", "hidden"
MEDIA_FIELD = "thinker.messages.parts.media"
MAX_MEDIA = 64
"""Of one conversation."""

READING = 16
"""Requests whose media are read at once."""


@dataclass(frozen=True, slots=True)
class Prepared(Tokenized):
    """A conversation has one token for each medium. media: with their digests, in order; of those that are streamed the bytes are still to
    come. grammar: what the text is kept to."""

    media: tuple[tuple[Medium, bytes] | Streamed, ...]
    grammar: Grammar | None


class QwenThinker(EngineThinker[Prepared]):
    """Implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    tokenizer: OmniTokenizer

    def __init__(
        self,
        config: ThinkerConfig,
        engine: Engine,
        tokenizer: OmniTokenizer,
        reader: MediaReader,
        encoders: Worker,
        info: ModelInfo,
        context: int,
    ) -> None:
        """context: tokens of a conversation with its answer."""
        super().__init__(engine, tokenizer, info, context, workers=[encoders])
        self.config, self.reader = config, reader
        self._reading = asyncio.Semaphore(READING)
        self._spool = Spool()

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> QwenThinker:
        from omnistage.models.qwen2_5_omni.loading import load_thinker

        assert folder is not None
        return load_thinker(folder, options)

    async def warm_up(self) -> None:
        """Answer one short question about a picture: touches the weights, starts the process that decodes, and keeps the pages of the
        default system prompt."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        await self._answer_once(Media("image/png", file.getvalue()), "Hello!")

    async def close(self) -> None:
        await super().close()
        await self.reader.close()

    # Before the run: media are read when the answer runs, since that may take longer than a caller waits for the session to open ---------

    def _check(self, request: TextRequest) -> None:
        super()._check(request)
        media = _media(request.turns)
        self._files(media)  # Refuses what says that it is too large.
        if len(media) > MAX_MEDIA:
            raise BadRequest(MEDIA_FIELD, f"at most {MAX_MEDIA} media in one conversation, there are {len(media)}")

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """See EngineThinker.prompt; one token stands for each medium."""
        return tuple(self.tokenizer.template.written(turns, [_kind(part) for part in _media(turns)]))

    def _prepared(self, request: TextRequest, prompt_ids: tuple[int, ...], said_ids: tuple[int, ...], grammar: Grammar | None) -> Prepared:
        if request.finished is None:
            with fitting("thinker"):
                # Without what its media take: what is wrong with the request itself is told before anything is read.
                most = min(request.max_tokens, self._context - len(prompt_ids))
                self.engine.check(self._asked(request, grammar, Prompt.of_tokens(prompt_ids), most, said_ids=said_ids))
        media = tuple(part if isinstance(part, Streamed) else self._medium(part, request) for part in _media(request.turns))
        return Prepared(request, prompt_ids, said_ids, media, grammar)

    def _medium(self, part: Media, request: TextRequest) -> tuple[Medium, bytes]:
        medium = Medium(_kind(part), part.data, part.use_audio, request.client)
        return medium, self.reader.digest(medium, request.scope.encode())

    def _files(self, media: Iterable[object]) -> Files:
        """For those of them that are streamed. Raises BadRequest."""
        streamed = (part for part in media if isinstance(part, Streamed))
        return self._spool.files(streamed, lambda part: self.reader.most_bytes(_kind(part)))

    # The run ---------------------------------------------------------------------------------------------------------------------------

    async def _begun(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> tuple[AnswerAssembler, SequenceRequest]:
        features = await self._read(prepared, inputs)
        return await self._worker.run(partial(self._placed, prepared, features, wanted))

    def _placed(self, prepared: Prepared, features: Sequence[Features], wanted: Wanted) -> tuple[AnswerAssembler, SequenceRequest]:
        """See _begun; the media are read. Raises BadRequest."""
        request, said_ids = prepared.request, prepared.said_ids
        layout = laid_out(prepared.prompt_ids, [each.extent for each in features], self.config)
        answer = AnswerAssembler(
            Detokenizer(self.tokenizer.piece, () if said_ids else request.stop),
            wanted,
            history=request.history,
            finished=request.finished,
            most=len(said_ids) + 1 if said_ids else min(request.max_tokens, self._context - len(layout)),
            row_port=HIDDEN,
            last_row=False,
            prompt_port=PROMPT,
            prompt_rows=len(layout),
        )
        with fitting("thinker"):
            prompt = Prompt(layout.ids[:, None], _given(layout, features), layout.positions, layout.delta, request.scope.encode())
            taps_from = answer.first_slot
            asked = self._asked(request, prepared.grammar, prompt, answer.items, said_ids=said_ids, taps_from=taps_from)
            self.engine.check(asked)
        return answer, asked

    async def _read(self, prepared: Prepared, inputs: AsyncIterator[Piece]) -> list[Features]:
        """The features of all media, one after the other and of few requests at once: the pixels that are held are bounded. Those that are
        streamed are files until then."""
        if not prepared.media:
            return []
        async with self._files(prepared.media) as files:
            await files.take_all(inputs)
            request = prepared.request
            media = [self._come(files.whole[part.port], request) if isinstance(part, Streamed) else part for part in prepared.media]
            async with self._reading:
                return await self._features(media, self._context - len(prepared.prompt_ids))

    def _come(self, spooled: Spooled, request: TextRequest) -> tuple[Medium, bytes]:
        part = spooled.streamed
        medium = Medium(_kind(part), spooled.file, part.use_audio, request.client, spooled.digest)
        return medium, self.reader.digest(medium, request.scope.encode())

    async def _features(self, media: Sequence[tuple[Medium, bytes]], room: int) -> list[Features]:
        features = list[Features]()
        for number, (medium, digest) in enumerate(media, 1):
            features.append(await self._features_of(medium, digest, room, number))
            room -= rows_of(features[-1].extent, self.config) - 1
        return features

    async def _features_of(self, medium: Medium, digest: bytes, room: int, number: int) -> Features:
        """number: of the medium in the request, for what is wrong with it."""
        try:
            return await self.reader.features(medium, digest, room)
        except BadMedia as error:
            refusal: Callable[[], Exception] = partial(BadRequest, MEDIA_FIELD, str(error), medium=str(number))
        except (DecoderFull, DecoderFailed) as error:
            refusal = partial(Full, str(error))
        # Not where it is caught: a refusal that knows that error keeps the pixels that its traceback leads to.
        raise refusal()


def _media(turns: Sequence[Turn]) -> list[Media | Streamed]:
    return [part for turn in turns for part in turn.parts if not isinstance(part, str)]


def _kind(part: Media | Streamed) -> str:
    return part.media_type.partition("/")[0]


def _given(layout: Layout, features: Sequence[Features]) -> tuple[Given, ...]:
    """The rows of the media of a prompt."""
    return tuple(
        Given(placed.first, each.rows[torch.from_numpy(placed.order)], each.digest)
        for placed, each in zip(layout.media, features, strict=True)
    )
