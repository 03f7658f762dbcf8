"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.models.common.answer import AnswerAssembler, answered
from omnistage.models.common.arrays import array_of
from omnistage.models.common.constraint import Constraints, Grammar, kept
from omnistage.models.common.requests import check_constraint, check_parts, fitting
from omnistage.models.common.spool import Files, Spool, Spooled
from omnistage.models.common.worker import Worker
from omnistage.models.interface import (
    Activity,
    BadRequest,
    FinishReason,
    Full,
    Load,
    Media,
    ModelInfo,
    Piece,
    Rows,
    Streamed,
    TextPiece,
    TextRequest,
    Turn,
    Wanted,
    no_inputs,
)
from omnistage.models.media.errors import BadMedia, DecoderFailed, DecoderFull
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.features import Features
from omnistage.models.qwen2_5_omni.media import MediaReader, Medium, rows_of
from omnistage.models.qwen2_5_omni.prompt import Layout, laid_out
from omnistage.models.qwen2_5_omni.text import OmniTokenizer

TEXT, PROMPT, HIDDEN = "text", "prompt", "hidden"
MEDIA_FIELD = "thinker.messages.parts.media"
MAX_MEDIA = 64
"""Of one conversation."""

READING = 4
"""Requests whose media are read at once."""

_PIECE_TOKENS = 8
_MAX_TOKEN_CHARACTERS = 8
"""A text with more characters than this for each token of the context is refused before it becomes tokens, which costs time."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Text becomes tokens on one thread, not on a pool as large as the machine."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, its tokens (of the conversation with one for each medium, or of `verbatim`), its media with their digests, in order (of
    those that are streamed the bytes are still to come), and what its text is kept to."""

    request: TextRequest
    token_ids: tuple[int, ...]
    media: tuple[tuple[Medium, bytes] | Streamed, ...]
    grammar: Grammar | None


