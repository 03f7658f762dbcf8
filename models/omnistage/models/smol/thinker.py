"""The default Thinker: SmolLM2-135M-Instruct on the autoregressive engine, by default on one CPU thread. A demo brain."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer

from omnistage.engine.adapter import CPU, DecoderSpec
from omnistage.engine.decoder import DecoderConfig, PackedDecoder
from omnistage.engine.detokenizer import BytePieces, Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.head import TokenHead
from omnistage.engine.kv import page_bytes
from omnistage.engine.pages import PAGE_ROWS, pages_for
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.results import fixed_results
from omnistage.engine.scheduler import Limits
from omnistage.models.common.answer import AnswerAssembler, answered
from omnistage.models.common.arrays import array_of
from omnistage.models.common.checkpoint import read_config
from omnistage.models.common.constraint import FORMS, Constraints, Grammar, kept
from omnistage.models.common.requests import check_constraint, check_parts, fitting
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.tokenizer import read_tokenizer
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.devices import dtype_of, hardware
from omnistage.models.errors import LoadError
from omnistage.models.interface import (
    Activity,
    BadRequest,
    Content,
    FinishReason,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    Rows,
    TextPiece,
    TextRequest,
    Turn,
    Wanted,
)
from omnistage.models.options import LoadOptions

DEFAULT_SYSTEM = (
    "You are a helpful AI assistant. Give a short, clear and friendly answer of one to three complete sentences in plain English."
)
"""Used when a conversation has no system turn: the answer is to be heard, not read. Found by trying: a model of this size follows few
words. With the marks around it these are the 32 tokens of a page, so the engine keeps it from one request to the next."""

TEXT = "text"
MAX_SESSIONS = 64
KV_CACHE_BYTES = 512 << 20
_PIECE_TOKENS = 8
_MAX_TOKEN_CHARACTERS = 8
"""A text with more characters than this for each token of the context is refused before it becomes tokens, which costs time. English has
about 4.5 to a token of this vocabulary; the longest token, a line of 80 spaces, is no measure of a text."""
_CODE_REVISION = "6"
"""Part of the revision; grows whenever this code or the engine could give other tokens for equal input."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Text becomes tokens on one thread, not on a pool as large as the machine."""

