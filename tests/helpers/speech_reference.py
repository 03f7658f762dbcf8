"""The speech of the Talker of Qwen2.5-Omni, by two references: a loop over Transformers' layers that computes all rows anew for each code,
and Transformers' own `generate` with the mask that it drops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5OmniForConditionalGeneration, RepetitionPenaltyLogitsProcessor

from helpers.omni_reference import OmniReference, Seen
from omnistage.models.conversation import Turn
from omnistage.models.qwen2_5_omni.config import read_talker_config
from omnistage.models.qwen2_5_omni.wave.code2wav import noise

PENALTY = 1.05


@dataclass(frozen=True, slots=True)
class SpokenCodes:
    """codes: of the speech. gaps: by how much the end was less likely than each of them, in logits. close: which of them were chosen from
    two that were almost equally good."""

    codes: list[int]
    gaps: list[float]
    close: list[bool]


class SpeechReference(OmniReference):
    """Greedy speech of a checkpoint in float32. Transformers bans only one of the ids that are no codes, the one before the first code. Its
    Code2Wav would fail at the others, which are banned here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._silent = sorted(read_talker_config(folder).silent)

    def rows(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str) -> dict[str, Any]:
        """The Talker's input for an answer whose last drawn token, an end or not, is left out of `tokens`: `inputs_embeds` of the
        conversation, the voice and the first token, without codes, [1, n, width]; `reply` of the other tokens and what follows, [1, m,
        width]; `ids` of the text, and the facts about media that `get_rope_index` needs."""
        ids, inputs = self.inputs(turns, seen)
        answer = torch.tensor([list(tokens)])
        with torch.inference_mode():
            whole = torch.cat([ids, answer], 1)
            made = self.model(input_ids=whole, attention_mask=torch.ones_like(whole), output_hidden_states=True, **inputs)
        embedded = made.hidden_states[0].clone()
        config = self.whole.config.thinker_config
        media = torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id, config.audio_token_id]))
        embedded[:, : ids.shape[1]][media] = 0.0
        rows = embedded + made.hidden_states[-1]
        talker = self.whole.talker
        embed = self.model.get_input_embeddings()
        voice_token = self.whole.speaker_map[voice]["bos_token"]
        with torch.inference_mode():
            voice_row, *behind = (embed(torch.tensor([[token]])) for token in (voice_token, talker.text_eos_token, talker.text_pad_token))
        first = ids.shape[1] + 1
        grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        lengths = {"audio_feature_lengths": inputs["feature_attention_mask"].sum(-1)} if "feature_attention_mask" in inputs else {}
        films = {"video_second_per_grid": inputs["video_second_per_grid"]} if "video_second_per_grid" in inputs else {}
        return {
            "inputs_embeds": torch.cat([rows[:, : first - 1], voice_row, rows[:, first - 1 : first]], 1),
            "reply": torch.cat([rows[:, first:], *behind], 1),
            "ids": torch.cat([ids, torch.tensor([[voice_token]]), answer[:, :1]], 1),
            "media": {**grids, **lengths, **films, "use_audio_in_video": inputs.get("use_audio_in_video", False)},
        }

    def spoken(self, given: Mapping[str, Any], count: int) -> SpokenCodes:
        """So many codes, unless speech ends before. Every step computes all rows again."""
        talker = self.whole.talker
        special = talker.codec_mask_token, talker.codec_pad_token, talker.codec_bos_token
        embed, ends = talker.get_input_embeddings(), (talker.codec_pad_token, talker.codec_eos_token)
        media = dict(given["media"])
        places, delta = talker.get_rope_index(
            given["ids"],
            media.get("image_grid_thw"),
            media.get("video_grid_thw"),
            torch.ones_like(given["ids"]),
            media["use_audio_in_video"],
            media.get("audio_feature_lengths"),
            media.get("video_second_per_grid"),
        )
        x = given["inputs_embeds"].clone()
        with torch.inference_mode():
            x[:, -2] += embed(torch.tensor([special[1]]))
            x[:, -1] += embed(torch.tensor([special[2]]))
        start, reply = x.shape[1], given["reply"]
        penalty = RepetitionPenaltyLogitsProcessor(PENALTY)
        made = SpokenCodes([], [], [])
        while len(made.codes) < count:
            with torch.inference_mode():
                hidden = talker.model(inputs_embeds=talker.thinker_to_talker_proj(x), position_ids=places).last_hidden_state
                logits = talker.codec_head(hidden[:, -1]).float()
            ids = torch.tensor([[special[0]] * (start - 2) + list(special[1:]) + made.codes])
            scores = penalty(ids, logits)[0]
            scores[self._silent] = -torch.inf
            best, second = scores.topk(2).values.tolist()
            code = int(scores.argmax())
            if code in ends:
                break
            made.gaps.append(best - float(scores[talker.codec_eos_token]))
            made.close.append(best - second < 1e-5 * abs(best))
            made.codes.append(code)
            step = min(len(made.codes), reply.shape[1]) - 1
            with torch.inference_mode():
                x = torch.cat([x, embed(torch.tensor([[code]])) + reply[:, step : step + 1]], 1)
            after = torch.full((3, 1, 1), x.shape[1] - 1) + delta
            places = torch.cat([places, after.to(places.dtype)], 2)
        return made

    def generated(self, given: Mapping[str, Any], count: int) -> list[int]:
        """The codes of Transformers' `generate`, to which the mask is given back at every step: without it, it adds no special codes and
        computes no places."""
        talker = self.whole.talker
        usual = talker.prepare_inputs_for_generation

        def with_mask(input_ids: torch.Tensor, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            made = usual(input_ids, inputs_embeds=inputs_embeds, **kwargs)
            new = made["inputs_embeds"] if made.get("inputs_embeds") is not None else made["input_ids"]
            made["attention_mask"] = torch.ones(1, made["past_key_values"].get_seq_length() + new.shape[1], dtype=torch.int64)
            return made

        n = given["inputs_embeds"].shape[1]
        ids = torch.tensor([[talker.codec_mask_token] * (n - 2) + [talker.codec_pad_token, talker.codec_bos_token]])
        talker.rope_deltas = None
        talker.prepare_inputs_for_generation = with_mask
        try:
            with torch.inference_mode():
                made = talker.generate(
                    input_ids=ids,
                    input_text_ids=given["ids"],
                    thinker_reply_part=given["reply"].clone(),
                    inputs_embeds=given["inputs_embeds"].clone(),
                    suppress_tokens=self._silent,
                    eos_token_id=[talker.codec_pad_token, talker.codec_eos_token],
                    pad_token_id=talker.codec_pad_token,
                    repetition_penalty=PENALTY,
                    max_new_tokens=count,
                    do_sample=False,
                    **given["media"],
                )
        finally:
            del talker.prepare_inputs_for_generation
        codes: list[int] = made[0, n:].tolist()
        return codes[:-1] if codes and codes[-1] in (talker.codec_pad_token, talker.codec_eos_token) else codes


class WaveReference:
    """Token2Wav of a checkpoint, in float32, the whole sequence at once."""

    def __init__(self, folder: Path, whole: Any = None) -> None:
        """whole: the checkpoint, where it is loaded already."""
        whole = whole or Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.net = whole.eval().token2wav.float()
        self.voices = torch.load(folder / "spk_dict.pt", weights_only=True)

    def sound(self, codes: NDArray[np.uint32], voice: str, seed: int, steps: int = 9) -> NDArray[np.float32]:
        """[480 * codes] samples. codes: [n, 1]."""
        dit = self.net.config.dit_config
        frames = len(codes) * dit.repeats
        drawn = noise(seed, 0, -(-frames // dit.block_size), dit.block_size, dit.mel_dim)[:frames]
        values = self.voices[voice]
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "randn", lambda *shape, **how: drawn[None])
            given = torch.from_numpy(codes[:, 0].astype(np.int64))[None], values["cond"].float(), values["ref_mel"].float()
            made = self.net(*given, num_steps=steps + 1)
        samples: NDArray[np.float32] = made.numpy()
        return samples
