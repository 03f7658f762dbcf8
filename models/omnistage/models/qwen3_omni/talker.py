"""The Talker of Qwen3-Omni (Xu et al. 2025): speaks the tokens of an answer as they come, one frame of codes after the other. `load_talker`
builds it from the files of a checkpoint in the published layout.

The rows of the conversation are the rows of the users' turns, and of the three tokens with which an answer begins. The row of a token is
its embedding in the Thinker; the row of a picture, a film or sound is a hidden row of the Thinker. After them come rows for the voice, then
the first token of the answer, with which the frames begin. The row of every further frame is the sum of the embeddings of its codes and the
next token of the answer. For one request alone it computes what `Qwen3OmniMoeForConditionalGeneration.generate` of Transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from omnistage.engine.adapter import StepRows
from omnistage.engine.decoder import EMBEDDING, LM_HEAD, DecoderParts, Enter, PackedDecoder
from omnistage.engine.linear import build_exact
from omnistage.engine.parts import Materials, activated_product, experts, head_rms_norm, interleaved_axes, rotary
from omnistage.models.checkpoint.decoder import check_experts
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.interface import BadRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.config import MEDIUM_ROW, PLACE, TEXT_ROW
from omnistage.models.qwen3_omni.family import TALKER
from omnistage.models.qwen3_omni.predictor import FrameHead, Predictor
from omnistage.models.qwen3_omni.talker_config import TalkerConfig, read_talker_config, voices_in_order
from omnistage.models.speech.talker import AXES, AddedRows, Manner, ReadyTalker, RowTalker, codes_port, embedding_of_text, positions_behind
from omnistage.models.text.engine_model import Logits, choose_dtype, decoder_weights, limits_of


class Qwen3Talker(RowTalker):
    """The Talker of Qwen3-Omni; implements `TalkerModel`. Build it with `load_talker`."""

    config: TalkerConfig

    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See RowTalker.lay_out. places: [AXES + 1, rows]; the last number of each place is the kind of its row. After the conversation
        come the rows for the voice; the last of them has `bos`, with which the codes begin. Raises BadRequest for an unknown kind."""
        config, codec = self.config, self.config.codec
        voice_items = (codec.nothink, codec.think_bos, codec.think_eos, config.speakers[voice], codec.pad, codec.bos)
        positions = positions_behind(places[:AXES], len(voice_items))
        if not np.isin(kinds := places[AXES], (TEXT_ROW, MEDIUM_ROW)).all():
            raise BadRequest("talker", f"the last number of a place is {TEXT_ROW} of text or {MEDIUM_ROW} of a medium, and no other")
        items = np.zeros((positions.shape[1], config.groups), np.int64)
        items[: -len(voice_items), 0] = np.where(kinds == TEXT_ROW, config.text_item, config.medium)
        items[-len(voice_items) :, 0] = voice_items
        return items, positions


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "2"
"""Part of the revision; raise it whenever this family's code could give other codes for equal input. The engine has its own number."""

_PREFIX = "talker."
_PREDICTOR = f"{_PREFIX}code_predictor."
_OTHERS = ("thinker.", "code2wav.")
_TEXT = f"thinker.model.{EMBEDDING}"
_PROJECTIONS = ("text_projection", "hidden_projection")


def load_talker(folder: Path, options: LoadOptions) -> Qwen3Talker:
    """Load a Talker, and start its engine. Raises LoadError, or ValueError for misshapen weights."""
    dtype, device = choose_dtype(options), torch.device(options.device)
    torch.set_num_threads(options.threads)
    context, config = TALKER.from_settings(options.family).context, read_talker_config(folder)
    with Weights(folder, _OTHERS, RENAMED, computed=dtype) as weights:
        added = _added_rows(weights, config, dtype)
        parts = read_parts(weights, config, dtype, device)
        weights.check_read()
    predictor = Predictor(parts.predictor, parts.heads, parts.first, limits_of(options).max_sequences)
    ends = frozenset({config.codec.eos})
    ready = ReadyTalker.of(
        folder,
        options,
        context,
        Manner(PLACE, codes_port(config.groups, config.rate_hz), block=1, ends=ends, silent=config.silent),
        parts.decoder,
        added,
        code=CODE_REVISION,
        head=partial(FrameHead, predictor=predictor, codes=config.groups, ends=ends),
        further_results=predictor.fixed_results,
        settings={
            "products of the code predictor": parts.predictor.products,
            "attention of the code predictor": predictor.attention.sharing_text,
        },
    )
    return Qwen3Talker(config, ready)


def _added_rows(weights: Weights, config: TalkerConfig, dtype: torch.dtype) -> AddedRows:
    """The rows that the Talker adds: embeddings of tokens, equal for all voices, because a voice is one of the items. Raises
    BadCheckpoint."""
    text = config.text
    tokens = {f"tts_{name}_token_id": token for name, token in (("bos", text.bos), ("eos", text.eos), ("pad", text.pad))}
    embedding = embedding_of_text(weights, _TEXT, tokens)
    # A row for each of the voice's items in `lay_out` except the last, whose row is the first row of the answer.
    between = embedding[[*[text.pad] * 4, text.bos]].to(dtype)
    return AddedRows(dict.fromkeys(voices_in_order(config.speakers), between), embedding[[text.eos, text.pad]].to(dtype))


