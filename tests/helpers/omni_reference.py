"""The references for Thinkers: Transformers with a checkpoint of Qwen2.5-Omni or Qwen3-Omni, and random questions to them with media of all
kinds.

Pixels of films come from our decoder on both sides, since Transformers' own needs torchvision; those of pictures from
`Qwen2VLImageProcessorPil`, spectrograms from `WhisperFeatureExtractor`, and the prompt is written and filled in as its processor does
it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen2_5OmniForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor, _get_feat_extract_output_lengths

from helpers import media_files
from helpers.models import text_pieces
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.encoder import grid_of, patches_of
from omnistage.models.encoders.preparing import read_pictures
from omnistage.models.encoders.reader import preprocessing_of
from omnistage.models.encoders.starting import MEDIUM_ROWS
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import Sampling, TextRequest
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.results import DecodedFilm, DecodedSound
from omnistage.models.media.terms import FilmPreprocessing, SoundPreprocessing
from omnistage.models.qwen2_5_omni.config import read_thinker_config
from omnistage.models.qwen3_omni.config import read_thinker_config as read_qwen3_config

RATE_HZ = 16_000

Seen = tuple[list[DecodedFilm], list[DecodedSound]]
"""The films and sounds of a conversation."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """ids: of the prompt. tokens: of the answer. close: which of them were chosen from two that were almost equally good. expert_ties: for
    which of them an expert was chosen from two that were. logprobs: of the tokens, before penalties."""

    ids: list[int]
    tokens: list[int]
    close: list[bool]
    expert_ties: list[bool]
    logprobs: list[float]


class OmniReference:
    """Greedy answers of a checkpoint in float32."""

    marks: ClassVar = {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"}
    around: ClassVar = ("<|audio_bos|>", "<|audio_eos|>")
    """The sound of a film."""
    whole_of: ClassVar[Any] = Qwen2_5OmniForConditionalGeneration
    processor_of: ClassVar[Any] = Qwen2_5OmniProcessor
    config_of: ClassVar[Callable[[Path], Any]] = read_thinker_config
    loading: ClassVar[Mapping[str, Any]] = {}
    """The further arguments of its loading."""

    def __init__(self, folder: Path) -> None:
        # Their annotations are narrower than what they take.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._pictures: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._sounds: Any = WhisperFeatureExtractor.from_pretrained(folder)
        self._config = type(self).config_of(folder)
        self._preparation = read_pictures(folder, self._config.vision)
        self.whole: Any = self.whole_of.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **self.loading).eval()
        self.model = self.whole.thinker

    async def read(self, turns: Sequence[Turn], decoder: MediaDecoder | None = None) -> Seen:
        """The films and then the sounds of a conversation, as the model's own decoder gives them. decoder: one that runs already, for many
        conversations."""
        context = self._config.text.context
        asks = preprocessing_of(self._config, self._preparation, RATE_HZ, min(MEDIUM_ROWS["cpu"], context), context)
        used = decoder or MediaDecoder()
        films, sounds = list[DecodedFilm](), list[DecodedSound]()
        for part in _media(turns):
            ask = asks.of(_kind(part), use_audio=part.use_audio)
            if isinstance(ask, FilmPreprocessing):
                films.append(await used.film(part.data, ask))
            elif isinstance(ask, SoundPreprocessing):
                sounds.append(await used.sound(part.data, ask))
        if decoder is None:
            await used.close()
        return films, sounds

    def answer(self, turns: Sequence[Turn], seen: Seen, count: int, never: Collection[int], **how: Any) -> ExpectedAnswer:
        """So many tokens. never: ids that are not drawn. how: goes to `generate`."""
        ids, inputs = self.inputs(turns, seen)
        with torch.inference_mode(), self._routing_gaps() as gaps:
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                suppress_tokens=list(never),
                output_scores=True,
                output_logits=True,
                return_dict_in_generate=True,
                **how,
            )
        close = []
        for scores in made.scores:
            best, second = scores[0].topk(2).values.tolist()
            close.append(best - second < 1e-5 * abs(best))
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        told = [logits[0].float().log_softmax(-1)[token].item() for logits, token in zip(made.logits, tokens, strict=True)]
        expert_ties = [any(of_layer[step] < 1e-5 for of_layer in gaps) for step in range(count)]
        return ExpectedAnswer(ids[0].tolist(), tokens, close, expert_ties, told)

    @contextmanager
    def _routing_gaps(self) -> Iterator[list[list[float]]]:
        """While it is open: for each layer of experts, by how much the last of the chosen experts was likelier than the next one, for the
        last row of each call of the model."""
        routers = [layer for layer in self.model.modules() if type(layer).__name__.endswith("TopKRouter")]
        gaps: list[list[float]] = [[] for _ in routers]

        def note(of_layer: list[float], router: Any, inputs: Any, outputs: Any) -> None:
            likely = outputs[0][-1].float().softmax(-1).sort(descending=True).values.tolist()
            of_layer.append(likely[router.top_k - 1] - likely[router.top_k])

        hooks = [router.register_forward_hook(partial(note, of_layer)) for router, of_layer in zip(routers, gaps, strict=True)]
        try:
            yield gaps
        finally:
            for hook in hooks:
                hook.remove()

    def inputs(self, turns: Sequence[Turn], seen: Seen) -> tuple[torch.Tensor, dict[str, Any]]:
        """Ids of the prompt, [1, rows], and what else `generate` takes."""
        films, sounds = seen
        written = self.written(turns)
        pictures = [Image.open(io.BytesIO(part.data)) for part in _media(turns) if part.media_type.startswith("image/")]
        inputs: dict[str, Any] = {}
        if pictures:
            made = self._pictures(images=pictures, return_tensors="pt")
            inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        waves = [sound.samples for sound in _in_order(turns, films, sounds)]
        lengths = []
        if waves:
            features, mask = self.spectrograms(waves)
            inputs |= {"input_features": features, "feature_attention_mask": mask}
            lengths = [self.sound_rows(frames) for frames in mask.sum(-1).tolist()]
        if films:
            vision = self._config.vision
            grids = [grid_of(film.frames, vision) for film in films]
            inputs |= {
                "pixel_values_videos": torch.cat([patches_of(film.frames, vision, self._preparation.colours) for film in films]),
                "video_grid_thw": torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids]),
                "video_second_per_grid": torch.ones(len(films)),
                "use_audio_in_video": any(film.sound for film in films),
            }
        unit = self._config.vision.unit
        looked = iter(inputs["image_grid_thw"].prod(-1).tolist() if pictures else [])
        shown, spoken = iter(range(len(films))), iter(lengths)
        for part in _media(turns):
            kind = _kind(part)
            if kind == "image":
                rows = self.marks["image"] * (next(looked) // unit)
            elif kind == "audio":
                rows = self.marks["audio"] * next(spoken)
            else:
                place = next(shown)
                rows = (
                    self.film(inputs, place, next(spoken)) if films[place].sound else self.marks["video"] * (grids[place].patches // unit)
                )
            written = written.replace(self.marks[kind], rows.replace("<|", "<\0|"), 1)
        ids = self.tokenizer(written.replace("<\0|", "<|"), add_special_tokens=False, return_tensors="pt")["input_ids"]
        return ids, inputs

    def written(self, turns: Sequence[Turn]) -> str:
        """The conversation as the checkpoint's template writes it."""
        content = [
            {
                "role": turn.role,
                "content": [{"type": "text", "text": part} if isinstance(part, str) else _typed(part) for part in turn.parts],
            }
            for turn in turns
        ]
        text: str = self.tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
        return text

    def spectrograms(self, waves: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Spectrograms of all sounds, [sounds, bins, frames], and which frames each of them has, [sounds, frames]."""
        # Behind the longest one a second of silence is as good as the minutes that the processor adds, and takes less time.
        most = max(map(len, waves)) + RATE_HZ
        made = self._sounds(
            waves, sampling_rate=RATE_HZ, padding="max_length", max_length=most, return_attention_mask=True, return_tensors="pt"
        )
        return made["input_features"], made["attention_mask"]

    def sound_rows(self, frames: int) -> int:
        return ((frames - 1) // 2 + 1) // 2

    def film(self, inputs: dict[str, Any], place: int, sound: int) -> str:
        """The rows of a film and its sound, as Transformers' processor writes them."""
        one = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=self._config.vision.merge),
            audio_bos_token=self.around[0],
            audio_eos_token=self.around[1],
            **{f"{name}_token": self.marks[name] for name in ("audio", "video")},
        )
        one.get_chunked_index = partial(self.processor_of.get_chunked_index, one)
        chunks = {name: value for name in ("seconds_per_chunk",) if (value := getattr(self._config, name, None))}
        film = {"video_grid_thw": inputs["video_grid_thw"].numpy(), "video_second_per_grid": np.ones(len(inputs["video_grid_thw"]))}
        counts, rate = {"num_audio_tokens": {0: sound}}, self._config.position_ids_per_second
        rows: str = self.processor_of.replace_video_with_audio_token(one, film, place, counts, 0, position_id_per_seconds=rate, **chunks)
        return rows


