"""A prompt has the ids and the places that Transformers gives it, and the Talker gets what Transformers takes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.qwen3_reference import Qwen3Reference
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.encoder import Grid, MediumExtent
from omnistage.models.qwen3_omni.config import CHUNK_ROWS, MEDIUM_ROW, ThinkerConfig, convolved_length, read_thinker_config
from omnistage.models.qwen3_omni.thinker import lay_out, spoken_part, tokenizer_of
from omnistage.models.text.chat import ChatTokenizer


@pytest.fixture(scope="module")
def config(qwen3_checkpoint: Path) -> ThinkerConfig:
    return read_thinker_config(qwen3_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(qwen3_checkpoint: Path, config: ThinkerConfig) -> ChatTokenizer:
    return tokenizer_of(qwen3_checkpoint, config)


@pytest.fixture(scope="module")
def reference(qwen3_checkpoint: Path) -> Qwen3Reference:
    return Qwen3Reference(qwen3_checkpoint)


def _conversation(source: random.Random) -> tuple[Turn, ...]:
    letters = "abc XYZ,.\n\n\t09é世界🙂\r'"
    turns = []
    for _ in range(source.randint(1, 4)):
        parts = list[Part]()
        for _ in range(source.randint(1, 4)):
            if source.random() < 0.4:
                parts.append(Media(f"{source.choice(('image', 'audio', 'video'))}/x", b""))
            else:
                parts.append("".join(source.choices(letters, k=source.randint(0, 20))))
        turns.append(Turn(source.choice(("user", "assistant", "system")), tuple(parts)))
    return (*turns, Turn("user", ("What is this?",)))


def _kinds(turns: Sequence[Turn]) -> list[str]:
    return [part.media_type.partition("/")[0] for turn in turns for part in turn.parts if isinstance(part, Media)]


def test_conversations_are_written_as_transformers_does(tokenizer: ChatTokenizer, reference: Qwen3Reference, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(100):
        turns = _conversation(source)
        wanted = reference.tokenizer(reference.written(turns), add_special_tokens=False)["input_ids"]
        assert tokenizer.template.token_ids(turns, _kinds(turns)) == wanted, turns


def _extents(kinds: Sequence[str], source: random.Random, *, heard: bool) -> tuple[list[MediumExtent], list[int]]:
    """And the frames of all spectrograms."""
    extents, frames = list[MediumExtent](), list[int]()

    def sound() -> int:
        frames.append(source.randint(1, 700))
        whole, rest = divmod(frames[-1], 100)
        return whole * CHUNK_ROWS + convolved_length(rest)

    for kind in kinds:
        grid = Grid(source.randint(1, 6), 2 * source.randint(1, 6), 2 * source.randint(1, 6))
        if kind == "audio":
            extents.append(MediumExtent(sound=sound()))
        elif kind == "image":
            extents.append(MediumExtent(Grid(1, grid.height, grid.width)))
        else:
            extents.append(MediumExtent(grid, source.choice((1.0, 2.0, 7.0)), sound() if heard else 0))
    return extents, frames


def _positions(
    reference: Qwen3Reference, ids: np.ndarray, extents: Sequence[MediumExtent], frames: Sequence[int], *, heard: bool
) -> torch.Tensor:
    """The positions that Transformers gives a prompt with such media, [3, rows]; the last one is the position behind the prompt."""
    grids = {
        kind: [[each.grid.frames, each.grid.height, each.grid.width] for each in extents if each.grid and bool(each.seconds) == is_film]
        for kind, is_film in (("image", False), ("video", True))
    }
    taken = torch.from_numpy(ids)[None]
    positions, deltas = reference.model.get_rope_index(
        taken,
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
        attention_mask=torch.ones_like(taken),
        use_audio_in_video=heard and bool(grids["video"]),
        audio_seqlens=torch.tensor(frames) if frames else None,
        second_per_grids=torch.tensor([each.seconds for each in extents if each.seconds]),
    )
    return torch.cat((positions[:, 0], (deltas[0] + len(ids)).float().expand(3)[:, None]), 1)


def test_places_are_those_of_transformers(config: ThinkerConfig, tokenizer: ChatTokenizer, reference: Qwen3Reference, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(60):
        turns, heard = _conversation(source), source.random() < 0.5
        kinds = _kinds(turns)
        extents, frames = _extents(kinds, source, heard=heard)
        layout = lay_out(tokenizer.template.token_ids(turns, kinds), extents, config)
        wanted = _positions(reference, layout.ids, extents, frames, heard=heard)
        assert np.array_equal(layout.positions, wanted[:, :-1].numpy()), (turns, extents)
        assert layout.delta + len(layout) == int(wanted[0, -1])
        for extent, placed in zip(extents, layout.media, strict=True):
            rows = (extent.grid.patches // 4 if extent.grid else 0) + extent.sound
            order = np.arange(rows) if placed.order is None else placed.order
            assert sorted(order.tolist()) == list(range(rows))
            stood = layout.ids[placed.first : placed.first + rows]
            seen = order < rows - extent.sound
            assert set(stood[~seen]) <= {config.ids.audio} and set(stood[seen]) <= {config.ids.image, config.ids.video}


def test_the_talker_gets_what_users_said(config: ThinkerConfig, tokenizer: ChatTokenizer, reference: Qwen3Reference, seed: int) -> None:
    """Computed as `Qwen3OmniMoeForConditionalGeneration.generate` does, whose lines these are, but for the places: it forgets there that
    films have sound."""
    source, speech = random.Random(seed), config.speech
    assert speech is not None
    for _ in range(60):
        turns, heard = _conversation(source), source.random() < 0.5
        kinds = _kinds(turns)
        extents, frames = _extents(kinds, source, heard=heard)
        written = tokenizer.template.token_ids(turns, kinds)
        layout = lay_out(written, extents, config)
        made = spoken_part(written, extents, layout, config, speech)

        ids = torch.from_numpy(layout.ids)[None]
        places = torch.arange(ids.shape[1])[None]
        begun = torch.cummax(torch.where(ids == speech.turn, places, -1), -1).values.clamp_min(0)
        user = (ids.gather(1, (begun + 1).clamp_max(ids.shape[1] - 1)) == speech.user)[0].nonzero().flatten().tolist()
        slots = [*user, *range(int((ids[0] == speech.turn).nonzero()[-1]), ids.shape[1])]
        assert made.slots.tolist() == slots
        media = {config.ids.image, config.ids.video, config.ids.audio}
        assert (made.places[3] == MEDIUM_ROW).tolist() == [token_id in media for token_id in layout.ids[slots].tolist()]

        is_user = [part is not None and turn.role == "user" for turn in turns for part in turn.parts if isinstance(part, Media)]
        sounds = iter(frames)
        heard_of = [next(sounds) if each.sound else 0 for each in extents]
        own = [(each, frame) for each, frame, is_own in zip(extents, heard_of, is_user, strict=True) if is_own]
        wanted = _positions(reference, layout.ids[slots], [each for each, _ in own], [frame for _, frame in own if frame], heard=heard)
        assert np.array_equal(made.places[:3], wanted[:, :-1].numpy())


def test_a_time_between_two_positions_is_cut(config: ThinkerConfig) -> None:
    layout = lay_out([7, config.ids.video, 8], [MediumExtent(Grid(3, 2, 4), 0.7)], config)
    assert layout.positions[0].tolist() == [0, 1, 1, 1 + 9, 1 + 9, 1 + 18, 1 + 18, 20]
