"""The net of Qwen3-Omni's Code2Wav is that of Transformers, and the same in any chunks."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest
import torch

from helpers import lengths
from helpers.causal_waves import net_of, norms_in_float64, published_config, reference
from omnistage.models.qwen3_omni.wave.net import CausalNet, WaveState

KINDS = ("tiny", "other")


def random_codes(net: CausalNet, source: random.Random, speeches: int, frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    return torch.randint(net.config.codes, (speeches, frames, net.config.codebooks), generator=generator)


def sounded(net: CausalNet, codes: torch.Tensor, sizes: list[int], states: list[WaveState] | None = None) -> torch.Tensor:
    """In chunks of these sizes."""
    states = states or [net.start() for _ in codes]
    made = []
    with torch.inference_mode():
        for chunk in codes.split(sizes, 1):
            samples, states = net.step(chunk, states)
            made.append(samples)
    return torch.cat(made, 1)


def cut(source: random.Random, frames: int) -> list[int]:
    """Chunks of random sizes that are so many frames together."""
    sizes = list[int]()
    while sum(sizes) < frames:
        sizes.append(min(source.choice((1, 1, 2, 3, 5, 9, 17, 31)), frames - sum(sizes)))
    return sizes


def apart(made: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in parts of the loudest sample."""
    assert made.shape == expected.shape
    return float((made - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@lengths.rounds(2, 20)
def test_it_is_the_net_of_transformers(wave_folders: dict[str, Path], kind: str, seed: int, rounds: int) -> None:
    """The codes are one frame, and more frames than all layers look back."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float32)
    published = reference(wave_folders[kind], torch.float32)
    for frames in (1, *(source.randint(2, 2 * net.config.frames_before) for _ in range(rounds))):
        codes = random_codes(net, source, 1, frames)
        with torch.inference_mode():
            expected = published(codes.transpose(1, 2))[:, 0]
        assert expected.shape == (1, frames * net.config.frame_samples - net.config.missing)
        assert expected.std() > 0.01 and expected.abs().max() < 1, "neither silence nor what is cut off says much"
        assert apart(sounded(net, codes, [frames]), expected) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_it_is_the_net_of_transformers_to_the_last_digits(
    wave_folders: dict[str, Path], kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float64)
    norms_in_float64(monkeypatch)
    published = reference(wave_folders[kind], torch.float64)
    codes = random_codes(net, source, 1, source.randint(net.config.window, 60))
    with torch.inference_mode():
        expected = published(codes.transpose(1, 2))[:, 0]
    assert apart(sounded(net, codes, cut(source, codes.shape[1])), expected) <= 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
@lengths.rounds(2, 20)
def test_chunks_are_the_whole(wave_folders: dict[str, Path], dtype: torch.dtype, tolerance: float, seed: int, rounds: int) -> None:
    source = random.Random(seed)
    for number in range(rounds):
        net = net_of(wave_folders[KINDS[number % 2]], dtype)
        frames = source.randint(2, 70)
        codes = random_codes(net, source, 2, frames)
        whole = sounded(net, codes, [frames])
        for sizes in ([1] * frames, [frames - 1, 1], cut(source, frames)):
            assert apart(sounded(net, codes, sizes), whole) <= tolerance, f"{frames} frames as {sizes}"


def test_published_sizes_lose_555_samples_and_look_578_frames_back() -> None:
    """8 layers that see 71 frames of the past, and 10 of convolutions."""
    config = published_config()
    assert (config.frame_samples, config.missing, config.heard_frames, config.frames_before) == (1920, 555, 10, 578)
    assert config.frame_rate_hz == 12.5


def test_what_transformers_loses_between_its_chunks_is_not_lost(wave_folders: dict[str, Path], seed: int) -> None:
    """Its `chunked_decode`, which its `generate` calls, lacks samples at the end of every 300th frame."""
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    published = reference(wave_folders["tiny"], torch.float32)
    codes, config = random_codes(net, source, 1, 45), net.config
    with torch.inference_mode():
        lacking = published.chunked_decode(codes.transpose(1, 2), chunk_size=20, left_context_size=5)
    assert inspect.signature(published.chunked_decode).parameters["chunk_size"].default == 300
    assert lacking.shape[-1] == 45 * config.frame_samples - 3 * config.missing
    assert sounded(net, codes, [20, 20, 5]).shape[1] == 45 * config.frame_samples - config.missing


def test_a_million_frames_later_it_sounds_the_same(wave_folders: dict[str, Path], seed: int) -> None:
    """Nothing has grown. The angles of places are those of Transformers, which have few digits left there; what is heard has enough."""
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    before, late = net.config.frames_before, 1_000_000
    codes = random_codes(net, source, 1, before + 10)
    places = torch.arange(late, late + 5)[None]
    turning = reference(wave_folders["tiny"], torch.float32).pre_transformer.rotary_emb(torch.zeros(1), places)
    assert all(torch.equal(own, other) for own, other in zip(net._turned(places), turning, strict=True))
    with torch.inference_mode():
        (early, _), (made, (left,)) = (net.step(codes, [net.start(place)]) for place in (100, late))
    assert left.place == late + len(codes[0]) and left.bytes == net.start(1).bytes
    heard = before * net.config.frame_samples
    assert 0 < apart(made[:, heard:], early[:, heard:]) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_depends_on_no_frame_farther_than_is_said(wave_folders: dict[str, Path], kind: str, seed: int) -> None:
    """Another frame changes samples from its own place on, up to the frames that look back to it and no farther; the last of those are
    reached only by attention, through every layer. The convolutions alone reach as far as is said, too."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float64)
    config = net.config
    changed, frames = source.randint(1, 20), config.frames_before + 30
    codes = random_codes(net, source, 1, frames)
    other = codes.clone()
    other[0, changed] = (codes[0, changed] + 1) % config.codes
    differs = (sounded(net, codes, [frames]) != sounded(net, other, [frames]))[0].nonzero()[:, 0]
    per, missing = config.frame_samples, config.missing
    assert changed * per - missing <= differs.min() < (changed + 1) * per - missing
    assert differs.max() < (changed + 1 + config.frames_before) * per - missing


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_far_enough_before_makes_the_same(wave_folders: dict[str, Path], kind: str, seed: int) -> None:
    """With nothing of what was before, in the same chunks: to the bit. A window later it would be heard."""
    source, net = random.Random(seed), net_of(wave_folders[kind], torch.float32)
    config, size = net.config, source.randint(1, 4)
    begin = size * source.randint(1, 9)
    wanted = begin + -(-config.frames_before // size) * size
    codes = random_codes(net, source, 1, wanted + 5 * size)
    whole = sounded(net, codes, [size] * (codes.shape[1] // size))[:, wanted * config.frame_samples - config.missing :]

    def from_frame(first: int) -> torch.Tensor:
        left = codes[:, first:]
        made = sounded(net, left, [size] * (left.shape[1] // size), [net.start(first)])
        return made[:, (wanted - first) * config.frame_samples :]

    assert torch.equal(from_frame(begin), whole)
    near = wanted - config.heard_frames // size * size
    assert not torch.equal(from_frame(near), whole)


def test_what_a_step_leaves_does_not_grow_and_keeps_nobody_elses(wave_folders: dict[str, Path], seed: int) -> None:
    source, net = random.Random(seed), net_of(wave_folders["tiny"], torch.float32)
    states = [net.start() for _ in range(3)]
    sizes = set[int]()
    with torch.inference_mode():
        for _ in range(12):
            _, states = net.step(random_codes(net, source, 3, source.randint(1, 20)), states)
            sizes |= {state.bytes for state in states}
    assert sizes == {net.start(1).bytes}
    for state in states:
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (state.keys, *state.inputs))
