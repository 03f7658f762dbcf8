"""A Talker of Qwen3-Omni with random weights, and what Transformers says with the same: by `generate`, and by a loop over its layers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeTalkerForConditionalGeneration,
    _get_feat_extract_output_lengths,
)

from omnistage.models.interface import TensorRows
from omnistage.models.tiny.qwen3_omni import RESERVED, TALKER, code2wav_config, part_weights, talker_config

PENALTY = 1.05


@dataclass(frozen=True, slots=True)
class GivenRows:
    """rows: up to the first token of the answer; behind: what follows it; pad: what follows that for ever: [1, n, hidden] each. places: of
    the rows, [3, 1, n]."""

    rows: torch.Tensor
    behind: torch.Tensor
    pad: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class SpokenFrames:
    """frames: [n, groups]. logprobs: of the first codes, [n, items]. gaps: by how much each frame was better than the next best one, in
    logits: the least of its codes."""

    frames: list[tuple[int, ...]]
    logprobs: torch.Tensor
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class RowsOfUsers:
    """The rows of the users' turns: hidden rows of the Thinker and its embeddings, [1, n, row_size], and which of them belong to media."""

    hidden: torch.Tensor
    embedded: torch.Tensor
    media: torch.Tensor


class TalkerLoop:
    """talker: a Qwen3OmniMoeTalkerForConditionalGeneration."""

    talker: Any

    def given(
        self, model: Any, heard: RowsOfUsers, answer: torch.Tensor, special: torch.Tensor, voice: str, places: torch.Tensor
    ) -> GivenRows:
        """By the methods of Transformers' whole model. model: what these ask of themselves. answer, special: embeddings of the Thinker, of
        what opens the answer and its tokens, and of what begins, ends and fills up text."""
        whole: Any = Qwen3OmniMoeForConditionalGeneration
        speaker = self.talker.config.speaker_id[voice]
        with torch.inference_mode():
            bos, eos, pad = self.talker.text_projection(special).chunk(3, dim=1)
            user = whole._get_talker_user_parts(model, 0, heard.media.shape[1], heard.media, heard.hidden, heard.embedded)
            begun, _, behind = whole._get_talker_assistant_parts(model, 0, answer.shape[1], speaker, answer, pad, bos, eos)
        return GivenRows(torch.cat((user, begun), 1), behind, pad, places)

    @property
    def end(self) -> int:
        item: int = self.talker.config.codec_eos_token_id
        return item

    @property
    def silent(self) -> list[int]:
        size = self.talker.config.text_config.vocab_size
        return [item for item in range(size - RESERVED, size) if item != self.end]

    def said(self, given: GivenRows, count: int) -> SpokenFrames:
        """So many greedy frames, unless speech ends before. Every step computes all rows again."""
        talker, said, logprobs = self.talker, SpokenFrames([], torch.zeros(0), []), list[torch.Tensor]()
        x, places, penalty = given.rows, given.places, RepetitionPenaltyLogitsProcessor(PENALTY)
        banned, first = self.silent, torch.zeros(1, 0, dtype=torch.int64)
        while len(said.frames) < count:
            with torch.inference_mode():
                hidden = talker.model(inputs_embeds=x, position_ids=places).last_hidden_state[:, -1:]
                logits = talker.codec_head(hidden[:, -1]).float()
            scores = penalty(first, logits.clone())[0]
            scores[banned] = -torch.inf
            code = int(scores.argmax())
            if code == self.end:
                break
            logprobs.append(logits[0].log_softmax(-1))
            frame, row, gap = self._frame(hidden, code)
            best, second = scores.topk(2).values.tolist()
            said.frames.append(frame)
            said.gaps.append(min(best - second, gap))
            first = torch.cat((first, torch.tensor([[code]])), 1)
            step = len(said.frames) - 1
            x = torch.cat((x, row + (given.behind[:, step : step + 1] if step < given.behind.shape[1] else given.pad)), 1)
            places = torch.cat((places, places.max().expand(3, 1, 1) + 1), 2)
        return replace(said, logprobs=torch.stack(logprobs)) if logprobs else said

    def _frame(self, hidden: torch.Tensor, code: int) -> tuple[tuple[int, ...], torch.Tensor, float]:
        """All codes of a frame, the sum of their embeddings, and the least gap."""
        predictor, embedded, codes, gaps = (
            self.talker.code_predictor,
            [self.talker.get_input_embeddings()(torch.tensor([[code]]))],
            [code],
            [],
        )
        with torch.inference_mode():
            for codebook in range(self.talker.config.num_code_groups - 1):
                logits = self.frame_logits(hidden, embedded, codebook)
                best, second = logits.topk(2).values.tolist()
                gaps.append(best - second)
                codes.append(int(logits.argmax()))
                embedded.append(predictor.get_input_embeddings()[codebook](torch.tensor([[codes[-1]]])))
        return tuple(codes), torch.cat(embedded, 1).sum(1, keepdim=True), min(gaps)

    def frame_logits(self, hidden: torch.Tensor, embedded: Sequence[torch.Tensor], codebook: int) -> torch.Tensor:
        """The logits of one codebook behind the first one, counted from 0: all rows of the frame are computed again."""
        predictor = self.talker.code_predictor
        with torch.inference_mode():
            last = predictor.model(inputs_embeds=torch.cat([hidden, *embedded], 1)).last_hidden_state[0, -1]
            logits: torch.Tensor = predictor.lm_head[codebook](last)
        return logits


