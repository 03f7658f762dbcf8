"""Loads a Qwen2.5-Omni Thinker from the files of a checkpoint in the published layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2_5OmniTextConfig

from omnistage.engine.decoder import LM_HEAD, DecoderParts, PackedDecoder, last_and_embedding
from omnistage.engine.devices import Group
from omnistage.engine.linear import LinearMaker
from omnistage.engine.parts import contiguous_axes, rotary
from omnistage.models.checkpoint.decoder import BIASED, HEAD_PLAN, config_of_part, weights_of_part
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.starting import Ready, ThinkerWeights, weights_below
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.audio import AudioEncoder
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.options import ThinkerOptions
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker, tokenizer_of
from omnistage.models.qwen2_5_omni.vision import VisionEncoder
from omnistage.models.ranks.team import Team, load_in_team
from omnistage.models.speech.talker import AXES, thinker_ports
from omnistage.models.text.engine_model import decoder_weights

CODE_REVISION = "4"
"""Part of the revision; raise it whenever this family's code could give other tokens for equal input. The engine has its own number."""

_PREFIX = "thinker."


def load_thinker(folder: Path, options: LoadOptions) -> Qwen2_5Thinker:
    """Load a Thinker, and start its engine and encoders. Raises LoadError, or ValueError for misshapen weights."""
    config = read_thinker_config(folder)
    config_of_part(config.text, options.tensor_parallel_size)  # Raises an error before other ranks are started in vain.
    return load_in_team(read_decoder, folder, options, partial(_load_rank, folder, config))


def _load_rank(folder: Path, config: ThinkerConfig, options: LoadOptions, team: Team | None) -> Qwen2_5Thinker:
    """The Thinker of this rank. team: the other ranks; None: there are none."""
    tokenizer, thinker_options = tokenizer_of(folder, config), ThinkerOptions.from_settings(options.family)
    produces = partial(thinker_ports, config.text.hidden_size, place=AXES)
    ready = Ready.of(folder, options, config, WEIGHTS, thinker_options, code=CODE_REVISION, produces=produces, team=team)
    return Qwen2_5Thinker(config, ready, tokenizer)


# The weights ---------------------------------------------------------------------------------------------------------------------------


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """Read a rank's part of the decoder; implements `rank.RankReader`."""
    return WEIGHTS.read_decoder(folder, options, group)


def _decoder(weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, group: Group) -> PackedDecoder:
    """The decoder, or a rank's part of it."""
    weight = decoder_weights(weights, dtype, device, prefix=f"{_PREFIX}model.", head=_PREFIX + LM_HEAD, tied=config.tied, biased=BIASED)
    parts = DecoderParts(rope=rotary(config.rope.theta, contiguous_axes(config.rope.sections)), tap=last_and_embedding)
    if group.size == 1:
        return PackedDecoder(config.text, weight, parts)
    plan = {**Qwen2_5OmniTextConfig.base_model_tp_plan, **HEAD_PLAN}
    return PackedDecoder(config_of_part(config.text, group.size), weights_of_part(weight, plan, group), parts, group)


def _check_encoders(weights: Weights, config: ThinkerConfig, group: Group) -> None:
    """Raises BadCheckpoint if the config's sizes of the encoders, with which they are built next, do not fit the weights."""
    eyes, ears = config.vision, config.audio
    merged = eyes.hidden_size * eyes.unit
    block, layer = f"{_PREFIX}visual.blocks", f"{_PREFIX}audio_tower.layers"
    for name, shape in {
        f"{_PREFIX}visual.patch_embed.proj.weight": (eyes.hidden_size, eyes.channels, eyes.frames, eyes.patch_size, eyes.patch_size),
        f"{block}.0.mlp.gate_proj.weight": (eyes.ffn_size, eyes.hidden_size),
        f"{block}.{eyes.layers - 1}.norm1.weight": (eyes.hidden_size,),
        f"{_PREFIX}visual.merger.mlp.0.weight": (merged, merged),
        f"{_PREFIX}visual.merger.mlp.2.weight": (eyes.output_size, merged),
        f"{_PREFIX}audio_tower.conv1.weight": (ears.hidden_size, ears.mel_bins, 3),
        f"{layer}.0.fc1.weight": (ears.ffn_size, ears.hidden_size),
        f"{layer}.{ears.layers - 1}.fc1.bias": (ears.ffn_size,),
        f"{_PREFIX}audio_tower.proj.weight": (ears.output_size, ears.hidden_size),
    }.items():
        weights.check_shape(name, shape)


def _encoders(
    weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, linear: LinearMaker
) -> tuple[VisionEncoder, AudioEncoder]:
    """Build the encoders of pictures and of sound."""
    # Read only so that `check_read` does not refuse it: the published code has this weight and does not use it either.
    weights.read(f"{_PREFIX}audio_tower.audio_bos_eos_token.weight")

    eyes, ears = (weights_below(weights, f"{_PREFIX}{part}.", dtype, device) for part in ("visual", "audio_tower"))
    return VisionEncoder(config.vision, eyes, linear), AudioEncoder(config.audio, ears, linear)


WEIGHTS = ThinkerWeights(
    others=("talker.", "token2wav."), read_config=read_thinker_config, check=_check_encoders, decoder=_decoder, encoders=_encoders
)
