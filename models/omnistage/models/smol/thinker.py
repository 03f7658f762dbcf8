"""The default Thinker: SmolLM2-135M-Instruct on the autoregressive engine, by default on one CPU thread. A demo brain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from omnistage.engine.adapter import CPU
from omnistage.engine.decoder import EMBEDDING, DecoderConfig, PackedDecoder
from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.head import TokenHead
from omnistage.engine.kv import page_bytes
from omnistage.engine.pages import pages_for
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.results import fixed_results
from omnistage.engine.scheduler import Limits
from omnistage.models.common.answer import AnswerAssembler
from omnistage.models.common.checkpoint import read_config
from omnistage.models.common.constraint import FORMS, Grammar
from omnistage.models.common.memory import memory_told
from omnistage.models.common.requests import unfit_refused
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.thinker import MAX_SESSIONS, TEXT, EngineThinker, Tokenized, chosen_dtype, limits_of, told_settings
from omnistage.models.common.tokenizer import TextTokenizer, read_tokenizer
from omnistage.models.common.weights import Weights
from omnistage.models.devices import hardware
from omnistage.models.errors import LoadError
from omnistage.models.interface import BadRequest, Content, ModelInfo, Piece, PortSpec, TextRequest, Turn, Wanted
from omnistage.models.options import LoadOptions

DEFAULT_SYSTEM = (
    "You are a helpful AI assistant. Give a short, clear and friendly answer of one to three complete sentences in plain English."
)
"""Used when a conversation has no system turn: the answer is to be heard, not read. Found by trying: a model of this size follows few
words. With the marks around it these are the 32 tokens of a page, so the engine keeps it from one request to the next."""

KV_CACHE_BYTES = 512 << 20
_CODE_REVISION = "6"
"""Part of the revision; grows whenever this family's code could give other tokens for equal input. The engine has a number of its own."""

_LANGUAGE = "model."
_UNUSED = ("audio_tower.", "visual.")


@dataclass(frozen=True, slots=True)
class Prepared(Tokenized):
    """begun: the answer as far as its history, and what the engine is asked for; None: nothing, because the text is given, or was
    finished."""

    begun: tuple[AnswerAssembler, SequenceRequest] | None


class SmolTokenizer(TextTokenizer):
    """start, end: ids of the marks around a turn."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        """Raises BadCheckpoint, or ValueError for one without the marks."""
        tokenizer = read_tokenizer(directory)
        super().__init__(tokenizer, vocabulary)
        self.start, self.end = (_special(tokenizer, name) for name in ("<|im_start|>", "<|im_end|>"))
        self.ends = frozenset({self.end})


class SmolThinker(EngineThinker[Prepared]):
    """Implements `ThinkerModel`. Build it with `from_directory`."""

    tokenizer: SmolTokenizer

    def __init__(self, engine: Engine, tokenizer: SmolTokenizer, info: ModelInfo, context: int) -> None:
        super().__init__(engine, tokenizer, info, context)
        self._newline, self._opening = tokenizer.encode("\n"), tokenizer.encode("assistant\n")

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
        dtype, torch_dtype = chosen_dtype(dtype, device)
        torch.set_num_threads(threads)
        decoder = read_decoder(directory, torch_dtype, torch.device(device))
        pages = kv_bytes // page_bytes(decoder.spec)
        if (least := pages_for(decoder.spec.context)) > pages:
            raise LoadError(f"kv_cache_bytes {kv_bytes}: one whole context takes {least * page_bytes(decoder.spec)}")
        engine = Engine(
            decoder, TokenHead(decoder.logits), pages=pages, limits=limits or limits_of(max_sessions), kept_pages=kept_pages, poison=poison
        )
        results = computed(partial(fixed_results, decoder, decoder.logits, engine.attention.backend), threads)
        info = ModelInfo(
            name="smollm2-135m-instruct",
            revision=revision(directory, _CODE_REVISION, dtype=dtype, device=hardware(device), threads=threads, results=results),
            accepts=(),
            produces=(PortSpec(TEXT, content=Content.TEXT, compact=True),),
            max_sessions=max_sessions,
            constraints=FORMS,
            settings={**(settings or {}), **memory_told(directory), "products": decoder.products, "attention": engine.attention.reason},
        )
        return cls(engine, SmolTokenizer(directory, decoder.spec.item_ids), info, decoder.spec.context)

    @classmethod
    def loaded(cls, folder: Path | None, options: LoadOptions) -> SmolThinker:
        assert folder is not None
        sessions = options.max_sessions or MAX_SESSIONS
        limits = limits_of(sessions, options.max_batch_size, options.max_batch_tokens)
        dtype, _ = chosen_dtype(options.dtype, options.device)
        kv_bytes = options.kv_cache_bytes or KV_CACHE_BYTES
        return cls.from_directory(
            folder,
            device=options.device,
            dtype=dtype,
            threads=options.threads,
            max_sessions=sessions,
            limits=limits,
            kv_bytes=kv_bytes,
            kept_pages=None if options.keeps_prompts else 0,
            settings={**told_settings(options, dtype, limits), "kv_cache_bytes": options.told("kv_cache_bytes", kv_bytes)},
        )

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """See EngineThinker.prompt: in the model's chat form (ChatML)."""
        if not turns or turns[0].role != "system":
            turns = (Turn("system", (DEFAULT_SYSTEM,)), *turns)
        start, end = self.tokenizer.start, self.tokenizer.end
        ids: list[int] = []
        for turn in turns:
            ids += [start, *self.tokenizer.encode(f"{turn.role}\n{turn.text}"), end, *self._newline]
        return (*ids, start, *self._opening)

    def _prepared(self, request: TextRequest, prompt_ids: tuple[int, ...], said_ids: tuple[int, ...], grammar: Grammar | None) -> Prepared:
        if said_ids or request.finished is not None:
            return Prepared(request, prompt_ids, said_ids, None)
        answer = AnswerAssembler(Detokenizer(self.tokenizer.piece, request.stop), {TEXT: len(request.history)}, history=request.history)
        if answer.ended:
            raise BadRequest("resume.history", "the answer ended in its history, with a stop string")
        with unfit_refused("thinker"):
            prompt = Prompt.of_tokens(prompt_ids, request.scope.encode())
            asked = self._asked(request, grammar, prompt, min(request.max_tokens, self._context - len(prompt_ids)))
            self.engine.check(asked)
        return Prepared(request, prompt_ids, said_ids, (answer, asked))

    async def _begun(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> tuple[AnswerAssembler, SequenceRequest]:
        assert prepared.begun is not None, "a finished answer has no port that anybody could want"
        return prepared.begun


def read_decoder(directory: Path, dtype: torch.dtype, device: torch.device = CPU) -> PackedDecoder:
    """The language model of a folder that `convert_thinker` wrote. Raises BadCheckpoint, or ValueError for ill-shaped weights."""
    with Weights(directory) as weights:
        decoder = PackedDecoder(_read_config(directory), partial(_language_weight, weights, dtype, device))
        weights.check_read(ignored=_UNUSED)
    return decoder


def _language_weight(weights: Weights, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor | None:
    """A weight of the language model by the decoder's name."""
    read = weights.mapped if name == EMBEDDING else weights.read
    tensor = read(name if name == "lm_head.weight" else _LANGUAGE + name)
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