TOKENS = 90
"""The number of the Thinker's tokens."""

TTS = {"tts_bos_token_id": 80, "tts_eos_token_id": 81, "tts_pad_token_id": 82}
IDS = {"audio_token_id": 83, "image_token_id": 84, "video_token_id": 85, "vision_start_token_id": 86, "audio_start_token_id": 87}
CHAT = (88, 89, 79)
"""The tokens at the beginning of an answer."""

OTHER: Mapping[str, Any] = {
    "text": {"num_hidden_layers": 3, "hidden_size": 72, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 20},
    "experts": {"intermediate_size": 100, "num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 52},
    "predictor": {"num_hidden_layers": 1, "intermediate_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 48},
    "shared_expert": 24,
    "codes": 70,
    "groups": 5,
}
"""Unlike that of make-tiny in every size."""

SIZES = {"tiny": TALKER, "other": OTHER}
ROW_SIZE = {"tiny": 64, "other": 110}


def values(shapes: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random weights of those shapes whose codes are worth comparing: with sharp attention, places matter."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, like in shapes.items():
        drawn = torch.randn(like.shape, generator=generator)
        if "norm" in name:
            drawn = (2.5 if "q_norm" in name or "k_norm" in name else 1.0) + 0.1 * drawn
        elif name.endswith("bias"):
            drawn *= 0.3
        elif "embedding" not in name:
            drawn *= (3.0 if "head" in name else 1.3) * like.shape[-1] ** -0.5
        made[name] = drawn
    return made


@dataclass(frozen=True, slots=True)
class TalkerConversation:
    """A conversation as a Talker sees it. ids: of the rows of the users' turns. media: what `get_rope_index` needs to know of media. reply:
    tokens of the answer, without the last one. hidden: [n, row_size], of which rows of media are taken."""

    ids: list[int]
    media: dict[str, Any]
    reply: list[int]
    hidden: torch.Tensor
    voice: str


class TalkerReference(TalkerLoop):
    """name: of a size in SIZES."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        """folder: where its checkpoint is written, in the published layout."""
        self.size, self.row_size, self.folder = SIZES[name], ROW_SIZE[name], folder
        self.config = talker_config(self.size, self.row_size, 1, IDS)
        self.talker: Any = Qwen3OmniMoeTalkerForConditionalGeneration(Qwen3OmniMoeTalkerConfig(**self.config)).eval()
        weights = values(self.talker.state_dict(), seed)
        weights["codec_head.weight"][self.config["codec_eos_token_id"]] *= 0.1  # Else one speech of a few would end at once.
        self.talker.load_state_dict(weights)
        self.embedding = torch.randn(TOKENS, self.row_size, generator=torch.Generator().manual_seed(seed + 1))
        self.whole = {
            "model_type": "qwen3_omni_moe",
            "enable_audio_output": True,
            "thinker_config": {"text_config": {"hidden_size": self.row_size}},
            "talker_config": self.config,
            "code2wav_config": code2wav_config(self.size["groups"], self.size["codes"]),
            **TTS,
        }
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.whole))
        self.save(self.published())

    def published(self) -> dict[str, torch.Tensor]:
        """The Talker's weights by their published names."""
        return part_weights({"talker_config": self.config}, {f"talker.{name}": value for name, value in self.talker.state_dict().items()})

    def save(self, weights: Mapping[str, torch.Tensor], folder: Path | None = None, text: str = "thinker.model.") -> None:
        """As the weights of the checkpoint, beside what there is of the Thinker. text: how names of its language model begin."""
        parts = {**weights, f"{text}embed_tokens.weight": self.embedding, "thinker.lm_head.weight": self.embedding[:2]}
        tensors = {name: value.contiguous().clone() for name, value in parts.items()}
        save_file(tensors, (folder or self.folder) / "model.safetensors", {"format": "pt"})

    def asked(self, seed: int, *, picture: bool = False, sound: bool = False, tokens: int = 12, words: int = 20) -> TalkerConversation:
        """A question of random words, a picture or a sound, and a random answer of so many tokens."""
        source = random.Random(seed)
        ids, media = [source.randrange(70) for _ in range(words)], dict[str, Any]()
        if picture:
            rows, columns = source.sample(range(2, 6), 2)
            media["image_grid_thw"] = torch.tensor([[1, 2 * rows, 2 * columns]])
            ids += [IDS["vision_start_token_id"], *[IDS["image_token_id"]] * (rows * columns), 71]
        if sound:
            frames = source.randrange(20, 400)
            media["audio_feature_lengths"] = torch.tensor([frames])
            ids += [IDS["audio_start_token_id"], *[IDS["audio_token_id"]] * _sound_rows(frames), 72]
        ids += [source.randrange(70) for _ in range(source.randrange(3, 9))]
        hidden = torch.randn(len(ids), self.row_size, generator=torch.Generator().manual_seed(seed))
        voice = source.choice(sorted(self.config["speaker_id"]))
        return TalkerConversation(ids, media, [source.randrange(70) for _ in range(tokens)], hidden, voice)

    def rows(self, asked: TalkerConversation) -> list[TensorRows]:
        embedded = self.embedding[[*asked.ids, *CHAT]]
        is_medium = np.isin([*asked.ids, *CHAT], [IDS[f"{kind}_token_id"] for kind in ("audio", "image", "video")])
        padded = torch.cat((asked.hidden, torch.zeros(len(CHAT), self.row_size)))
        prompt = torch.where(torch.from_numpy(is_medium)[:, None], padded, embedded)
        places = self.positions(asked)[:, 0, : len(prompt)].T.numpy()
        kinds = np.concatenate((places, is_medium[:, None]), axis=1)
        return [
            TensorRows("places", np.ascontiguousarray(kinds, np.int32), last=True),
            TensorRows("prompt", prompt.numpy(), last=True),
            TensorRows("hidden", self.embedding[asked.reply].numpy(), last=True),
        ]

    def positions(self, asked: TalkerConversation) -> torch.Tensor:
        """The positions of all rows up to the first token of the answer, [3, 1, rows]."""
        ids = torch.tensor([[*asked.ids, *[TTS["tts_pad_token_id"]] * 9]])
        if not asked.media:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        media = asked.media
        grids, lengths = media.get("image_grid_thw"), media.get("audio_feature_lengths")
        places: torch.Tensor = self.talker.get_rope_index(ids, grids, None, torch.ones_like(ids), False, lengths, None)[0]
        return places

    def given_to(self, asked: TalkerConversation) -> GivenRows:
        values = {**self.whole, "talker_config": self.talker.config}
        model = SimpleNamespace(config=SimpleNamespace(**values), talker=self.talker)
        is_medium = torch.isin(torch.tensor([asked.ids]), torch.tensor([IDS[f"{kind}_token_id"] for kind in ("audio", "image", "video")]))
        heard = RowsOfUsers(asked.hidden[None], self.embedding[asked.ids][None], is_medium)
        special = self.embedding[[TTS[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]][None]
        return self.given(model, heard, self.embedding[[*CHAT, *asked.reply]][None], special, asked.voice, self.positions(asked))

    def generated(self, asked: TalkerConversation, count: int) -> list[tuple[int, ...]]:
        """The greedy frames of Transformers' `generate` with so many new tokens."""
        given, talker = self.given_to(asked), self.talker
        talker.rope_deltas = None
        ids = torch.tensor([[*asked.ids, *[TTS["tts_pad_token_id"]] * 9]])
        with torch.inference_mode():
            made = talker.generate(
                inputs_embeds=given.rows,
                trailing_text_hidden=given.behind,
                tts_pad_embed=given.pad,
                talker_input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=self.end,
                logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(PENALTY)]),
                suppress_tokens=self.silent,
                output_hidden_states=True,
                return_dict_in_generate=True,
                **asked.media,
            )
        return [tuple(step[-1][0].tolist()) for step in made.hidden_states if step[-1] is not None]

    def spoken(self, asked: TalkerConversation, count: int) -> SpokenFrames:
        return self.said(self.given_to(asked), count)


def _sound_rows(frames: int) -> int:
    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))