_LANGUAGE = "model."
_UNUSED = ("audio_tower.", "visual.")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, its tokens (of the prompt, or of `verbatim`), its answer as far as the history, and what the engine is asked for; None:
    nothing, because the text is given, or was finished."""

    request: TextRequest
    token_ids: tuple[int, ...]
    answer: AnswerAssembler
    asked: SequenceRequest | None


class SmolThinker:
    """Implements `ThinkerModel`. Build it with `from_directory`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, info: ModelInfo, spec: DecoderSpec) -> None:
        self._engine, self._tokenizer, self._info, self._context = engine, tokenizer, info, spec.context
        # Text of a request never becomes a special token: a user cannot end their own turn.
        tokenizer.encode_special_tokens = True
        self._start, self._end = (_special(tokenizer, name) for name in ("<|im_start|>", "<|im_end|>"))
        special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        self._newline, self._opening = self._encode("\n"), self._encode("assistant\n")
        self._piece = BytePieces(tokenizer.id_to_token, special)
        self._unsayable = frozenset(special)
        self._worker = Worker("tokenizer", threads=1)
        tokens = tokenizer.get_vocab_size()
        self._constraints = Constraints(
            self._piece, self._encode, tokens=tokens, special=special, end_ids=(self._end,), vocabulary=spec.item_ids
        )

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int = 1,
        max_sessions: int = MAX_SESSIONS,
        limits: Limits | None = None,
        kv_bytes: int = KV_CACHE_BYTES,
        kept_pages: int | None = None,
        poison: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> SmolThinker:
        """Load from a folder that `convert_thinker` wrote.

        dtype: bfloat16, float32, or auto: what the device multiplies well. threads: torch threads of this process. limits: of the
        engine; None: those for so many sessions. kv_bytes: size of the KV cache, at least one full context; memory is used as it is
        touched. kept_pages, poison: see `Engine`. settings: for the info. Raises LoadError, or ValueError for ill-shaped weights.
        """
        dtype = dtype_of(device) if dtype == "auto" else dtype
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        torch.set_num_threads(threads)
        decoder = read_decoder(directory, _DTYPES[dtype], torch.device(device))
        pages = kv_bytes // page_bytes(decoder.spec)
        if (least := pages_for(decoder.spec.context)) > pages:
            raise LoadError(f"kv_cache_bytes {kv_bytes}: one whole context takes {least * page_bytes(decoder.spec)}")
        engine = Engine(
            decoder, TokenHead(decoder.logits), pages=pages, limits=limits or _limits(max_sessions), kept_pages=kept_pages, poison=poison
        )
        results = computed(partial(fixed_results, decoder, decoder.logits, engine.attention.backend), threads)
        info = ModelInfo(
            name="smollm2-135m-instruct",
            revision=revision(directory, _CODE_REVISION, dtype=dtype, device=hardware(device), threads=threads, results=results),
            accepts=(),
            produces=(PortSpec(TEXT, content=Content.TEXT, compact=True),),
            max_sessions=max_sessions,
            constraints=FORMS,
            settings={**(settings or {}), "products": decoder.products, "attention": engine.attention.reason},
        )
        return cls(engine, read_tokenizer(directory), info, decoder.spec)

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> SmolThinker:
        assert folder is not None
        sessions = options.max_sessions or MAX_SESSIONS
        limits = _limits(sessions, options.max_batch_size, options.max_batch_tokens)
        dtype = dtype_of(options.device) if options.dtype == "auto" else options.dtype
        kv_bytes = options.kv_cache_bytes or KV_CACHE_BYTES
        is_kept = options.enable_cache is not False
        chosen = {
            "dtype": dtype,
            "max_batch_size": limits.max_sequences,
            "max_batch_tokens": limits.max_rows,
            "kv_cache_bytes": kv_bytes,
            "enable_cache": is_kept,
        }
        return cls.from_directory(
            folder,
            device=options.device,
            dtype=dtype,
            threads=options.threads,
            max_sessions=sessions,
            limits=limits,
            kv_bytes=kv_bytes,
            kept_pages=None if is_kept else 0,
            settings={name: options.told(name, value) for name, value in chosen.items()},
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._engine.activity, self._worker.activity, self._constraints.activity)

    def load(self) -> Load:
        stats = self._engine.stats()
        return Load(queued=stats.waiting + self._worker.queued, kv_pages_used=stats.pages_used, kv_pages_total=stats.pages_total)

    async def warm_up(self) -> None:
        """Answer one short question: compiles nothing, but touches every weight and keeps the pages of the default system prompt."""
        await self._constraints.warm_up()
        prepared = await self.prepare(TextRequest((Turn("user", ("Hello!",)),), seed=0, max_tokens=4))
        async with aclosing(self._think(prepared)) as pieces:
            async for _ in pieces:
                pass

    async def close(self) -> None:
        await self._engine.close()
        await self._worker.close()
        await self._constraints.close()

    async def prepare(self, request: TextRequest) -> Prepared:
        """See ThinkerModel.prepare. Text is counted before anything is done with it, and becomes tokens on a thread."""
        check_parts(request, self._info)
        check_constraint(request, self._info)
        vocabulary = self._tokenizer.get_vocab_size()
        if not all(0 <= token_id < vocabulary for token_id in request.history):
            raise BadRequest("resume.history", f"token ids must be below {vocabulary}")
        if not self._unsayable.isdisjoint(request.history):
            raise BadRequest("resume.history", "special tokens are in no answer")
        self._check_characters("thinker.verbatim", len(request.verbatim))
        self._check_characters("thinker.messages", sum(len(turn.text) for turn in request.turns))
        grammar = await self._constraints.of(request)
        return await self._worker.run(partial(self._tokenized, request, grammar))

    def _check_characters(self, field: str, count: int) -> None:
        most = self._context * _MAX_TOKEN_CHARACTERS
        if count > most:
            raise BadRequest(field, f"shorten the text: it has {count} characters, the model takes at most {most}")

    def _tokenized(self, request: TextRequest, grammar: Grammar | None) -> Prepared:
        """The request with its tokens. Raises BadRequest for what only they tell."""
        if request.verbatim:
            ids = self._encode(request.verbatim)
            if request.history != ids[: len(request.history)]:
                raise BadRequest("resume.history", "the tokens are not those of thinker.verbatim")
        else:
            ids = self.prompt(request.turns)
        answer = AnswerAssembler(
            Detokenizer(self._piece, () if request.verbatim else request.stop), {TEXT: len(request.history)}, history=request.history
        )
        if request.verbatim or request.finished is not None:
            return Prepared(request, ids, answer, None)
        if answer.ended:
            raise BadRequest("resume.history", "the answer ended in its history, with a stop string")
        with fitting("thinker"):
            asked = self._asked(request, ids, grammar)
            self._engine.check(asked)
        return Prepared(request, ids, answer, asked)

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat form (ChatML), open for the assistant's answer. Raises BadRequest if it is too
        long."""
        if not turns or turns[0].role != "system":
            turns = (Turn("system", (DEFAULT_SYSTEM,)), *turns)
        encoded = [self._encoded(f"{turn.role}\n{turn.text}") for turn in turns]
        size = sum(map(len, encoded)) + len(encoded) * (2 + len(self._newline)) + 1 + len(self._opening)
        if size >= self._context:
            raise BadRequest("thinker.messages", f"shorten the conversation: it has {size} tokens, the model takes {self._context - 1}")
        ids: list[int] = []
        for part in encoded:
            ids += [self._start, *part.ids, self._end, *self._newline]
        return (*ids, self._start, *self._opening)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoded(text).ids)

    def _encoded(self, text: str) -> Encoding:
        # Unlike `encode`, a batch lets other threads of Python run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoded

    async def generate(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[TextPiece | Rows, None]:
        """Yield pieces as they are ready. At most `sequence.MAX_UNREAD` tokens are made ahead of the reader. The token that ends the
        text is not among the ids; a stop string's tokens are, its text is not."""
        pieces = self._say(prepared) if prepared.request.verbatim else self._think(prepared)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _say(self, prepared: Prepared) -> AsyncGenerator[TextPiece | Rows, None]:
        answer, ids = prepared.answer, prepared.token_ids
        for first in range(len(prepared.request.history), len(ids), _PIECE_TOKENS):
            for token_id in ids[first : first + _PIECE_TOKENS]:
                answer.token(token_id)
            for piece in answer.take():
                yield piece
        answer.end(FinishReason.STOP)
        for piece in answer.take():
            yield piece

    async def _think(self, prepared: Prepared) -> AsyncGenerator[TextPiece | Rows, None]:
        assert prepared.asked is not None, "a finished answer has no port that anybody could want"
        async with (
            aclosing(self._engine.submit(prepared.asked)) as stream,
            aclosing(answered(stream, prepared.answer, array_of)) as pieces,
        ):
            with kept():
                async for piece in pieces:
                    yield piece

    def _asked(self, request: TextRequest, prompt: Sequence[int], grammar: Grammar | None) -> SequenceRequest:
        """What the engine is asked for. Raises Unfit."""
        return SequenceRequest(
            prompt=Prompt.of_tokens(prompt, request.scope.encode()),
            seed=request.seed,
            max_items=min(request.max_tokens, self._context - len(prompt)),
            sampling=request.sampling,
            min_items=request.min_tokens,
            end_ids=frozenset({self._end}),
            ignore_end=request.ignore_eos,
            # One in the history of an answer would open another turn in it.
            banned=self._unsayable - {self._end},
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            history=tuple((token_id,) for token_id in request.history),
            constraint=grammar,
            client=request.client,
        )


