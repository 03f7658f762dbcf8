"""The Talker of Qwen2.5-Omni (Xu et al. 2025): speaks the rows of an answer as they come, one code after the other. `load_talker` builds it
from the files of a checkpoint in the published layout.

Between the conversation and the answer it adds the row of the voice's token. A frame is one code, and a code's embedding is as wide as a
row of the Thinker. It does what `Qwen2_5OmniForConditionalGeneration.generate` of Transformers intends. Versions 5.20 to 5.23 compute
something else for a single request: they drop its mask, and with it places and special codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.decoder import EMBEDDING, DecoderParts, Enter, PackedDecoder
from omnistage.engine.parts import Materials, contiguous_axes, rotary
from omnistage.models.checkpoint.decoder import BIASED
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import TalkerConfig, read_talker_config
from omnistage.models.qwen2_5_omni.family import TALKER
from omnistage.models.qwen2_5_omni.voices import VoiceSizes, read_voices
from omnistage.models.qwen2_5_omni.wave.config import CODES_PORT
from omnistage.models.speech.talker import AXES, AddedRows, Manner, ReadyTalker, RowTalker, embedding_of_text, positions_behind
from omnistage.models.text.engine_model import choose_dtype, decoder_weights


class Qwen2_5Talker(RowTalker):
    """The Talker of Qwen2.5-Omni; implements `TalkerModel`. Build it with `load_talker`."""

    config: TalkerConfig

    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See RowTalker.lay_out. The rows of the conversation have no code. The row of the voice's token has `pad`, the row of the answer's
        first token has `bos`."""
        codec, positions = self.config.codec, positions_behind(places, 2)
        items = np.full((positions.shape[1], 1), self.config.blank_item, np.int64)
        items[-2:, 0] = codec.pad, codec.bos
        return items, positions


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "3"
"""Part of the revision; raise it whenever this family's code could give other codes for equal input. The engine has its own number."""

_PREFIX = "talker."
_OTHERS = ("thinker.", "token2wav.")
_TEXT = f"thinker.model.{EMBEDDING}"
_PROJECTION = f"{_PREFIX}thinker_to_talker_proj"


def load_talker(folder: Path, options: LoadOptions) -> Qwen2_5Talker:
    """Load a Talker, and start its engine. Raises LoadError, or ValueError for misshapen weights."""
    dtype, device = choose_dtype(options), torch.device(options.device)
    torch.set_num_threads(options.threads)
    context, config = TALKER.from_settings(options.family).context, read_talker_config(folder)
    with Weights(folder, _OTHERS, RENAMED, computed=dtype) as weights:
        tokens = {"tts_text_end_token_id": config.text_end, "tts_text_pad_token_id": config.text_pad}
        text = embedding_of_text(weights, _TEXT, tokens)
        voices = read_voices(folder, VoiceSizes(config.speaker_size, config.mel_bins, len(text)))
        added = AddedRows(
            between={name: text[[voice.token]].to(dtype) for name, voice in voices.items()},
            end_rows=text[[config.text_end, config.text_pad]].to(dtype),
        )
        decoder = _decoder(weights, config, dtype, device)
        weights.check_read()
    codec = config.codec
    ends, penalized = frozenset({codec.eos, codec.pad}), frozenset({codec.mask, codec.pad, codec.bos})
    manner = Manner(AXES, CODES_PORT, config.block, ends=ends, silent=config.silent, seen_codes=penalized)
    return Qwen2_5Talker(config, ReadyTalker.of(folder, options, context, manner, decoder, added, code=CODE_REVISION))


def _decoder(weights: Weights, config: TalkerConfig, dtype: torch.dtype, device: torch.device) -> PackedDecoder:
    """The decoder. Its embedding has one row more than in the checkpoint, of zeros, for the item `config.blank_item`."""
    stored = decoder_weights(weights, dtype, device, prefix=f"{_PREFIX}model.", head=f"{_PREFIX}codec_head.weight", biased=BIASED)

    def weight(name: str) -> torch.Tensor | None:
        tensor = stored(name)
        if name == EMBEDDING and tensor is not None:
            return torch.cat((tensor, tensor.new_zeros(1, tensor.shape[1])))
        return tensor

    def entry(materials: Materials) -> Enter:
        matrix, bias = (weights.need(f"{_PROJECTION}.{name}").to(device, dtype) for name in ("weight", "bias"))
        projection = materials.linear(matrix, bias)
        return lambda rows, embedded: projection(embedded if rows.given_vectors is None else embedded + rows.given_vectors)

    rope = rotary(config.rope.theta, contiguous_axes(config.rope.sections))
    return PackedDecoder(config.decoder, weight, DecoderParts(entry=entry, rope=rope))
