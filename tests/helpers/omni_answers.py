"""Questions to the chain of an omni model with what Transformers answers, says and makes heard, one after the other; and whether a chain
does the same."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from helpers.ask import WholeAnswer, ask
from helpers.omni_family import STEPS, OmniFamily
from helpers.omni_reference import DISTINCT, OmniReference, Qwen3Reference, Seen, earlier, parts
from helpers.speech_reference import PENALTY, SpeechReference, WaveReference
from helpers.talker_reference import GivenRows, RowsOfUsers, TalkerLoop
from omnistage.models.conversation import Media, Turn
from omnistage.models.qwen2_5_omni import config as qwen2_5
from omnistage.models.qwen2_5_omni import thinker as qwen2_5_thinker
from omnistage.models.qwen3_omni import config as qwen3
from omnistage.models.qwen3_omni import thinker as qwen3_thinker
from omnistage.models.text.chat import ChatTokenizer
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2

TOKENS = 24

MIN_S = 1.05
"""The least length of a sound beside others: Transformers computes a shorter one of Qwen3-Omni otherwise than alone."""

CLOSE = 1e-4
"""Two codes of Qwen3-Omni whose logits are nearer to each other are almost equally good."""

CASES = {
    **{kind: (kind, False) for kind in ("text", "long text", "image", "images", "audio", "sounds", "video", "videos", "sound in video")},
    "everything": ("everything", False),
    "a sound, after a picture and an answer": ("audio", True),
    "everything, after a picture and an answer": ("everything", True),
}
"""The media of a question, and whether something was said before."""

VOICES = ("Chelsie", "Ethan")


@dataclass(frozen=True, slots=True)
class ExpectedSpeech:
    """seed: of the sound. codes: of all frames, one behind the other. rel: by how much sound may differ, of its loudest sample."""

    turns: tuple[Turn, ...]
    voice: str
    seed: int
    tokens: list[int]
    frames: int
    codes: list[int]
    sound: NDArray[np.float32]
    rel: float

    async def check(self, stub: omni_pb2_grpc.OmniServiceAsyncStub, family: OmniFamily) -> None:
        """That a chain in float32 answers so, in the voice that is asked of the Talker alone."""
        answer = await ask(stub, self._asked())
        answer.check_whole()
        assert (answer.tokens(), answer.codes()) == (self.tokens, self.codes)
        made = samples(answer)
        assert made.shape == self.sound.shape == (family.samples(len(self.codes) // family.groups),)
        assert np.abs(made - self.sound).max() <= self.rel * np.abs(self.sound).max()

    def _asked(self) -> omni_pb2.GenerateRequest:
        """Greedy."""
        thinker = stage_pb2.ThinkerParams(messages=messages(self.turns), max_tokens=TOKENS, ignore_eos=True)
        talker = stage_pb2.TalkerParams(voice=self.voice, max_frames=self.frames, sampling=stage_pb2.Sampling(repetition_penalty=PENALTY))
        code2wav = stage_pb2.Code2WavParams(profile="offline", encoding=chunk_pb2.AUDIO_ENCODING_FLOAT32)
        return omni_pb2.GenerateRequest(seed=self.seed, thinker=thinker, talker=talker, code2wav=code2wav)


class Answers(ABC):
    """The answers that Transformers gives with a checkpoint in float32."""

    reference: OmniReference
    tokenizer: ChatTokenizer
    rel: float

    @staticmethod
    @abstractmethod
    def read_tokenizer(folder: Path) -> ChatTokenizer: ...

    async def expected(self, case: str, frames: int, source: random.Random) -> ExpectedSpeech:
        """The expected answer to a question of this case that has only one answer: nothing in it was chosen from two that were almost
        equally good."""
        kind, later = CASES[case]
        never = self.tokenizer.unsayable | self.tokenizer.ends
        while True:
            turns = (*(earlier(source) if later else ()), Turn("user", parts(kind, source, MIN_S)))
            seen, voice, seed = await self.reference.read(turns), source.choice(VOICES), source.getrandbits(32)
            answer = self.reference.answer(turns, seen, TOKENS, never)
            if any(answer.close) or len(set(answer.tokens)) < DISTINCT:
                continue
            codes = self.codes(turns, seen, answer.tokens, voice, frames)
            if codes:
                sound = self.sound(codes, voice, seed)
                return ExpectedSpeech(turns, voice, seed, answer.tokens, frames, np.ravel(codes).tolist(), sound, self.rel)

    @abstractmethod
    def codes(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str, count: int) -> Sequence[Sequence[int]]:
        """So many frames, unless speech ends before; none where one was almost another."""

    @abstractmethod
    def sound(self, codes: Sequence[Sequence[int]], voice: str, seed: int) -> NDArray[np.float32]:
        """The sound of all frames at once."""


class Qwen25Answers(Answers):
    rel = 1e-4

    def __init__(self, folder: Path) -> None:
        self.reference = self.speech = SpeechReference(folder)
        self.waves = WaveReference(folder, self.speech.whole)
        self.tokenizer = self.read_tokenizer(folder)

    @staticmethod
    def read_tokenizer(folder: Path) -> ChatTokenizer:
        return qwen2_5_thinker.tokenizer_of(folder, qwen2_5.read_thinker_config(folder))

    def codes(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str, count: int) -> Sequence[Sequence[int]]:
        given = self.speech.rows(turns, seen, tokens[:-1], voice)
        spoken = self.speech.spoken(given, count)
        if any(spoken.close):
            return []
        assert self.speech.generated(given, count) == spoken.codes
        return [[code] for code in spoken.codes]

    def sound(self, codes: Sequence[Sequence[int]], voice: str, seed: int) -> NDArray[np.float32]:
        return self.waves.sound(np.array(codes, np.uint32), voice, seed, STEPS)


class Qwen3Answers(Answers):
    rel = 1e-5

    def __init__(self, folder: Path) -> None:
        self.reference = self.speech = Qwen3Speech(folder)
        self.tokenizer = self.read_tokenizer(folder)

    @staticmethod
    def read_tokenizer(folder: Path) -> ChatTokenizer:
        return qwen3_thinker.tokenizer_of(folder, qwen3.read_thinker_config(folder))

    def codes(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str, count: int) -> Sequence[Sequence[int]]:
        voice = voice.lower()
        said = self.speech.said(self.speech.given_to(turns, seen, tokens[:-1], voice), count)
        if min(said.gaps, default=0) < CLOSE:
            return []
        if can_be_generated(turns):
            never = self.tokenizer.unsayable | self.tokenizer.ends
            assert self.speech.generated(turns, seen, never, voice, TOKENS, count) == said.frames
        return said.frames

    def sound(self, codes: Sequence[Sequence[int]], voice: str, seed: int) -> NDArray[np.float32]:
        return self.speech.sound(codes)


ANSWERS: dict[str, Any] = {"qwen2_5_omni": Qwen25Answers, "qwen3_omni": Qwen3Answers}


def can_be_generated(turns: Sequence[Turn]) -> bool:
    """Whether Transformers' own `generate` speaks of it: it fails at sound beside what is seen."""
    media = [part for turn in turns for part in turn.parts if isinstance(part, Media)]
    heard = any(part.use_audio or part.media_type.startswith("audio/") for part in media)
    return not heard or not any(part.media_type.startswith(("image/", "video/")) for part in media)


