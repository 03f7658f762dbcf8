"""Greedy frames of a Talker of Qwen3-Omni, by a loop over the layers of Transformers that computes all rows anew for each frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration

from omnistage.models.tiny.qwen3_omni import RESERVED

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
        """As Transformers suppresses them."""
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
