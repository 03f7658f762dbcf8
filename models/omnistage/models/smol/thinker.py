"""The default Thinker: SmolLM2-135M-Instruct on the autoregressive engine, by default on one CPU thread. A demo brain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from omnistage.engine.adapter import CPU, TokenHead
from omnistage.engine.decoder import LM_HEAD, DecoderParts, PackedDecoder
from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.memory import page_bytes, pages_for
from omnistage.engine.parts import DecoderConfig, rotary
from omnistage.engine.request import Constraint, Prompt, SequenceRequest
from omnistage.models.checkpoint.decoder import BIASED, MIN_THETA
from omnistage.models.checkpoint.files import read_config
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.conversation import Turn
from omnistage.models.interface import BadRequest, Content, ModelInfo, Piece, PortSpec, TextRequest, Wanted
from omnistage.models.options import LoadOptions
from omnistage.models.reports import LoadError
from omnistage.models.requests import refuse_unfit
from omnistage.models.text.answer import AnswerAssembler
from omnistage.models.text.chat import TextTokenizer, read_tokenizer
from omnistage.models.text.engine_model import Started, choose_dtype, decoder_weights, limits_of
from omnistage.models.text.grammar import FORMS
from omnistage.models.text.repetition import Repetition
from omnistage.models.text.thinker import TEXT, USUAL_TOKENS, EngineThinker, Tokenized

DEFAULT_SYSTEM = (
    "You are a helpful AI assistant. Give a short, clear and friendly answer of one to three complete sentences in plain English."
)
"""The system turn of a conversation that has none, found by trying: the answer is heard, and a model of this size follows only few words.
With the marks around it, it has 32 tokens, a page of the engine, which keeps full pages from one request to the next."""

KV_CACHE_BYTES = 512 << 20
_CODE_REVISION = "7"
"""Part of the revision; grows whenever this family's code could give other tokens for equal input. The engine has a number of its own."""

_LANGUAGE = "model."
_UNUSED = ("audio_tower.", "visual.")


@dataclass(frozen=True, slots=True)
class PreparedAnswer(Tokenized):
    """An answer to be made. beginning: the answer with its history, and the request to the engine; None for verbatim or finished text."""

    beginning: tuple[AnswerAssembler, SequenceRequest] | None


