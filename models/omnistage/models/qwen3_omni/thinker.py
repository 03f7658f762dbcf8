"""The Thinker of Qwen3-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker. `load_thinker`
builds it from the files of a checkpoint in the published layout.

Its prompt is laid out as `get_rope_index` of Transformers' `Qwen3OmniMoeThinker` does; a part of the prompt goes to the Talker.
Transformers counts the time of a film in fractions; here the fraction is cut off. At two frames a second, and so for all but slow and long
films, there is no fraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

from omnistage.engine.decoder import EMBEDDING, DecoderParts, PackedDecoder, deepstack, embedding_or_hidden
from omnistage.engine.devices import Group
from omnistage.engine.parts import experts, head_rms_norm, interleaved_axes, rotary
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.conversation import Turn
from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.prompt import RENAMED, PromptRows
from omnistage.models.encoders.starting import Ready, ThinkerWeights, part_of_text
from omnistage.models.encoders.thinker import Handed, MediaThinker, rows_known
from omnistage.models.interface import Array, Wanted
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.config import MEDIUM_ROW, PLACE, TEXT_ROW, SpeechSource, ThinkerConfig, read_thinker_config
from omnistage.models.qwen3_omni.encoders import AudioEncoder, VisionEncoder
from omnistage.models.qwen3_omni.family import THINKER
from omnistage.models.ranks.team import Team, load_in_team
from omnistage.models.speech.talker import PLACES, thinker_ports
from omnistage.models.text.chat import ChatTokenizer
from omnistage.models.text.engine_model import array_of
from omnistage.models.text.thinker import TEXT

END = "<|im_end|>"


class Qwen3PromptRows(PromptRows):
    """The rows of one prompt of Qwen3-Omni."""

    def film_with_sound(self, extent: MediumExtent) -> None:
        """Add the rows of a film and its sound, ordered by time; at equal times, rows of pictures stand first. The marks around the sound
        stand within the marks around the film."""
        ids = self._config.ids
        self.add(np.array([ids.audio_start]), np.full((3, 1), self.next))
        (picture_ids, picture_positions), (sound_ids, sound_positions) = self.make_picture_run(extent), self.make_sound_run(extent.sound)
        positions = np.concatenate((picture_positions, sound_positions), 1)
        order = np.argsort(positions[0], kind="stable")
        self.run(np.concatenate((picture_ids, sound_ids))[order], positions[:, order], order)
        # Either the film or the sound ends first. After that come only rows of the other one: the tail. Later positions follow the tail,
        # even if earlier rows have larger positions.
        is_sound = order >= len(picture_ids)
        tail_start = np.flatnonzero(is_sound != is_sound[-1])[-1] + 1
        self.next = int(positions[:, order[tail_start:]].max()) + 1
        self.add(np.array([ids.audio_end]), np.full((3, 1), self.next))


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """The part of a prompt that the Talker gets: the users' turns, then the ids that open the answer. slots: slots of these rows in the
    whole prompt, int64. places: places of these rows, int64 [PLACE, rows]."""

    slots: NDArray[np.int64]
    places: NDArray[np.int64]


def spoken_part(
    ids: Sequence[int],
    extents: Sequence[MediumExtent],
    prompt: PromptLayout,
    config: ThinkerConfig,
    speech: SpeechSource,
    opens: int | None = None,
) -> TalkerPrompt:
    """The part of a prompt that the Talker gets. prompt: all of it, which `lay_out` made from `ids` and `extents`. opens: the id with which
    the prompt begins a thought, which is not spoken; None: the prompt begins no thought."""
    id_array, media_ids = np.array(ids, np.int64), [*config.ids.kinds]
    is_spoken = _is_spoken(id_array, speech, opens)
    is_medium_spoken = is_spoken[np.isin(id_array, media_ids)]
    layout = Qwen3PromptRows(config).lay_out(id_array[is_spoken].tolist(), list(compress(extents, is_medium_spoken)))
    row_kinds = np.where(np.isin(layout.ids, media_ids), MEDIUM_ROW, TEXT_ROW)
    return TalkerPrompt(np.flatnonzero(_is_spoken(prompt.ids, speech, opens)), np.concatenate((layout.positions, row_kinds[None])))


def _is_spoken(ids: NDArray[np.int64], speech: SpeechSource, opens: int | None) -> NDArray[np.bool_]:
    """For each id, whether the Talker gets its row, bool [ids]. The second id of a turn shows whose turn it is. speech, opens: as in
    `spoken_part`."""
    # The index at which the turn of each id begins.
    turn_starts = np.maximum.accumulate(np.where(ids == speech.turn, np.arange(len(ids)), 0))
    is_spoken: NDArray[np.bool_] = ids[np.minimum(turn_starts + 1, len(ids) - 1)] == speech.user
    is_spoken[turn_starts[-1] :] = True  # The last turn is the beginning of the answer.
    if opens is not None:
        is_spoken[np.flatnonzero(ids == opens)[-1] :] = False
    return is_spoken


class Qwen3Thinker(MediaThinker):
    """The Thinker of Qwen3-Omni; implements `ThinkerModel`. Build it with `load_thinker`."""

    config: ThinkerConfig
    prompt_rows = Qwen3PromptRows

    def __init__(self, ready: Ready, tokenizer: ChatTokenizer, embedding: torch.Tensor) -> None:
        """embedding: the embeddings of all tokens, [tokens, hidden_size], on the CPU. ready, tokenizer: see MediaThinker."""
        super().__init__(ready, tokenizer, partial(_row, embedding, ready.engine.spec.dtype))

    def hand_over(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent], layout: PromptLayout, ports: Wanted) -> Handed:
        """See MediaThinker.hand_over."""
        if self.config.speech is None or ports.keys() <= {TEXT}:
            return Handed()
        thinks = self.tokenizer.thinks
        opens = thinks.opens if thinks and thinks.is_open else None
        part = spoken_part(prompt_ids, extents, layout, self.config, self.config.speech, opens)
        return Handed(rows_known(PLACES, part.places.T, ports), part.slots)


def _row(embedding: torch.Tensor, dtype: torch.dtype, token_id: int) -> Array:
    """The row of a token of the answer: its embedding, [1, hidden_size]."""
    return array_of(embedding[token_id : token_id + 1].to(dtype))


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "2"
"""Part of the revision; raise it whenever this family's code could give other tokens for equal input. The engine has its own number."""


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """The tokenizer of a checkpoint. Raises BadCheckpoint, also if its template does not begin turns with the ids that the config names."""
    tokenizer = ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)
    if config.speech is not None:
        turn, user = config.speech.turn, config.speech.user
        ids = tokenizer.template.token_ids((Turn("user", ("",)),), [])
        roles = [role for mark, role in pairwise(ids) if mark == turn]  # of the question, then of the answer
        if len(roles) < 2 or roles[-2] != user or roles[-1] == user:
            fault = f"no turn of a user with 'im_start_token_id' {turn} and 'user_token_id' {user} of config.json"
            raise BadCheckpoint(f"{directory}: the chat template begins {fault}")
    return tokenizer


