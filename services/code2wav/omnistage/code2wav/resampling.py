"""Sound at another sample rate than the model's, by soxr, the same bits wherever a session goes on.

A stream of soxr has a history: what it gives depends on where it began. So sound is converted in blocks at fixed places, each by a call of
its own from the samples of the block and some around it, of which only the block is kept. The bits of a sample are a function of its number
and of the model's samples, never of how those came or where a session began. Before the first sample and after the last there is what soxr
has there.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import BadRequest, Sound

Samples = NDArray[np.float32]

RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
"""Those that players, telephones and codecs take."""
FIELD = "code2wav.sample_rate_hz"
QUALITY = "VHQ"
BLOCKS_PER_S = 100
"""Blocks are this short, or a little longer: a first packet is held back by a part of one, and each costs a call."""
MIN_COMMON_HZ = 25
"""Blocks are whole numbers of samples at both rates: rates with a smaller common divisor would have blocks of more than 40 ms."""
CONTEXT_PERIODS = 128
"""Of the lower rate, on both sides of a block: with fewer the filter of VHQ is cut. Measured against the whole sound at once: -144 dB of
full scale with 128, -118 with 112, -92 with 96. It is what a first packet waits for: 8 ms at 16 kHz."""
MOST_COLUMNS = 32
"""Blocks in one call. They share its filter, which costs as much as ten of them; with hundreds the cache is too small."""


def possible_rates_hz(own_hz: int) -> tuple[int, ...]:
    """What a model with that rate can be asked for here, where perhaps soxr is not installed."""
    others = RATES_HZ if find_spec("soxr") is not None else ()
    return tuple(sorted({own_hz, *(rate_hz for rate_hz in others if math.gcd(rate_hz, own_hz) >= MIN_COMMON_HZ)}))


class Conversion:
    """From the rate of a model to another one; n samples become floor(n * rate / source + 1/2).

    block: samples of the model in a block. context: that its conversion needs on either side. output_block: samples that it becomes."""

    def __init__(self, source_hz: int, rate_hz: int) -> None:
        self.source_hz, self.rate_hz = source_hz, rate_hz
        common = math.gcd(source_hz, rate_hz)
        period = source_hz // common
        self.block = _whole(source_hz / BLOCKS_PER_S, period)
        self.context = _whole(CONTEXT_PERIODS * source_hz / min(source_hz, rate_hz), period)
        self.output_block = self.block // period * (rate_hz // common)

    @classmethod
    def asked(cls, source_hz: int, rate_hz: int) -> Conversion | None:
        """None where nothing is to be converted; rate_hz: 0 for the model's own. Raises BadRequest."""
        if rate_hz in (0, source_hz):
            return None
        possible = possible_rates_hz(source_hz)
        if rate_hz in possible:
            return cls(source_hz, rate_hz)
        if find_spec("soxr") is None:
            can = (
                f"this server converts nothing without soxr: ask for {source_hz}, or there `make wheels` in a clone, then "
                "pip install --find-links dist 'omnistage[models]'"
            )
        else:
            can = f"ask for one of {', '.join(map(str, possible))}"
        raise BadRequest(FIELD, f"{rate_hz} is not possible; {can}, or leave it out for the model's own")

    def count(self, samples: int) -> int:
        """What so many samples of the model become in all."""
        return (2 * samples * self.rate_hz + self.source_hz) // (2 * self.source_hz)

    def first_needed(self, sample: int) -> int:
        """The first sample of the model that this one, and those after it, are made from."""
        return self._begin(sample // self.output_block)

    def converted(self, held: Samples, held_first: int, first: int, until: int) -> Samples:
        """Blocks `first` to before `until`, [n, channels], from samples `held` of the model, of which the first one is `held_first`: all
        that these blocks need. Clipped to full scale, which filtered sound may exceed."""
        channels = held.shape[1]
        parts = [np.empty((0, channels), np.float32)]
        while first < until:
            begin = self._begin(first)
            # A block whose context would begin before the sound has a window of its own length.
            count = 1 if first * self.block < self.context else min(until - first, max(MOST_COLUMNS // channels, 1))
            length = (first + 1) * self.block + self.context - begin
            part = held[begin - held_first :][: length + (count - 1) * self.block]
            windows = np.lib.stride_tricks.sliding_window_view(part, length, axis=0)[:: self.block]
            made = _resampled(windows.reshape(count * channels, length).T, self.source_hz, self.rate_hz)
            before = (first * self.block - begin) * self.rate_hz // self.source_hz
            blocks = made[before : before + self.output_block].reshape(self.output_block, count, channels)
            parts.append(blocks.transpose(1, 0, 2).reshape(-1, channels))
            first += count
        return np.clip(np.concatenate(parts), -1, 1)

    def _begin(self, block: int) -> int:
        """The first sample of the model in the window of a block."""
        return max(block * self.block - self.context, 0)


def _whole(least: float, period: int) -> int:
    """The least multiple of `period` that is not below."""
    return math.ceil(least / period) * period


def _resampled(columns: Samples, source_hz: int, rate_hz: int) -> Samples:
    """Sounds of equal length, [samples, n], each as if it were alone."""
    import soxr  # Where nobody asks for another rate it need not be installed.

    made: Samples = soxr.resample(np.ascontiguousarray(columns), source_hz, rate_hz, QUALITY)
    return made


class Resampler:
    """The sound of one session, from sample `first` on: `push` what the model makes from `conversion.first_needed(first)` on, then `end`.
    Holds no more of it than a block and the context on both sides, besides what was pushed last."""

    def __init__(self, conversion: Conversion, channels: int, first: int) -> None:
        self._conversion = conversion
        self._block = first // conversion.output_block
        self._held = np.empty((0, channels), np.float32)
        self._held_first = conversion.first_needed(first)
        self._known = first - self._block * conversion.output_block

    @property
    def first_needed(self) -> int:
        """The first sample of the model that is still needed, here or by whoever goes on after what was given."""
        return self._held_first

    def push(self, samples: Samples) -> Samples:
        """Take the next samples [n, channels] of the model; gives those that are final with them."""
        self._held = np.concatenate([self._held, samples])
        received = self._held_first + len(self._held)
        return self._take((received - self._conversion.context) // self._conversion.block)

    def end(self) -> Samples:
        """The rest: nothing follows. Raises BadRequest if the sound ends before it was to begin."""
        first, conversion = self._block * self._conversion.output_block + self._known, self._conversion
        count = conversion.count(self._held_first + len(self._held))
        if count < first:
            raise BadRequest(
                "resume.positions", f"the sound has {count} samples at {conversion.rate_hz} Hz: it cannot go on at sample {first}"
            )
        after = np.zeros((conversion.context + conversion.block, self._held.shape[1]), np.float32)
        self._held = np.concatenate([self._held, after])
        return self._take(-(-count // conversion.output_block))[: count - first]

    def _take(self, until: int) -> Samples:
        """Blocks to before `until`, without what was known before."""
        if until <= self._block:
            return self._held[:0]
        made = self._conversion.converted(self._held, self._held_first, self._block, until)[self._known :]
        self._known, self._block = 0, until
        needed = self._conversion.first_needed(until * self._conversion.output_block)
        self._held, self._held_first = self._held[needed - self._held_first :].copy(), needed
        return made


async def converted(
    sounds: AsyncIterator[Sound], conversion: Conversion, channels: int, first: int, needed: int
) -> AsyncGenerator[Sound, None]:
    """What a model makes from `conversion.first_needed(first)` on, at the other rate and from sample `first` on. needed: the first item
    that the model needed for that. `Sound.needs` is what is needed after each, with the context that goes before it. Raises BadRequest for
    sound that ends before `first`."""
    resampler = Resampler(conversion, channels, first)
    reached, needs, told = resampler.first_needed, deque([(resampler.first_needed, needed)]), None
    async for sound in sounds:
        told = told if sound.prebuffer_s is None else sound.prebuffer_s
        reached += len(sound.samples)
        needs.append((reached, sound.needs))
        made = await asyncio.to_thread(resampler.push, sound.samples)
        while len(needs) > 1 and needs[1][0] <= resampler.first_needed:
            needs.popleft()
        yield Sound(made, needs[0][1], told)
        told = None if len(made) else told
    yield Sound(await asyncio.to_thread(resampler.end), needs[0][1], told)


async def warm_up(own_hz: int) -> None:
    """Load soxr, if it is there."""
    for rate_hz in possible_rates_hz(own_hz):
        if rate_hz != own_hz:
            await asyncio.to_thread(Resampler(Conversion(own_hz, rate_hz), 1, 0).push, np.zeros((own_hz // 10, 1), np.float32))
            return