class SmolTokenizer(TextTokenizer):
    """The model's tokenizer. start, end: ids of the marks before and after a turn."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        """vocabulary: how many ids the model has. Raises BadCheckpoint, or ValueError for a tokenizer without the marks."""
        tokenizer = read_tokenizer(directory)
        super().__init__(tokenizer, vocabulary)
        self.start, self.end = (_special(tokenizer, name) for name in ("<|im_start|>", "<|im_end|>"))
        self.ends = frozenset({self.end})


class SmolThinker(EngineThinker[PreparedAnswer]):
    """The default Thinker, a `ThinkerModel`. Build it with `load_thinker`. context: how many tokens prompt and answer together may have."""

    tokenizer: SmolTokenizer

    def __init__(self, engine: Engine, tokenizer: SmolTokenizer, info: ModelInfo, context: int) -> None:
        super().__init__(engine, tokenizer, info, context)
        self._newline, self._opening = tokenizer.encode("\n"), tokenizer.encode("assistant\n")

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """See EngineThinker.prompt. The ids follow the model's chat form, ChatML."""
        if not turns or turns[0].role != "system":
            turns = (Turn("system", (DEFAULT_SYSTEM,)), *turns)
        start, end = self.tokenizer.start, self.tokenizer.end
        ids: list[int] = []
        for turn in turns:
            ids += [start, *self.tokenizer.encode(f"{turn.role}\n{turn.text}"), end, *self._newline]
        return (*ids, start, *self._opening)

    def _prepared(
        self, request: TextRequest, prompt_ids: tuple[int, ...], said_ids: tuple[int, ...], grammar: Constraint | None
    ) -> PreparedAnswer:
        """See EngineThinker._prepared."""
        if said_ids or request.finished is not None:
            return PreparedAnswer(request, prompt_ids, said_ids, None)
        # A model of this size may repeat itself without end; a form or a length that was asked for is kept all the same.
        may_end = request.is_usual_length and not request.ignore_eos and request.constraint is None
        answer = AnswerAssembler(
            Detokenizer(self.tokenizer.piece, request.stop),
            {TEXT: len(request.history)},
            history=request.history,
            repetition=Repetition(request.min_tokens) if may_end else None,
        )
        if answer.ended:
            raise BadRequest("resume.history", "the answer ended in its history, with a stop string or a repetition")
        with refuse_unfit("thinker"):
            prompt = Prompt.of_tokens(prompt_ids, request.scope.encode())
            engine_request = self._make_request(request, grammar, prompt, min(request.max_tokens, self._context - len(prompt_ids)))
            self.engine.check(engine_request)
        return PreparedAnswer(request, prompt_ids, said_ids, (answer, engine_request))

    async def _begin(
        self, prepared: PreparedAnswer, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> tuple[AnswerAssembler, SequenceRequest]:
        """See EngineThinker._begin. `_prepared` has made both."""
        assert prepared.beginning is not None, "a finished answer has no port that anybody could want"
        return prepared.beginning


def load_thinker(folder: Path, options: LoadOptions | None = None, *, poison: bool = False) -> SmolThinker:
    """Load from a folder that `convert_thinker` wrote. poison: see `Engine`. Raises LoadError, also if one full context
    does not fit into the KV cache, or ValueError for weights of a wrong shape."""
    options = options or LoadOptions()
    torch.set_num_threads(options.threads)
    decoder = read_decoder(folder, choose_dtype(options), torch.device(options.device))
    kv_bytes = options.kv_cache_bytes or KV_CACHE_BYTES
    if (context_bytes := page_bytes(decoder.spec) * pages_for(decoder.spec.context)) > kv_bytes:
        raise LoadError(f"kv_cache_bytes {kv_bytes}: one whole context takes {context_bytes}")
    started = Started.of(decoder, TokenHead, folder, options, limits=limits_of(options), kv_bytes=kv_bytes, poison=poison)
    info = ModelInfo(
        name="smollm2-135m-instruct",
        revision=started.revision(_CODE_REVISION),
        accepts=(),
        produces=(PortSpec(TEXT, content=Content.TEXT, compact=True),),
        max_sessions=options.sessions,
        constraints=FORMS,
        usual_tokens=USUAL_TOKENS,
        settings={**started.settings, "kv_cache_bytes": options.describe("kv_cache_bytes", kv_bytes)},
    )
    return SmolThinker(started.engine, SmolTokenizer(folder, decoder.spec.item_ids), info, decoder.spec.context)


def read_decoder(directory: Path, dtype: torch.dtype, device: torch.device = CPU) -> PackedDecoder:
    """The language model of a folder that `convert_thinker` wrote. Raises BadCheckpoint, or ValueError for ill-shaped weights."""
    with Weights(directory, _UNUSED, computed=dtype) as weights:
        config, theta = _read_config(directory)
        weight = decoder_weights(weights, dtype, device, prefix=_LANGUAGE, head=LM_HEAD, tied=True, biased=BIASED)
        decoder = PackedDecoder(config, weight, DecoderParts(rope=rotary(theta)))
        weights.check_read()
    return decoder


def _read_config(directory: Path) -> tuple[DecoderConfig, float]:
    """Read config.json: the decoder's sizes, and theta, the base of its rotary positions."""
    text = read_config(directory, "qwen2_5_omni_thinker").section("text_config")
    sizes = DecoderConfig(
        layers=text.size("num_hidden_layers"),
        hidden_size=text.size("hidden_size"),
        ffn_size=text.size("intermediate_size"),
        query_heads=text.size("num_attention_heads"),
        kv_heads=text.size("num_key_value_heads"),
        vocab_size=text.size("vocab_size"),
        context=text.size("max_position_embeddings"),
        norm_eps=text.at_least("rms_norm_eps", 0),
    )
    return sizes, text.section("rope_parameters").at_least("rope_theta", MIN_THETA)


def _special(tokenizer: Tokenizer, name: str) -> int:
    token_id: int | None = tokenizer.token_to_id(name)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {name!r}")
    return token_id
