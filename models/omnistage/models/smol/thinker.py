"""The default Thinker: SmolLM2-135M-Instruct on the autoregressive engine, in bfloat16 on one CPU thread. A demo brain."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Encoding, Tokenizer

from omnistage.engine.activity import Activity
from omnistage.engine.decoder import DecoderConfig, PackedDecoder
from omnistage.engine.detokenizer import BytePieces, Detokenizer
from omnistage.engine.engine import Engine, TokenStream
from omnistage.engine.kv import page_bytes
from omnistage.engine.request import TokenRequest
from omnistage.engine.scheduler import Limits
from omnistage.engine.types import FinishReason, Sampling
from omnistage.models.interface import BadRequest, Content, Load, ModelInfo, PortSpec, TextPiece, TextRequest, Turn

DEFAULT_SYSTEM = (
    "You are a helpful AI assistant. Give a short, clear and friendly answer of one to three complete sentences in plain English."
)
"""Used when a conversation has no system turn: the answer is to be heard, not read. Found by trying: a model of this size follows few
words. With the marks around it these are the 32 tokens of a page, so the engine keeps it from one request to the next."""

_ROLES = ("system", "user", "assistant")
_MAX_STOP = 16
_PIECE_TOKENS = 8
_MAX_TOKEN_CHARACTERS = 8
"""A text with more characters than this for each token of the context is refused before it becomes tokens, which costs time. English has
about 4.5 to a token of this vocabulary; the longest token, a line of 80 spaces, is no measure of a text."""
_NEVER = -1e9
"""Added to a logit: above no other one, whatever a client adds."""
_CODE_REVISION = "3"
"""Part of the revision; grows whenever this code or the engine could give other tokens for equal input."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Text becomes tokens on one thread, not on a pool as large as the machine."""