class QwenThinker:
    """Implements `ThinkerModel`. Build it with `loading.load_thinker`."""

    def __init__(
        self,
        config: ThinkerConfig,
        engine: Engine,
        tokenizer: OmniTokenizer,
        reader: MediaReader,
        workers: Sequence[Worker],
        info: ModelInfo,
        context: int,
    ) -> None:
        """workers: of the tokenizer, and those of the encoders. context: tokens of a conversation with its answer."""
        self._context = context
        self.config, self.engine, self.tokenizer, self.reader = config, engine, tokenizer, reader
        self._worker, self._workers, self._info = workers[0], workers, info
        self._reading = asyncio.Semaphore(READING)
        self._spool = Spool()
        self._constraints = Constraints(
            tokenizer.piece,
            tokenizer.encode,
            tokens=tokenizer.size,
            special=tokenizer.special,
            end_ids=sorted(tokenizer.ends),
            vocabulary=config.text.vocab_size,
        )

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> QwenThinker:
        from omnistage.models.qwen2_5_omni.loading import load_thinker

        assert folder is not None
        return load_thinker(folder, options)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self.engine.activity, *(worker.activity for worker in self._workers), self._constraints.activity)

    def load(self) -> Load:
        stats = self.engine.stats()
        return Load(queued=stats.waiting + self._worker.queued, kv_pages_used=stats.pages_used, kv_pages_total=stats.pages_total)

    async def warm_up(self) -> None:
        """Answer one short question about a picture: touches the weights, starts the process that decodes, and keeps the pages of the
        default system prompt."""
        await self._constraints.warm_up()
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        prepared = await self.prepare(TextRequest((Turn("user", (Media("image/png", file.getvalue()), "Hello!")),), seed=0, max_tokens=4))
        async with aclosing(self._think(prepared, no_inputs(), {TEXT: 0})) as pieces:
            async for _ in pieces:
                pass

    async def close(self) -> None:
        await self.engine.close()
        for worker in self._workers:
            await worker.close()
        await self._constraints.close()
        await self.reader.close()

    async def prepare(self, request: TextRequest) -> Prepared:
        """See ThinkerModel.prepare. Text is counted before anything is done with it. Media are read when the answer runs, since that may
        take longer than a caller waits for the session to open."""
        check_parts(request, self._info)
        check_constraint(request, self._info)
        if not all(0 <= token_id < self.config.text.vocab_size for token_id in request.history):
            raise BadRequest("resume.history", f"token ids must be below {self.config.text.vocab_size}")
        if not self.tokenizer.unsayable.isdisjoint(request.history):
            raise BadRequest("resume.history", "special tokens are in no answer")
        self._check_characters("thinker.verbatim", len(request.verbatim))
        self._check_characters("thinker.messages", sum(len(turn.text) for turn in request.turns))
        media = [part for turn in request.turns for part in turn.parts if not isinstance(part, str)]
        self._files(media)  # Refuses what says that it is too large.
        if len(media) > MAX_MEDIA:
            raise BadRequest(MEDIA_FIELD, f"at most {MAX_MEDIA} media in one conversation, there are {len(media)}")
        grammar = await self._constraints.of(request)
        return await self._worker.run(partial(self._tokenized, request, media, grammar))

    def _check_characters(self, field: str, count: int) -> None:
        most = self._context * _MAX_TOKEN_CHARACTERS
        if count > most:
            raise BadRequest(field, f"shorten the text: it has {count} characters, the model takes at most {most}")

    def _tokenized(self, request: TextRequest, media: Sequence[Media | Streamed], grammar: Grammar | None) -> Prepared:
        """The request with its tokens, and digests of its media. Raises BadRequest for what only they tell."""
        if request.verbatim:
            ids = tuple(self.tokenizer.encode(request.verbatim))
            if request.history != ids[: len(request.history)]:
                raise BadRequest("resume.history", "the tokens are not those of thinker.verbatim")
            return Prepared(request, ids, (), None)
        ids = tuple(self.tokenizer.template.written(request.turns, [_kind(part) for part in media]))
        if len(ids) >= self._context:
            raise BadRequest("thinker.messages", f"shorten the conversation: it has {len(ids)} tokens, the model takes {self._context - 1}")
        if request.finished is None:
            with fitting("thinker"):
                # Without what its media take: what is wrong with the request itself is told before anything is read.
                most = min(request.max_tokens, self._context - len(ids)) + 1
                self.engine.check(self._asked(request, grammar, Prompt.of_tokens(ids), max(most, len(request.history) + 1)))
        read = tuple(part if isinstance(part, Streamed) else self._medium(part, request) for part in media)
        return Prepared(request, ids, read, grammar)

    def _medium(self, part: Media, request: TextRequest) -> tuple[Medium, bytes]:
        medium = Medium(_kind(part), part.data, part.use_audio, request.client)
        return medium, self.reader.digest(medium, request.scope.encode())

    def _files(self, media: Iterable[object]) -> Files:
        """For those of them that are streamed. Raises BadRequest."""
        streamed = (part for part in media if isinstance(part, Streamed))
        return self._spool.files(streamed, lambda part: self.reader.most_bytes(_kind(part)))

    async def generate(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[TextPiece | Rows, None]:
        """Yield pieces as they are ready. At most `sequence.MAX_UNREAD` tokens are made ahead of the reader. The token that ends the
        text is not among the ids; a stop string's tokens are, its text is not."""
        pieces = self._say(prepared, wanted) if prepared.request.verbatim else self._think(prepared, inputs, wanted)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _say(self, prepared: Prepared, wanted: Wanted) -> AsyncGenerator[TextPiece | Rows, None]:
        request = prepared.request
        answer = AnswerAssembler(Detokenizer(self.tokenizer.piece), wanted, history=request.history, finished=request.finished)
        for first in range(len(request.history), len(prepared.token_ids), _PIECE_TOKENS):
            for token_id in prepared.token_ids[first : first + _PIECE_TOKENS]:
                answer.token(token_id)
            for piece in answer.take():
                yield piece
        answer.end(FinishReason.STOP)
        for piece in answer.take():
            yield piece

    async def _think(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[TextPiece | Rows, None]:
        request = prepared.request
        features = await self._read(prepared, inputs)
        layout = laid_out(prepared.token_ids, [each.extent for each in features], self.config)
        answer = AnswerAssembler(
            Detokenizer(self.tokenizer.piece, request.stop),
            wanted,
            history=request.history,
            finished=request.finished,
            most=min(request.max_tokens, self._context - len(layout)),
            row_port=HIDDEN,
            prompt_port=PROMPT,
            prompt_rows=len(layout),
        )
        with fitting("thinker"):
            prompt = Prompt(layout.ids[:, None], _given(layout, features), layout.positions, layout.delta, request.scope.encode())
            asked = self._asked(request, prepared.grammar, prompt, answer.items, answer.first_slot)
            self.engine.check(asked)
        async with aclosing(self.engine.submit(asked)) as stream, aclosing(answered(stream, answer, array_of)) as pieces:
            with kept():
                async for piece in pieces:
                    yield piece

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
                return await self._features(media, self._context - len(prepared.token_ids))

    def _come(self, spooled: Spooled, request: TextRequest) -> tuple[Medium, bytes]:
        part = spooled.streamed
        medium = Medium(_kind(part), spooled.file, part.use_audio, request.client, spooled.digest)
        return medium, self.reader.digest(medium, request.scope.encode())

    async def _features(self, media: Sequence[tuple[Medium, bytes]], room: int) -> list[Features]:
        features = list[Features]()
        for number, (medium, digest) in enumerate(media, 1):
            try:
                features.append(await self.reader.features(medium, digest, room))
            except BadMedia as error:
                raise BadRequest(MEDIA_FIELD, f"medium {number} ({medium.kind}): {error}") from None
            except (DecoderFull, DecoderFailed) as error:
                raise Full(str(error)) from None
            room -= rows_of(features[-1].extent, self.config) - 1
        return features

    def _asked(
        self, request: TextRequest, grammar: Grammar | None, prompt: Prompt, items: int, taps_from: int | None = None
    ) -> SequenceRequest:
        """What the engine is asked for. Raises Unfit."""
        return SequenceRequest(
            prompt=prompt,
            seed=request.seed,
            max_items=items,
            sampling=request.sampling,
            min_items=request.min_tokens,
            end_ids=self.tokenizer.ends,
            ignore_end=request.ignore_eos,
            banned=self.tokenizer.unsayable,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            constraint=grammar,
            history=tuple((token_id,) for token_id in request.history),
            taps_from=taps_from,
            client=request.client,
        )


def _kind(part: Media | Streamed) -> str:
    return part.media_type.partition("/")[0]


def _given(layout: Layout, features: Sequence[Features]) -> tuple[Given, ...]:
    """The rows of the media of a prompt."""
    return tuple(
        Given(placed.first, each.rows[torch.from_numpy(placed.order)], each.digest)
        for placed, each in zip(layout.media, features, strict=True)
    )
