"""Sound at another sample rate than the model's, by soxr. A session that goes on elsewhere gives the same bits.

The output of a stream of soxr depends on where the stream began. So sound is converted in blocks at fixed places, each as a sound of its
own: soxr gets the block's samples and some samples around them, and only the block is kept. The bits of a sample depend only on its number
and on the model's samples, never on the pieces in which the model's samples came or on where a session began. Before the first sample and
after the last sample soxr uses its own padding.
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
from omnistage.stage.params import descriptor_of, rule_of
from omnistage.v1 import stage_pb2

Samples = NDArray[np.float32]

RATES_HZ = tuple(map(int, rule_of(descriptor_of(stage_pb2.Code2WavParams).fields_by_name["sample_rate_hz"]).such_as))
"""Rates that players, telephones and codecs accept."""
FIELD = "code2wav.sample_rate_hz"
QUALITY = "VHQ"
BLOCKS_PER_S = 100
"""A block lasts 1 / BLOCKS_PER_S seconds or a little more. Longer blocks would delay the first packet, and shorter ones would cost more
work."""
MIN_COMMON_HZ = 25
"""Smallest common divisor of two rates. A block is a whole number of samples at both, so with a smaller divisor it would exceed 40 ms."""
CONTEXT_PERIODS = 128
"""Periods of the lower rate on both sides of a block: fewer would cut the filter of VHQ. The error against the whole sound converted at
once was measured: -144 dB of full scale with 128, -118 with 112, -92 with 96. A first packet waits for this context: 8 ms at 16 kHz."""
MAX_COLUMNS = 32
"""Largest number of blocks in one call. They share the call's filter, which costs as much as ten blocks; hundreds of blocks would not fit
into the cache."""


def possible_rates_hz(own_hz: int) -> tuple[int, ...]:
    """Rates in Hz at which a model with the rate `own_hz` can give its sound, rising; without soxr only `own_hz`."""
    others = RATES_HZ if find_spec("soxr") is not None else ()
    return tuple(sorted({own_hz, *(rate_hz for rate_hz in others if math.gcd(rate_hz, own_hz) >= MIN_COMMON_HZ)}))


class Conversion:
    """Converts sound from the rate of a model to another rate: n samples become floor(n * rate_hz / source_hz + 1/2).

    block: samples of the model in a block. context: samples that the conversion of a block needs on either side. output_block: samples that
    a block becomes."""

    def __init__(self, source_hz: int, rate_hz: int) -> None:
        self.source_hz, self.rate_hz = source_hz, rate_hz
        common = math.gcd(source_hz, rate_hz)
        period = source_hz // common  # the fewest samples of the model that become a whole number of samples
        self.block = _round_up(source_hz / BLOCKS_PER_S, period)
        self.context = _round_up(CONTEXT_PERIODS * source_hz / min(source_hz, rate_hz), period)
        self.output_block = self.block // period * (rate_hz // common)

    @classmethod
    def for_rates(cls, source_hz: int, rate_hz: int) -> Conversion | None:
        """The conversion to `rate_hz`, where 0 means the model's own rate; None if both rates are equal. Raises BadRequest."""
        if rate_hz in (0, source_hz):
            return None
        possible = possible_rates_hz(source_hz)
        if rate_hz in possible:
            return cls(source_hz, rate_hz)
        if find_spec("soxr") is None:
            advice = (
                f"this server converts nothing without soxr: ask for {source_hz}, or there `make wheels` in a clone, then "
                "pip install --find-links dist 'omnistage[models]'"
            )
        else:
            advice = f"ask for one of {', '.join(map(str, possible))}"
        raise BadRequest(FIELD, f"{rate_hz} is not possible; {advice}, or leave it out for the model's own")

    def count(self, samples: int) -> int:
        """How many samples a whole sound has after the conversion. samples: how many it has at the model's rate."""
        return (2 * samples * self.rate_hz + self.source_hz) // (2 * self.source_hz)

    def first_needed(self, sample: int) -> int:
        """Number of the model's first sample that is needed to make sample number `sample` of the result and those after it."""
        return self._begin(sample // self.output_block)

    def convert(self, samples: Samples, held_first: int, block: int, end_block: int) -> Samples:
        """Convert the blocks from number `block` up to, but without, number `end_block`; returns samples [n, channels]. The
        result is clipped to full scale, which filtered sound may exceed. samples: all samples of the model that these blocks need,
        [m, channels]. held_first: number of the first of these samples."""
        channels = samples.shape[1]
        parts = [np.empty((0, channels), np.float32)]
        while block < end_block:
            window_first = self._begin(block)
            # A block whose context would begin before the sound gets a shorter window, in a call of its own.
            block_count = 1 if block * self.block < self.context else min(end_block - block, max(MAX_COLUMNS // channels, 1))
            length = (block + 1) * self.block + self.context - window_first
            part = samples[window_first - held_first :][: length + (block_count - 1) * self.block]
            windows = np.lib.stride_tricks.sliding_window_view(part, length, axis=0)[:: self.block]  # [block_count, channels, length]
            converted = _resample(windows.reshape(block_count * channels, length).T, self.source_hz, self.rate_hz)
            context = (block * self.block - window_first) * self.rate_hz // self.source_hz  # converted samples before each block
            blocks = converted[context : context + self.output_block].reshape(self.output_block, block_count, channels)
            parts.append(blocks.transpose(1, 0, 2).reshape(-1, channels))
            block += block_count
        return np.clip(np.concatenate(parts), -1, 1)

    def _begin(self, block: int) -> int:
        """Number of the model's first sample in the window of a block: the block with its context."""
        return max(block * self.block - self.context, 0)


def _round_up(minimum: float, period: int) -> int:
    """The least multiple of `period` that is not below `minimum`."""
    return math.ceil(minimum / period) * period


def _resample(columns: Samples, source_hz: int, rate_hz: int) -> Samples:
    """Convert n sounds of equal length, [samples, n], each as if it were alone; returns [samples at rate_hz, n]."""
    import soxr  # Needed only if somebody asks for another rate.

    columns_out: Samples = soxr.resample(np.ascontiguousarray(columns), source_hz, rate_hz, QUALITY)
    return columns_out


class Resampler:
    """The sound of one session, from sample `first` on. Call `push` with the model's samples from `conversion.first_needed(first)` on, then
    `end`. Apart from the samples of the last push it holds at most a block and the context on both sides."""

    def __init__(self, conversion: Conversion, channels: int, first: int) -> None:
        self._conversion = conversion
        self._block = first // conversion.output_block
        self._held_samples = np.empty((0, channels), np.float32)
        self._held_first = conversion.first_needed(first)
        self._skipped = first - self._block * conversion.output_block  # samples of the next block that come before `first`

    @property
    def first_needed(self) -> int:
        """Number of the model's first sample that is still needed, here or by a session that goes on after the sound returned so far."""
        return self._held_first

    def push(self, samples: Samples) -> Samples:
        """Take the model's next samples [n, channels]; returns the converted samples [m, channels] that are final now."""
        self._held_samples = np.concatenate([self._held_samples, samples])
        received = self._held_first + len(self._held_samples)
        return self._take((received - self._conversion.context) // self._conversion.block)

    def end(self) -> Samples:
        """Return the rest of the sound: no samples of the model follow. Raises BadRequest if the sound ends before `first`."""
        first, conversion = self._block * self._conversion.output_block + self._skipped, self._conversion
        count = conversion.count(self._held_first + len(self._held_samples))
        if count < first:
            raise BadRequest(
                "resume.positions", f"the sound has {count} samples at {conversion.rate_hz} Hz: it cannot go on at sample {first}"
            )
        silence = np.zeros((conversion.context + conversion.block, self._held_samples.shape[1]), np.float32)  # It fills the last window.
        self._held_samples = np.concatenate([self._held_samples, silence])
        end_block = -(-count // conversion.output_block)  # Rounded up.
        return self._take(end_block)[: count - first]

    def _take(self, end_block: int) -> Samples:
        """Convert the blocks before block number `end_block`, without samples before `first`, and drop what no later block needs."""
        if end_block <= self._block:
            return self._held_samples[:0]
        converted = self._conversion.convert(self._held_samples, self._held_first, self._block, end_block)[self._skipped :]
        self._skipped, self._block = 0, end_block
        first_needed = self._conversion.first_needed(end_block * self._conversion.output_block)
        self._held_samples, self._held_first = self._held_samples[first_needed - self._held_first :].copy(), first_needed
        return converted


async def convert_sounds(
    sounds: AsyncIterator[Sound], conversion: Conversion, channels: int, first: int, first_needed: int
) -> AsyncGenerator[Sound, None]:
    """The sound of a model, converted to the other rate, from sample `first` on. sounds: the model's, from its sample number
    `conversion.first_needed(first)` on. first_needed: number of the first input item that the model needs to make the first of these
    sounds. `Sound.needs` of a result is the first input item that is needed to go on after it. The conversion goes on from samples before
    that place, so their input items count too. Raises BadRequest if the sound ends before `first`."""
    resampler = Resampler(conversion, channels, first)
    # needs: pairs of a sample of the model, and the first input item that is needed to make the samples from there on.
    needs = deque([(resampler.first_needed, first_needed)])
    end_sample, prebuffer_s = resampler.first_needed, None
    async for sound in sounds:
        prebuffer_s = prebuffer_s if sound.prebuffer_s is None else sound.prebuffer_s
        end_sample += len(sound.samples)
        needs.append((end_sample, sound.needs))
        converted = await asyncio.to_thread(resampler.push, sound.samples)
        while len(needs) > 1 and needs[1][0] <= resampler.first_needed:
            needs.popleft()
        yield Sound(converted, needs[0][1], prebuffer_s)
        prebuffer_s = None if len(converted) else prebuffer_s  # Repeated until a sound with samples had it.
    yield Sound(await asyncio.to_thread(resampler.end), needs[0][1], prebuffer_s)


async def warm_up(own_hz: int) -> None:
    """Convert a little sound from the rate `own_hz`, so that soxr is loaded if it is installed."""
    for rate_hz in possible_rates_hz(own_hz):
        if rate_hz != own_hz:
            await asyncio.to_thread(Resampler(Conversion(own_hz, rate_hz), 1, 0).push, np.zeros((own_hz // 10, 1), np.float32))
            return