_LANGUAGE = "model."
_UNUSED = ("audio_tower.", "visual.")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class SmolThinker:
    """Implements `ThinkerModel`. Build it with `from_directory`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, info: ModelInfo, context: int) -> None:
        self._engine, self._tokenizer, self._info, self._context = engine, tokenizer, info, context
        # Text of a request never becomes a special token: a user cannot end their own turn.
        tokenizer.encode_special_tokens = True
        self._start, self._end = (_special(tokenizer, name) for name in ("<|im_start|>", "<|im_end|>"))
        special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        self._newline, self._opening = self._encode("\n"), self._encode("assistant\n")
        self._piece = BytePieces(tokenizer.id_to_token, special)
        self._unsayable = frozenset(special)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        dtype: str = "bfloat16",
        threads: int = 1,
        max_sessions: int = 64,
        kv_bytes: int = 512 << 20,
        poison: bool = False,
    ) -> SmolThinker:
        """Load from a folder that `convert_thinker` wrote.

        dtype: bfloat16 or float32. threads: torch threads of this process. kv_bytes: size of the KV cache, at least one full context;
        memory is used as it is touched. poison: see `Engine`. Raises ValueError for missing, unknown or ill-shaped weights.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        torch.set_num_threads(threads)
        config = _read_config(directory)
        weights = _WeightFile(directory / "model.safetensors", _DTYPES[dtype])
        decoder = PackedDecoder(config, weights)
        if unread := weights.unread():
            raise ValueError(f"{directory} has weights that this model does not: {', '.join(unread[:8])}")
        pages = kv_bytes // page_bytes(decoder.spec)
        # A replica that takes another one's place has up to twice its sessions: all of them may wait at once.
        limits = Limits(max_sequences=max_sessions, max_waiting=2 * max_sessions)
        engine = Engine(decoder, pages=pages, limits=limits, poison=poison)
        info = ModelInfo(
            name="smollm2-135m-instruct",
            revision=_revision(directory, dtype),
            accepts=(),
            produces=(PortSpec(name="text", content=Content.TEXT, compact=True),),
            max_sessions=max_sessions,
        )
        return cls(engine, Tokenizer.from_file(str(directory / "tokenizer.json")), info, config.context)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def threads(self) -> Sequence[Activity]:
        return (self._engine.activity,)

    def load(self) -> Load:
        stats = self._engine.stats()
        return Load(queued=stats.waiting, kv_pages_used=stats.pages_used, kv_pages_total=stats.pages_total)

    async def warm_up(self) -> None:
        """Answer one short question: compiles nothing, but touches every weight and keeps the pages of the default system prompt."""
        request = TextRequest(turns=(Turn("user", "Hello!"),), seed=0, max_tokens=4)
        async with aclosing(self.generate(request)) as pieces:
            async for _ in pieces:
                pass

    async def close(self) -> None:
        await self._engine.close()

    async def prepare(self, request: TextRequest) -> TextRequest:
        """See ThinkerModel.prepare. Text is counted before anything is done with it, and becomes tokens on a thread."""
        if not request.turns and not request.verbatim:
            raise BadRequest("thinker.messages", "give at least one message")
        for turn in request.turns:
            if turn.role not in _ROLES:
                raise BadRequest("thinker.messages", f"the role {turn.role!r} is unknown, use one of {', '.join(_ROLES)}")
        if request.max_tokens < 1:
            raise BadRequest("thinker.max_tokens", "ask for at least 1 token")
        if not 0 <= request.min_tokens <= request.max_tokens:
            raise BadRequest("thinker.min_tokens", f"must be between 0 and max_tokens, {request.max_tokens}")
        if len(request.stop) > _MAX_STOP or not all(request.stop):
            raise BadRequest("thinker.stop", f"give at most {_MAX_STOP} strings, none of them empty")
        vocabulary = self._tokenizer.get_vocab_size()
        if not all(0 <= token_id < vocabulary for token_id in request.sampling.logit_bias):
            raise BadRequest("thinker.sampling.logit_bias", f"token ids must be below {vocabulary}")
        if not all(0 <= token_id < vocabulary for token_id in request.history):
            raise BadRequest("resume.history", f"token ids must be below {vocabulary}")
        if not self._unsayable.isdisjoint(request.history):
            raise BadRequest("resume.history", "special tokens are in no answer")
        self._check_characters("thinker.verbatim", len(request.verbatim))
        self._check_characters("thinker.messages", sum(len(turn.text) for turn in request.turns))
        return await asyncio.to_thread(self._tokenized, request)

    def _check_characters(self, field: str, count: int) -> None:
        most = self._context * _MAX_TOKEN_CHARACTERS
        if count > most:
            raise BadRequest(field, f"shorten the text: it has {count} characters, the model takes at most {most}")

    def _tokenized(self, request: TextRequest) -> TextRequest:
        """The request with its tokens. Raises BadRequest for what only they tell."""
        if request.verbatim:
            ids = self._encode(request.verbatim)
            if request.history != ids[: len(request.history)]:
                raise BadRequest("resume.history", "the tokens are not those of thinker.verbatim")
        else:
            ids = self.prompt(request.turns)
            self._check_unfinished(request, ids)
        return replace(request, token_ids=ids)

    def _check_unfinished(self, request: TextRequest, prompt: Sequence[int]) -> None:
        """An answer that has ended cannot go on; whoever has its last token also has its finish reason."""
        if request.finished is not None:
            return
        if request.history and len(request.history) >= self._max_tokens(request, prompt):
            raise BadRequest("resume.history", f"the answer ended before or with its {len(request.history)} tokens, by its length")
        if request.stop and self._detokenizer(request).stopped:
            raise BadRequest("resume.history", "the answer ended in its history, with a stop string")

    def _sampling(self, request: TextRequest) -> Sampling:
        """Special tokens are never drawn but for the end: one in the history of an answer would open another turn in it."""
        bias = {**request.sampling.logit_bias, **dict.fromkeys(self._unsayable - {self._end}, _NEVER)}
        return replace(request.sampling, logit_bias=bias)

    def _max_tokens(self, request: TextRequest, prompt: Sequence[int]) -> int:
        return min(request.max_tokens, self._context - len(prompt))

    def _detokenizer(self, request: TextRequest) -> Detokenizer:
        """One that has seen the history, and holds back what was held back after it."""
        detokenizer = Detokenizer(self._piece, request.stop)
        for token_id in request.history:
            detokenizer.push(token_id)
        return detokenizer

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat form (ChatML), open for the assistant's answer. Raises BadRequest if it is too
        long."""
        if not turns or turns[0].role != "system":
            turns = (Turn("system", DEFAULT_SYSTEM), *turns)
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

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        """Yield pieces as they are ready. At most `scheduler.MAX_UNREAD` tokens are made ahead of the reader. The token that ends the
        text is not among the ids; a stop string's tokens are, its text is not."""
        if not request.token_ids:
            request = await self.prepare(request)
        if request.finished is not None:
            yield TextPiece("", (), finish_reason=request.finished)
            return
        pieces = self._say(request) if request.verbatim else self._think(request)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _say(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        ids = request.token_ids
        detokenizer = self._detokenizer(replace(request, stop=()))
        for first in range(len(request.history), len(ids), _PIECE_TOKENS):
            part = ids[first : first + _PIECE_TOKENS]
            yield TextPiece("".join(map(detokenizer.push, part)), tuple(part))
        yield TextPiece(detokenizer.finish(), (), finish_reason=FinishReason.STOP)

    async def _think(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        stream = self._engine.submit(
            TokenRequest(
                prompt=request.token_ids,
                seed=request.seed,
                max_tokens=self._max_tokens(request, request.token_ids),
                sampling=self._sampling(request),
                min_tokens=request.min_tokens,
                end_ids=frozenset({self._end}),
                ignore_end=request.ignore_eos,
                logprobs=request.logprobs,
                history=request.history,
            )
        )
        async with aclosing(stream):
            async for piece in self._pieces(stream, self._detokenizer(request)):
                yield piece

    async def _pieces(self, stream: TokenStream, detokenizer: Detokenizer) -> AsyncGenerator[TextPiece, None]:
        finish_reason: FinishReason | None = None
        while finish_reason is None:
            text, ids, logprobs, queued_s = "", [], [], 0.0
            for event in await stream.take():
                queued_s += event.queued_s
                finish_reason = event.finish_reason
                if event.token_id is not None:
                    ids.append(event.token_id)
                    logprobs += [] if event.logprob is None else [event.logprob]
                    text += detokenizer.push(event.token_id)
                if finish_reason is not None:
                    text += detokenizer.finish()
                if detokenizer.stopped:
                    finish_reason = FinishReason.STOP
                    break
            yield TextPiece(text, tuple(ids), tuple(logprobs), finish_reason=finish_reason, queued_s=queued_s)


class _WeightFile:
    """The language weights of a checkpoint by name, in one dtype."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._file = safe_open(path, framework="pt")
        self._dtype = dtype
        self._names = set(self._file.keys())  # type: ignore[no-untyped-call]
        self._asked: set[str] = set()

    def __call__(self, name: str) -> torch.Tensor | None:
        full = name if name == "lm_head.weight" else _LANGUAGE + name
        self._asked.add(full)
        if full not in self._names:
            return None
        tensor: torch.Tensor = self._file.get_tensor(full)  # type: ignore[no-untyped-call]
        return tensor.to(self._dtype)

    def unread(self) -> list[str]:
        """Weights that nobody asked for, those of the unused encoders aside."""
        return sorted(name for name in self._names - self._asked if not name.startswith(_UNUSED))


def _read_config(directory: Path) -> DecoderConfig:
    text = json.loads((directory / "config.json").read_text(encoding="utf-8"))["text_config"]
    return DecoderConfig(
        layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        ffn_size=text["intermediate_size"],
        query_heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        vocab_size=text["vocab_size"],
        context=text["max_position_embeddings"],
        norm_eps=text["rms_norm_eps"],
        rope_theta=text["rope_parameters"]["rope_theta"],
    )


def _revision(directory: Path, dtype: str) -> str:
    """Twelve hex digits of everything that a token can depend on: files, dtype, code, and the library and CPU that multiply."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(f"{dtype} {_CODE_REVISION} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    return digest.hexdigest()[:12]


def _special(tokenizer: Tokenizer, name: str) -> int:
    token_id: int | None = tokenizer.token_to_id(name)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {name!r}")
    return token_id