def _limits(sessions: int, batch: int = 0, rows: int = 0) -> Limits:
    """Of the engine, for so many sessions. batch, rows: of a step; 0: what is usual. Raises LoadError.

    A replica that takes another one's place has up to twice its sessions: all of them may wait at once."""
    limits = Limits(max_sequences=batch or sessions, max_waiting=2 * sessions)
    if not rows:
        return limits
    if rows < PAGE_ROWS:
        raise LoadError(f"max_batch_tokens {rows}: a piece of a prompt alone has {PAGE_ROWS}")
    return replace(limits, max_rows=rows)


def read_decoder(directory: Path, dtype: torch.dtype, device: torch.device = CPU) -> PackedDecoder:
    """The language model of a folder that `convert_thinker` wrote. Raises BadCheckpoint, or ValueError for ill-shaped weights."""
    with Weights(directory) as weights:
        decoder = PackedDecoder(_read_config(directory), partial(_language_weight, weights, dtype, device))
        weights.check_read(ignored=_UNUSED)
    return decoder


def _language_weight(weights: Weights, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor | None:
    """A weight of the language model by the decoder's name."""
    tensor = weights.read(name if name == "lm_head.weight" else _LANGUAGE + name)
    return None if tensor is None else tensor.to(device, dtype)


def _read_config(directory: Path) -> DecoderConfig:
    text = read_config(directory, "qwen2_5_omni_thinker").section("text_config")
    return DecoderConfig(
        layers=text.value("num_hidden_layers", int),
        hidden_size=text.value("hidden_size", int),
        ffn_size=text.value("intermediate_size", int),
        query_heads=text.value("num_attention_heads", int),
        kv_heads=text.value("num_key_value_heads", int),
        vocab_size=text.value("vocab_size", int),
        context=text.value("max_position_embeddings", int),
        norm_eps=text.value("rms_norm_eps", float),
        rope_theta=text.section("rope_parameters").value("rope_theta", float),
    )


def _special(tokenizer: Tokenizer, name: str) -> int:
    token_id: int | None = tokenizer.token_to_id(name)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {name!r}")
    return token_id