# The weights ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TalkerParts:
    """The parts of a Talker. first: embeddings of the first codes of frames. predictor: decoder of the code predictor. heads: the
    predictor's heads, one for each further codebook."""

    decoder: PackedDecoder
    first: torch.Tensor
    predictor: PackedDecoder
    heads: tuple[Logits, ...]


def read_parts(weights: Weights, config: TalkerConfig, dtype: torch.dtype, device: torch.device) -> TalkerParts:
    """Read the parts. Raises BadCheckpoint for a missing weight, ValueError for a misshapen weight."""

    def need(name: str, *shape: int) -> torch.Tensor:
        weights.check_shape(name, shape)
        return weights.need(name).to(device, dtype)

    ids, width, codebooks = config.predictor.ids, config.decoder.hidden_size, range(config.groups - 1)
    codebook_embeddings = torch.cat([need(f"{_PREDICTOR}model.codec_embedding.{codebook}.weight", ids, width) for codebook in codebooks])
    heads = [need(f"{_PREDICTOR}lm_head.{codebook}.weight", ids, width) for codebook in codebooks]
    stored = decoder_weights(weights, dtype, device, prefix=f"{_PREDICTOR}model.", biased=config.predictor.biased)
    own_weights = {EMBEDDING: codebook_embeddings, LM_HEAD: heads[0]}

    def weight(name: str) -> torch.Tensor | None:
        return own_weights[name] if name in own_weights else stored(name)

    parts = DecoderParts(rope=rotary(config.predictor.rope.theta), head_norm=head_rms_norm)
    predictor = PackedDecoder(config.predictor.decoder, weight, parts)
    others, _ = build_exact(lambda linear: [linear(head) for head in heads[1:]], dtype, device)
    table = need(f"{_PREFIX}model.codec_embedding.weight", config.text_item, width)
    first = torch.cat((table, table.new_zeros(2, width)))  # The added rows are those of `text_item` and `medium`.
    return TalkerParts(_decoder(weights, config, first, codebook_embeddings), first, predictor, (predictor.logits, *others))


def _decoder(weights: Weights, config: TalkerConfig, first: torch.Tensor, codebook_embeddings: torch.Tensor) -> PackedDecoder:
    """The decoder. first: embeddings of first codes; zeros for rows without an item. codebook_embeddings: of the other codebooks' codes."""
    dtype, device = first.dtype, first.device
    for layer in range(config.decoder.layers):
        check_experts(weights, f"{_PREFIX}model.layers.{layer}.mlp", config.experts, config.decoder.hidden_size)
    stored = decoder_weights(weights, dtype, device, prefix=f"{_PREFIX}model.", head=f"{_PREFIX}codec_head.weight", biased=config.biased)

    def weight(name: str) -> torch.Tensor | None:
        if name.startswith(_PROJECTIONS):
            return weights.need(_PREFIX + name).to(device, dtype)
        return first if name == EMBEDDING else stored(name)

    parts = DecoderParts(
        entry=_entry(config, codebook_embeddings),
        rope=rotary(config.rope.theta, interleaved_axes(config.rope.sections)),
        head_norm=head_rms_norm,
        feed_forward=experts(config.experts),
    )
    return PackedDecoder(config.decoder, weight, parts)


def _entry(config: TalkerConfig, codebook_embeddings: torch.Tensor) -> Callable[[Materials], Enter]:
    """Returns a function that builds the decoder's entry: a row is the sum of the embeddings of its codes, and the projection of its row
    from the Thinker. Rows of tokens and rows of media have different projections. codebook_embeddings: see `_decoder`."""
    offsets = torch.arange(config.groups - 1, device=codebook_embeddings.device) * config.predictor.ids

    def build(materials: Materials) -> Enter:
        names, widths = ("linear_fc1", "linear_fc2"), (config.row_size, config.between, config.decoder.hidden_size)
        text, medium = (activated_product(materials, prefix, names, widths, functional.silu) for prefix in _PROJECTIONS)

        def enter(rows: StepRows, embedded: torch.Tensor) -> torch.Tensor:
            kinds, x = rows.items[:, :1], embedded
            if (is_frame := kinds < config.codes).any():
                # In order: a sum of the library may add in another order if there are more rows.
                codes = functional.embedding(rows.items[:, 1:] + offsets, codebook_embeddings)
                x = torch.where(is_frame, reduce(torch.add, codes.unbind(1), x), x)
            if rows.given_vectors is None:
                return x
            projected = text(rows.given_vectors)
            if (is_medium := kinds == config.medium).any():
                projected = torch.where(is_medium, medium(rows.given_vectors), projected)
            return x + projected

        return enter

    return build