def load_thinker(folder: Path, options: LoadOptions) -> Qwen3Thinker:
    """Load a Thinker, and start its engine and encoders. Raises LoadError, or ValueError for misshapen weights."""
    config = read_thinker_config(folder)
    part_of_text(config, options.tensor_parallel_size)  # Raises an error before other ranks are started in vain.
    return load_in_team(read_decoder, folder, options, partial(_load_rank, folder, config))


def _load_rank(folder: Path, config: ThinkerConfig, options: LoadOptions, team: Team | None) -> Qwen3Thinker:
    """The Thinker of this rank. team: the other ranks; None: there are none."""
    tokenizer, thinker_options = tokenizer_of(folder, config), THINKER.from_settings(options.family)
    produces = partial(thinker_ports, config.text.hidden_size, place=0 if config.speech is None else PLACE)
    ready = Ready.of(folder, options, config, WEIGHTS, thinker_options, code=CODE_REVISION, produces=produces, team=team)
    return Qwen3Thinker(ready, tokenizer, read_embedding(folder))


# The weights ---------------------------------------------------------------------------------------------------------------------------


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """Read a rank's part of the decoder; implements `rank.RankReader`."""
    return WEIGHTS.read_decoder(folder, options, group)


def read_embedding(folder: Path) -> torch.Tensor:
    """The embeddings of tokens, [tokens, hidden_size], mapped from the file; they are the rows of an answer. Raises BadCheckpoint."""
    name = f"{WEIGHTS.prefix}model.{EMBEDDING}"
    with Weights(folder, WEIGHTS.others, RENAMED) as weights:
        embedding = weights.mapped(name)
    if embedding is None:
        raise BadCheckpoint(f"{folder} lacks the weight {name}")
    return embedding


def _decoder_parts(config: ThinkerConfig) -> DecoderParts:
    return DecoderParts(
        rope=rotary(config.rope.theta, interleaved_axes(config.rope.sections)),
        head_norm=head_rms_norm,
        feed_forward=experts(config.experts),
        after=deepstack(len(config.vision.deepstack)),
        tap=None if config.speech is None else embedding_or_hidden(config.speech.layer),
    )


def _shapes(config: ThinkerConfig) -> dict[str, tuple[int, ...]]:
    """See ThinkerWeights.shapes."""
    eyes, ears = config.vision, config.audio
    deepstack_shape = (eyes.output_size, eyes.hidden_size * eyes.unit)
    return {
        "visual.pos_embed.weight": (eyes.positions, eyes.hidden_size),
        "visual.blocks.0.mlp.linear_fc1.weight": (eyes.ffn_size, eyes.hidden_size),
        **{f"visual.merger_list.{number}.mlp.2.weight": deepstack_shape for number in range(len(eyes.deepstack))},
        "audio_tower.conv2d1.weight": (ears.channels, 1, 3, 3),
        "audio_tower.proj2.weight": (ears.output_size, ears.hidden_size),
    }


WEIGHTS = ThinkerWeights(
    others=("talker.", "code2wav."),
    read_config=read_thinker_config,
    shapes=_shapes,
    parts=_decoder_parts,
    # The second plan has the styles for whole experts.
    plan={**Qwen3OmniMoeTextConfig.base_model_tp_plan, **Qwen3OmniMoeTextConfig.base_model_ep_plan},
    vision=VisionEncoder,
    audio=AudioEncoder,
)