def messages(turns: Sequence[Turn]) -> list[stage_pb2.Message]:
    return [
        stage_pb2.Message(
            role=turn.role,
            parts=[
                stage_pb2.Part(text=part)
                if isinstance(part, str)
                else stage_pb2.Part(media=stage_pb2.Media(data=part.data, media_type=part.media_type, use_audio=part.use_audio))
                for part in turn.parts
                if isinstance(part, str | Media)
            ],
        )
        for turn in turns
    ]


def samples(answer: WholeAnswer) -> NDArray[np.float32]:
    return np.frombuffer(b"".join(chunk.audio.data for chunk in answer.of("audio")), "<f4")


Frame = tuple[int, ...]

SPECIAL = ("bos", "eos", "pad")


class Qwen3Speech(Qwen3Reference, TalkerLoop):
    """Greedy speech of a checkpoint in float32."""

    loading: ClassVar = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.talker = self.whole.talker

    def given_to(self, turns: Sequence[Turn], seen: Seen, tokens: Sequence[int], voice: str) -> GivenRows:
        """The input of the Talker for an answer. tokens: those of the answer, but for the one that was drawn last."""
        ids, inputs = self.inputs(turns, seen)
        config, thinker = self.whole.config, self.model
        both = torch.cat([ids, torch.tensor([list(tokens)])], 1)
        with torch.inference_mode():
            made = thinker(input_ids=both, attention_mask=torch.ones_like(both), output_hidden_states=True, **inputs)
            special = thinker.get_input_embeddings()(torch.tensor([[getattr(config, f"tts_{name}_token_id") for name in SPECIAL]]))
        kept, opened = self._heard(ids[0].tolist())
        media = torch.isin(
            ids[:, kept], torch.tensor([getattr(config.thinker_config, f"{k}_token_id") for k in ("audio", "image", "video")])
        )
        embedded, hidden = made.hidden_states[0], made.hidden_states[config.talker_config.accept_hidden_layer]
        heard = RowsOfUsers(hidden[:, kept], embedded[:, kept], media)
        said = torch.cat([ids[:, kept], torch.full((1, 9), config.tts_pad_token_id)], 1)
        lengths = inputs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in inputs else None
        places, _ = thinker.get_rope_index(
            said,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(said),
            inputs.get("use_audio_in_video", False),
            lengths,
            inputs.get("video_second_per_grid"),
        )
        return self.given(self.whole, heard, embedded[:, opened:], special, voice, places)

    def _heard(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Places of what users said in a prompt, and where the answer begins."""
        config, kept, is_user, begun = self.whole.config, list[int](), False, 0
        for place, token in enumerate(ids):
            if token == config.im_start_token_id:
                is_user, begun = ids[place + 1] == config.user_token_id, place
            if is_user:
                kept.append(place)
        return kept, begun

    def generated(self, turns: Sequence[Turn], seen: Seen, never: Collection[int], voice: str, tokens: int, count: int) -> list[Frame]:
        """So many frames of Transformers' `generate`, which gives one less than it is asked for, after an answer of so many tokens."""
        ids, inputs = self.inputs(turns, seen)
        found = list[torch.Tensor]()

        def taken(codes: torch.Tensor, **how: Any) -> torch.Tensor:
            found.append(codes)
            return torch.zeros(1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.whole.code2wav, "chunked_decode", taken)
            self.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=voice,
                thinker_max_new_tokens=tokens,
                thinker_min_new_tokens=tokens,
                thinker_do_sample=False,
                thinker_suppress_tokens=list(never),
                thinker_eos_token_id=self.whole.config.im_end_token_id,
                talker_max_new_tokens=count + 1,
                talker_do_sample=False,
                talker_repetition_penalty=1.0,  # it warns of one that is given so, and does the same
                talker_logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(PENALTY)]),
                **inputs,
            )
        (codes,) = found
        return [tuple(frame) for frame in codes[0].T.tolist()]

    def sound(self, frames: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """In one forward of all frames."""
        with torch.inference_mode():
            samples: NDArray[np.float32] = self.whole.code2wav(torch.tensor(frames).T[None])[0, 0].numpy()
        return samples