class Qwen3Reference(OmniReference):
    """The same with a checkpoint of Qwen3-Omni."""

    marks: ClassVar = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}
    around: ClassVar = ("<|audio_start|>", "<|audio_end|>")
    whole_of: ClassVar[Any] = Qwen3OmniMoeForConditionalGeneration
    processor_of: ClassVar[Any] = Qwen3OmniMoeProcessor
    config_of = read_qwen3_config
    loading: ClassVar = {"enable_audio_output": False}

    def spectrograms(self, waves: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """See OmniReference. Each sound is prepared alone, because the processor fills sounds up to the longest one of a request."""
        made = [
            self._sounds(wave, sampling_rate=RATE_HZ, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt")
            for wave in waves
        ]
        features = pad_sequence([one["input_features"][0].T for one in made], batch_first=True).mT
        return features, pad_sequence([one["attention_mask"][0] for one in made], batch_first=True)

    def sound_rows(self, frames: int) -> int:
        return int(_get_feat_extract_output_lengths(frames, self._config.audio.chunk // 2))


def _media(turns: Sequence[Turn]) -> list[Media]:
    return [part for turn in turns for part in turn.parts if isinstance(part, Media)]


def _kind(part: Media) -> str:
    return part.media_type.partition("/")[0]


def _typed(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    assert isinstance(part, Media)
    return {"type": _kind(part)}


def _in_order(turns: Sequence[Turn], films: Sequence[DecodedFilm], sounds: Sequence[DecodedSound]) -> list[DecodedSound]:
    """All that is heard, that of films included."""
    shown, heard = iter(films), iter(sounds)
    kinds = [_kind(part) for part in _media(turns)]
    every = [next(shown).sound if kind == "video" else next(heard) for kind in kinds if kind != "image"]
    return [sound for sound in every if sound is not None]


TOKENS = 24
LOGPROB = 1e-4
"""By so much a logprob may differ from that of the reference."""

DISTINCT = 12
"""Different tokens that an answer has at least: one that repeats itself would hide what is wrong."""

KINDS = (
    *("text",) * 2,
    *("long text",) * 2,
    *("image",) * 3,
    *("audio",) * 3,
    *("long audio",) * 2,
    *("video",) * 2,
    *("sound in video",) * 3,
    *("images",) * 2,
    *("sounds",) * 2,
    *("videos",) * 1,
    *("everything",) * 2,
)


@dataclass(frozen=True, slots=True)
class ParityQuestion:
    kind: str
    request: TextRequest
    expected: ExpectedAnswer


def _words(source: random.Random, count: int) -> str:
    return " ".join("".join(source.choices("abcdefghijklmnopqrstuvwxyz é", k=source.randint(1, 8))) for _ in range(count))


def _picture(source: random.Random) -> Media:
    form = source.choice(("PNG", "WEBP", "BMP"))
    height, width = source.randint(20, 220), source.randint(20, 220)
    options = {"lossless": True} if form == "WEBP" else {}
    return Media(f"image/{form.lower()}", media_files.picture(source.getrandbits(30), height, width, form, **options))


def _sound(source: random.Random, least_s: float = 0.1, most_s: float = 5) -> Media:
    rate_hz = source.choice((8000, 16000, 44100))
    return Media("audio/wav", media_files.sound(source.getrandbits(30), source.uniform(least_s, most_s), rate_hz))


def _film(source: random.Random, *, heard: bool, least_s: float = 0.1) -> Media:
    frames = source.randint(4, 60)
    made = media_files.film(source.getrandbits(30), frames, sound_s=max(frames / 10 + source.uniform(-0.2, 1), least_s) if heard else 0.0)
    return Media("video/mp4", made, use_audio=heard)


def parts(kind: str, source: random.Random, least_s: float = 0.1) -> tuple[Part, ...]:
    """The parts of a question, with words between media. least_s: the least length of each of several sounds."""
    match kind:
        case "text":
            return (_words(source, source.randint(1, 20)),)
        case "long text":
            return (_words(source, 150),)
        case "image":
            return (_words(source, 3), _picture(source), _words(source, 3))
        case "audio":
            return (_sound(source), _words(source, 3))
        case "long audio":
            return (_sound(source, 20, 40), _words(source, 3))
        case "video":
            return (_film(source, heard=False), _words(source, 3))
        case "sound in video":
            return (_words(source, 2), _film(source, heard=True), _words(source, 2))
        case "images":
            return (_picture(source), *(_picture(source) for _ in range(source.randint(0, 1))), _words(source, 2), _picture(source))
        case "sounds":
            return (_sound(source, least_s), _words(source, 2), _sound(source, least_s))
        case "videos":
            return (_film(source, heard=False), _words(source, 2), _film(source, heard=False))
    return (_picture(source), _words(source, 1), _film(source, heard=True, least_s=least_s), _sound(source, least_s), _words(source, 4))


def earlier(source: random.Random) -> list[Turn]:
    """The turns of a conversation that went on for a while."""
    return [Turn("user", (_words(source, 3), _picture(source))), Turn("assistant", (_words(source, 4),))]


def turns(kind: str, source: random.Random, least_s: float = 0.1) -> tuple[Turn, ...]:
    """A conversation that ends with such a question."""
    asked = [Turn("user", parts(kind, source, least_s))]
    if source.random() < 0.4:
        asked = [*earlier(source), *asked]
    if source.random() < 0.4:
        asked = [Turn("system", (_words(source, 6),)), *asked]
    return tuple(asked)


async def requests(
    kinds: list[str], reference: OmniReference, never: frozenset[int], source: random.Random, least_s: float = 0.1
) -> list[ParityQuestion]:
    """Questions and their answers, each with enough different tokens. least_s: see parts."""
    made, decoder = list[ParityQuestion](), MediaDecoder()
    for number, kind in enumerate(kinds):
        penalty = 1.3 if number % 3 == 0 else 1.0
        while True:
            conversation = turns(kind, source, least_s)
            seen = await reference.read(conversation, decoder)
            expected = reference.answer(conversation, seen, TOKENS, never, repetition_penalty=penalty)
            if len(set(expected.tokens)) >= DISTINCT:
                break
        drawn = Sampling(repetition_penalty=penalty)
        asked = TextRequest(conversation, seed=0, sampling=drawn, max_tokens=TOKENS, ignore_eos=True, logprobs=True)
        made.append(ParityQuestion(kind, asked, expected))
    await decoder.close()
    return made


async def agreement(model: MediaThinker, asked: ParityQuestion) -> int:
    """Tokens at which the model went another way than the reference where two were almost equally good, or had another logprob where two
    experts were. After another token it goes on from that of the reference. All others are the same, and so are their logprobs."""
    history, ties = tuple[int, ...](), 0
    expected = asked.expected.tokens
    while len(history) < TOKENS:
        pieces = await text_pieces(model, replace(asked.request, history=history))
        made = [*history, *(token_id for piece in pieces for token_id in piece.token_ids)]
        told = [value for piece in pieces for value in piece.logprobs]
        assert len(made) == TOKENS == len(told) + len(history)
        differing = [place for place in range(TOKENS) if made[place] != expected[place]]
        alike = slice(len(history), differing[0] if differing else TOKENS)
        known, told = asked.expected.logprobs[alike], told[: alike.stop - alike.start]
        far = [alike.start + place for place, (mine, theirs) in enumerate(zip(told, known, strict=True)) if abs(mine - theirs) > LOGPROB]
        assert all(asked.expected.expert_ties[place] for place in far), f"{asked.kind}: {told} is not {known}, at {far}"
        ties += len(far)
        if not differing:
            break
        place = differing[0]
        assert asked.expected.close[place] or asked.expected.expert_ties[place], f"{asked.kind}: {made} is not {expected}, from {place} on"
        history, ties = tuple(expected[: place + 1]), ties + 1
    return ties
