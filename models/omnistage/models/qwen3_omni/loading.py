"""Loads a Qwen3-Omni Thinker from the files of a checkpoint in the published layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

from omnistage.engine.decoder import EMBEDDING, LM_HEAD, DecoderParts, PackedDecoder, deepstack, embedding_or_hidden
from omnistage.engine.devices import Group
from omnistage.engine.linear import LinearMaker
from omnistage.engine.parts import experts, head_rms_norm, interleaved_axes, rotary
from omnistage.models.checkpoint.decoder import HEAD_PLAN, check_experts, config_of_part, weights_of_part
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.prompt import RENAMED
from omnistage.models.encoders.starting import Ready, ThinkerWeights, weights_below
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.audio import AudioEncoder
from omnistage.models.qwen3_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen3_omni.options import ThinkerOptions
from omnistage.models.qwen3_omni.ports import PLACE
from omnistage.models.qwen3_omni.thinker import Qwen3Thinker, tokenizer_of
from omnistage.models.qwen3_omni.vision import VisionEncoder
from omnistage.models.ranks.team import Team, load_in_team
from omnistage.models.speech.talker import thinker_ports
from omnistage.models.text.engine_model import decoder_weights

CODE_REVISION = "2"
"""Part of the revision; raise it whenever this family's code could give other tokens for equal input. The engine has its own number."""

_PREFIX = "thinker."
_OTHERS = ("talker.", "code2wav.")


def load_thinker(folder: Path, options: LoadOptions) -> Qwen3Thinker:
    """Load a Thinker, and start its engine and encoders. Raises LoadError, or ValueError for misshapen weights."""
    config = read_thinker_config(folder)
    config_of_part(config.text, options.tensor_parallel_size, config.experts.cut)  # Raises an error before other ranks are started in vain.
    return load_in_team(read_decoder, folder, options, partial(_load_rank, folder, config))


def _load_rank(folder: Path, config: ThinkerConfig, options: LoadOptions, team: Team | None) -> Qwen3Thinker:
    """The Thinker of this rank. team: the other ranks; None: there are none."""
    tokenizer, thinker_options = tokenizer_of(folder, config), ThinkerOptions.from_settings(options.family)
    produces = partial(thinker_ports, config.text.hidden_size, place=0 if config.speech is None else PLACE)
    ready = Ready.of(folder, options, config, WEIGHTS, thinker_options, code=CODE_REVISION, produces=produces, team=team)
    return Qwen3Thinker(config, ready, tokenizer, read_embedding(folder))


# The weights ---------------------------------------------------------------------------------------------------------------------------


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """Read a rank's part of the decoder; implements `rank.RankReader`."""
    return WEIGHTS.read_decoder(folder, options, group)


def read_embedding(folder: Path) -> torch.Tensor:
    """The embeddings of tokens, [tokens, hidden_size], mapped from the file; they are the rows of an answer. Raises BadCheckpoint."""
    with Weights(folder, _OTHERS, RENAMED) as weights:
        embedding = weights.mapped(f"{_PREFIX}model.{EMBEDDING}")
    if embedding is None:
        raise BadCheckpoint(f"{folder} lacks the weight {_PREFIX}model.{EMBEDDING}")
    return embedding


def _decoder(weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, group: Group) -> PackedDecoder:
    """The decoder, or a rank's part of it."""
    weight = decoder_weights(
        weights, dtype, device, prefix=f"{_PREFIX}model.", head=_PREFIX + LM_HEAD, tied=config.tied, biased=config.biased
    )
    parts = DecoderParts(
        rope=rotary(config.rope.theta, interleaved_axes(config.rope.sections)),
        head_norm=head_rms_norm,
        feed_forward=experts(config.experts),
        after=deepstack(len(config.vision.deepstack)),
        tap=None if config.speech is None else embedding_or_hidden(config.speech.layer),
    )
    if group.size == 1:
        return PackedDecoder(config.text, weight, parts)
    words = Qwen3OmniMoeTextConfig
    plan = {**words.base_model_tp_plan, **words.base_model_ep_plan, **HEAD_PLAN}  # The second plan has the styles for whole experts.
    part = config_of_part(config.text, group.size, config.experts.cut)
    return PackedDecoder(part, weights_of_part(weight, plan, group), parts, group)


def _check_shapes(weights: Weights, config: ThinkerConfig, group: Group) -> None:
    """Raises BadCheckpoint if the config's sizes of encoders and experts, with which they are built next, do not fit the weights."""
    eyes, ears, text = config.vision, config.audio, config.text
    merged = eyes.hidden_size * eyes.unit
    block, audio_layers = f"{_PREFIX}visual.blocks", f"{_PREFIX}audio_tower.layers"
    for name, shape in {
        f"{_PREFIX}visual.patch_embed.proj.weight": (eyes.hidden_size, eyes.channels, eyes.frames, eyes.patch_size, eyes.patch_size),
        f"{_PREFIX}visual.pos_embed.weight": (eyes.positions, eyes.hidden_size),
        f"{block}.0.mlp.linear_fc1.weight": (eyes.ffn_size, eyes.hidden_size),
        f"{block}.{eyes.layers - 1}.norm1.weight": (eyes.hidden_size,),
        f"{_PREFIX}visual.merger.mlp.2.weight": (eyes.output_size, merged),
        **{f"{_PREFIX}visual.merger_list.{number}.mlp.2.weight": (eyes.output_size, merged) for number in range(len(eyes.deepstack))},
        f"{_PREFIX}audio_tower.conv2d1.weight": (ears.channels, 1, 3, 3),
        f"{audio_layers}.0.fc1.weight": (ears.ffn_size, ears.hidden_size),
        f"{audio_layers}.{ears.layers - 1}.fc1.bias": (ears.ffn_size,),
        f"{_PREFIX}audio_tower.proj2.weight": (ears.output_size, ears.hidden_size),
    }.items():
        weights.check_shape(name, shape)
    for layer in range(text.layers):
        check_experts(weights, f"{_PREFIX}model.layers.{layer}.mlp", config.experts, text.hidden_size, group)


def _encoders(
    weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, linear: LinearMaker
) -> tuple[VisionEncoder, AudioEncoder]:
    """Build the encoders of pictures and of sound."""
    eyes, ears = (weights_below(weights, f"{_PREFIX}{part}.", dtype, device) for part in ("visual", "audio_tower"))
    return VisionEncoder(config.vision, eyes, linear), AudioEncoder(config.audio, ears, linear)


WEIGHTS = ThinkerWeights(others=_OTHERS, read_config=read_thinker_config, check=_check_shapes, decoder=_decoder, encoders=_encoders)
