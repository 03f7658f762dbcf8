"""Sounds: the same samples as Transformers' `load_audio` gives, and right by themselves. How long one is, its samples tell: whatever a
header says, a whole one is heard to its end, and what was cut off is refused."""

from __future__ import annotations

import base64
import io
import random
import struct
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from transformers.audio_utils import load_audio

from helpers import media_files
from helpers.decoding import decoding
from omnistage.client.files import FORMATS, SoundEncoder
from omnistage.models.media.containers import SLACK
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.sound_files import joined_sounds
from omnistage.models.media.terms import BadMedia, MediaLimits, SoundPreprocessing

RATE_HZ = 16_000
"""The rate of sounds here unless said otherwise, and of the decoded samples: nothing is resampled."""

HEAD = 44
"""Bytes of a WAV before its samples."""

LIST = b"LIST" + struct.pack("<I", 10) + b"INFOxxxxxx"
TAG = b"TAG" + bytes(125)
ID3 = b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)
NOISE = np.random.default_rng(1).bytes(500)

UNKNOWN = [0, 0xFFFFFFFF, 0xFFFFFFFF - 36, 0x7FFFFFFF, 0x80000000, 2_000_000_000, 1 << 30, 256 << 20]
"""The values that programs write for a length that nobody knows."""

EXACT = [
    *(("WAV", "PCM_16", 16_000, 1), ("WAV", "FLOAT", 48_000, 2), ("WAV", "PCM_U8", 8_000, 1)),
    *(("WAV", "PCM_24", 44_100, 6), ("FLAC", "PCM_16", 44_100, 2), ("FLAC", "PCM_24", 48_000, 1)),
    *(("WAV", "ULAW", 8_000, 1), ("WAV", "PCM_32", 16_000, 1), ("AU", "DOUBLE", 16_000, 2)),
    *(("CAF", "ALAC_16", 24_000, 1), ("RF64", "PCM_16", 16_000, 1), ("AIFF", "PCM_16", 11_025, 1)),
    *(("W64", "PCM_16", 96_000, 1),),
]
LOSSY = [("OGG", "VORBIS", 22_050, 1), ("OGG", "OPUS", 48_000, 2), ("MP3", None, 44_100, 2)]
FFMPEG = [
    *(("mp4", "aac", 48_000), ("adts", "aac", 44_100), ("matroska", "aac", 22_050), ("webm", "libopus", 48_000)),
    *(("mov", "alac", 44_100), ("avi", "libmp3lame", 32_000), ("mpegts", "mp2", 48_000), ("ac3", "ac3", 48_000)),
]


async def test_what_loses_nothing_has_the_bits_of_the_published_loader(decoder: MediaDecoder, seed: int) -> None:
    for number, (form, subtype, source_hz, channels) in enumerate(EXACT):
        rate_hz = (16_000, 24_000)[number % 3 == 2]
        data = media_files.sound(seed, 1.3, source_hz, channels, form, subtype)
        sound = await decoder.sound(data, SoundPreprocessing(rate_hz))
        assert np.array_equal(sound.samples, published(data, rate_hz)), (form, subtype)
        assert sound.rate_hz == rate_hz


async def test_what_loses_something_is_as_the_published_loader_has_it(decoder: MediaDecoder, seed: int) -> None:
    """Other decoders round otherwise."""
    for form, subtype, source_hz, channels in LOSSY:
        data = media_files.sound(seed, 1.3, source_hz, channels, form, subtype)
        assert (await decoder.sound(data)).samples == pytest.approx(published(data, 16_000), abs=1e-5), (form, subtype)


async def test_sound_above_full_scale_keeps_its_shape(decoder: MediaDecoder, seed: int) -> None:
    for source_hz in (16_000, 44_100):
        data = media_files.written(media_files.samples(seed, 1.0, source_hz) * 6, source_hz, "WAV", "FLOAT")
        samples = (await decoder.sound(data)).samples
        assert np.abs(samples).max() > 1.5
        assert np.array_equal(samples, published(data, 16_000))


async def test_whole_numbers_in_floats_are_refused_with_what_to_do(decoder: MediaDecoder, seed: int) -> None:
    for form, subtype in [("WAV", "FLOAT"), ("AU", "DOUBLE")]:
        data = media_files.written(media_files.samples(seed) * 32768, 16_000, form, subtype)
        with pytest.raises(BadMedia, match=r"a sample of it is .*, and full scale is 1: divide all by 32768"):
            await decoder.sound(data)


def published(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    """The samples that Transformers makes of a file."""
    samples: NDArray[np.float32] = load_audio(base64.b64encode(data).decode(), rate_hz, backend="soundfile")
    return samples


async def test_what_ffmpeg_reads_is_the_sound_that_was_written(decoder: MediaDecoder, seed: int) -> None:
    """Codecs lose something and put silence before and after."""
    original = media_files.samples(seed, 2.0)[:, 0]
    for form, codec, source_hz in FFMPEG:
        data = media_files.film(seed, 0, form=form, codec="", sound_codec=codec, sound_s=2.0, sound_rate_hz=source_hz)
        samples = (await decoder.sound(data)).samples
        assert abs(len(samples) - len(original)) <= 4096, (form, codec)
        alike = np.correlate(samples, original[4000:12_000], "valid").max() / np.sum(original[4000:12_000] ** 2)
        assert alike == pytest.approx(1.0, abs=0.2), (form, codec)


async def test_a_tone_keeps_its_height_and_the_mean_is_taken_of_the_channels(decoder: MediaDecoder) -> None:
    for rate_hz in (8_000, 44_100, 192_000):
        at = np.arange(rate_hz) / rate_hz
        left = 0.5 * np.sin(2 * np.pi * 1234.0 * at)
        data = media_files.written(np.stack([left, np.zeros_like(left)], axis=1), rate_hz)
        samples = (await decoder.sound(data)).samples
        assert samples.shape == (16_000,)
        inside = np.arange(1000, 15_000)
        assert samples[inside] == pytest.approx(0.25 * np.sin(2 * np.pi * 1234.0 * inside / 16_000), abs=2e-4)


# Lengths --------------------------------------------------------------------------------------------------------------------------------


def put(data: bytes, *, at: int, value: int, form: str = "<I") -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def wav(data: bytes, *, riff: int | None = None, samples: int | None = None, behind: bytes = b"") -> bytes:
    """A WAV that says these sizes, the right ones where there is none; behind: bytes after it, which they do not count."""
    for at, value in ((4, riff), (HEAD - 4, samples)):
        data = data if value is None else put(data, at=at, value=value)
    return data + behind


def chunk_size(data: bytes, name: bytes, value: int, form: str) -> bytes:
    return put(data, at=data.index(name) + len(name), value=value, form=form)


class Pipe(io.BytesIO):
    """A pipe: bytes that were written into it cannot be corrected."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation


def encoded(sound: bytes, form: str, codec: str, file: io.BytesIO | None = None, **options: str) -> bytes:
    """A file by FFmpeg of a WAV."""
    file = file or io.BytesIO()
    with av.open(io.BytesIO(sound), "r") as source, av.open(file, "w", format=form, options=options) as sink:
        given = source.streams.audio[0]
        stream: Any = sink.add_stream(codec, rate=given.rate, layout=("mono", "stereo")[given.channels - 1])
        formats = [one.name for one in stream.codec.audio_formats or ()]
        stream.codec_context.format = next(name for name in ("s16", "s16p", *formats) if name in formats)
        for frame in source.decode(given):
            sink.mux(stream.encode(frame))
        sink.mux(stream.encode())
    return file.getvalue()


def piped(sound: bytes, form: str, codec: str, **options: str) -> bytes:
    """The same as it comes out of a pipe."""
    return encoded(sound, form, codec, Pipe(), **options)


def whole_wavs(sound: bytes) -> dict[str, bytes]:
    """All with the same samples."""
    size = len(sound) - HEAD
    begun, half, junk, unsized = 4096, size // 2, b"JUNK" + struct.pack("<I", 28) + bytes(28), wav(sound, samples=0xFFFFFFFF)
    return {
        **{f"both sizes {value}": wav(sound, riff=(value + 36) & 0xFFFFFFFF, samples=value) for value in UNKNOWN},
        **{f"samples {value}": wav(sound, samples=value) for value in UNKNOWN},
        "outer size 0": wav(sound, riff=0),
        "outer size wrong": wav(sound, riff=123),
        "size of a first block": wav(sound, riff=36 + begun, samples=begun),
        "size of a first half": wav(sound, riff=36 + half, samples=half),
        "samples of a first block": wav(sound, samples=begun),
        "samples that count the head": wav(sound, samples=size + HEAD),
        "samples too many, the outer size right": wav(sound, samples=2 * size),
        "a list behind": wav(sound, riff=36 + size + len(LIST), behind=LIST),
        "a list that nothing counts": wav(sound, behind=LIST),
        "a list behind samples of no size": wav(sound, riff=0xFFFFFFFF, samples=0xFFFFFFFF, behind=LIST),
        "a list that was cut off": wav(sound, behind=LIST[:-3]),
        "a tag": wav(sound, behind=TAG),
        "another tag": wav(sound, behind=ID3),
        "something unknown behind": wav(sound, behind=NOISE),
        "chunks before": sound[:12] + junk + b"fact" + bytes(4) + sound[12:],
        "chunks before samples of no size": unsized[:12] + junk + unsized[12:],
    }


def whole_others(sound: bytes) -> dict[str, bytes]:
    """All with the same samples."""
    samples, _ = soundfile.read(io.BytesIO(sound), dtype="int16")
    aiff, w64, rf64, caf, au, flac = (media_files.written(samples, RATE_HZ, form) for form in ("AIFF", "W64", "RF64", "CAF", "AU", "FLAC"))
    no_length = flac.index(b"fLaC") + 8 + 13
    data = b"data\xf3\xac\xd3\x11\x8c\xd1\0\xc0\x4f\x8e\xdb\x8a"
    return {
        "AIFF of no size": put(chunk_size(aiff, b"SSND", 0, ">I"), at=4, value=0, form=">I"),
        "AIFF of the largest": put(chunk_size(aiff, b"SSND", 0xFFFFFFFF, ">I"), at=4, value=0xFFFFFFFF, form=">I"),
        "AIFF of a first block": chunk_size(aiff, b"SSND", 1024, ">I"),
        "AIFF with a tag": aiff + ID3,
        "W64 of the largest size": put(chunk_size(w64, data, (1 << 63) - 1, "<Q"), at=16, value=0, form="<Q"),
        "W64 of no size": chunk_size(w64, data, 0, "<Q"),
        "RF64 of no size": put(put(rf64, at=20, value=0, form="<Q"), at=28, value=0, form="<Q"),
        "CAF of no size": chunk_size(caf, b"data", -1, ">q"),
        "CAF of a first block": chunk_size(caf, b"data", 1024, ">q"),
        "AU of no size": put(au, at=8, value=0xFFFFFFFF, form=">I"),
        "AU of a first block": put(au, at=8, value=1024, form=">I"),
        "FLAC of no length": flac[:no_length] + bytes([flac[no_length] & 0xF0]) + bytes(4) + flac[no_length + 5 :],
        "FLAC with tags": ID3 + flac + TAG,
        "FLAC from a pipe": piped(sound, "flac", "flac"),
        "WAV from a pipe": piped(sound, "wav", "pcm_s16le"),
        "RF64 from a pipe": piped(sound, "wav", "pcm_s16le", rf64="always"),
        "W64 from a pipe": piped(sound, "w64", "pcm_s16le"),
        "AIFF from a pipe": piped(sound, "aiff", "pcm_s16be"),
        "CAF from a pipe": piped(sound, "caf", "pcm_s16le"),
        "ALAC": encoded(sound, "ipod", "alac"),
        "live Matroska": piped(sound, "matroska", "flac", live="1"),
    }


async def test_a_whole_sound_is_heard_to_its_end_whatever_its_header_says(decoder: MediaDecoder) -> None:
    sound = media_files.sound(1)
    samples = (await decoder.sound(sound)).samples
    for name, data in (whole_wavs(sound) | whole_others(sound)).items():
        print(name)
        heard = (await decoder.sound(data)).samples
        assert np.array_equal(heard, samples), f"{name}: {len(heard)} samples of {len(samples)}"


async def test_an_odd_number_of_bytes_needs_none_to_make_it_even(decoder: MediaDecoder) -> None:
    whole = media_files.written(media_files.samples(1)[:8001], RATE_HZ, "WAV", "PCM_U8")
    bare = whole[: HEAD + 8001]
    samples = (await decoder.sound(whole)).samples
    assert len(samples) == 8001
    for data in (bare, bare + LIST, bare + b"\0" + LIST):
        assert np.array_equal((await decoder.sound(data)).samples, samples)


def cut() -> dict[str, bytes]:
    """By name: what came, of a sound of which something tells that more is missing."""
    sound = media_files.sound(1)
    size = len(sound) - HEAD
    mp3 = encoded(sound, "mp3", "libmp3lame")
    flac, caf, opus = (media_files.written(media_files.samples(1), RATE_HZ, *form) for form in (("FLAC",), ("CAF",), ("OGG", "OPUS")))
    return {
        "WAV without its last tenth of a second": sound[:-3200],
        "WAV with the right size of samples alone": wav(sound, riff=0xFFFFFFFF)[: -size // 2],
        "CAF": caf[:-3000],
        "AU": media_files.sound(1, form="AU")[:-3000],
        "MP3": mp3[: len(mp3) // 2],
        "MP3 without its last frames": mp3[:-500],
        "MP3 without its last byte": mp3[:-1],
        "MP3 in its last frame": mp3[: mp3.rindex(b"\xff\xf3") + 10],
        "MP3 without nearly all of its frames": mp3[: len(mp3) // 20 + 400],
        "WAV and a whole one behind it": sound[: len(sound) // 2] + sound,
        "FLAC between two frames": flac[: flac.rindex(b"\xff\xf8")],
        "Ogg in the middle of a page": opus[:-1000],
        "M4A": encoded(sound, "ipod", "aac")[:-200],
        "M4A in fragments": encoded(sound, "mp4", "aac", movflags="frag_keyframe+empty_moov")[:-500],
        "ASF": encoded(sound, "asf", "libmp3lame")[:-3000],
    }


async def test_a_sound_that_was_cut_off_is_refused_where_anything_tells_it(decoder: MediaDecoder) -> None:
    for name, data in cut().items():
        with pytest.raises(BadMedia, match=r"it says that it has .*, and .* are there: it was cut off, send all of it"):
            await decoder.sound(data)
            pytest.fail(f"{name} was taken")


async def test_an_mp3_that_ends_in_its_first_frame_was_cut_off(decoder: MediaDecoder) -> None:
    mp3 = encoded(media_files.sound(1), "mp3", "libmp3lame")
    header = mp3.index(b"Xing" if b"Xing" in mp3 else b"Info")
    for end in (header + 200, header + 250):
        with pytest.raises(BadMedia, match="it was cut off or damaged before its first sample: send all of it"):
            await decoder.sound(mp3[:end])
            pytest.fail(f"its first {end} of {len(mp3)} bytes were taken")


async def test_a_sound_whose_list_is_missing_was_cut_off(decoder: MediaDecoder, seed: int) -> None:
    """At the border between the media and their list, where the missing bytes of the media can be fewer than are believed."""
    data = encoded(media_files.sound(1), "ipod", "aac")
    border = data.rindex(b"moov") - 4
    for end in {border, border + 1, border + 7, border + 8, border - 1, border - SLACK, border - random.Random(seed).randint(2, SLACK - 1)}:
        with pytest.raises(BadMedia, match=r"it was cut off, send all of it"):
            await decoder.sound(data[:end])
            pytest.fail(f"its first {end} of {len(data)} bytes were taken")


async def test_a_list_in_a_free_box_is_one(decoder: MediaDecoder) -> None:
    """A program that was interrupted while it moved the list to the beginning leaves such a file."""
    data = encoded(media_files.sound(1), "ipod", "aac")
    border = data.rindex(b"moov")
    freed = data[:border] + b"free" + data[border + 4 :]
    assert np.array_equal((await decoder.sound(freed)).samples, (await decoder.sound(data)).samples)


async def test_sounds_of_chunks_one_behind_the_other_are_all_heard(decoder: MediaDecoder) -> None:
    """Several files that are joined without loss give the samples of each."""
    for form in ("WAV", "AIFF", "W64", "RF64", "CAF", "FLAC", "AU"):
        files = [media_files.sound(seed, 0.5, form=form) for seed in (1, 2, 3)]
        each = [(await decoder.sound(data)).samples for data in files]
        assert np.array_equal((await decoder.sound(b"".join(files))).samples, np.concatenate(each)), form


async def test_recordings_of_telephones_one_behind_the_other_are_all_heard(decoder: MediaDecoder) -> None:
    """AMR, of which frames of silence are easily made."""
    silence = b"#!AMR\n" + (b"\x3c" + bytes(31)) * 25
    assert len((await decoder.sound(silence * 3)).samples) == 3 * RATE_HZ // 2


async def test_files_of_no_length_one_behind_the_other_are_all_heard(decoder: MediaDecoder) -> None:
    sound = media_files.sound(1)
    samples = (await decoder.sound(sound)).samples
    streamed = wav(sound, riff=0xFFFFFFFF, samples=0xFFFFFFFF)
    for data in (streamed + streamed, streamed + sound, sound + LIST + streamed, piped(sound, "flac", "flac") * 2):
        assert np.array_equal((await decoder.sound(data)).samples, np.concatenate([samples] * 2))


async def test_sounds_of_several_formats_one_behind_the_other_are_all_heard(decoder: MediaDecoder) -> None:
    """Several joined files give the samples of each, whatever stands in front of the first: a tag, or bytes that nobody knows."""
    sound = media_files.sound(1, 0.5)
    files = {
        "wav": sound,
        "aiff": media_files.sound(1, 0.5, form="AIFF"),
        "flac": media_files.sound(1, 0.5, form="FLAC"),
        "ogg": media_files.written(media_files.samples(1, 0.5), RATE_HZ, "OGG", "VORBIS"),
        "mp3": encoded(sound, "mp3", "libmp3lame"),
        "m4a": encoded(sound, "ipod", "aac"),
        "mka": encoded(sound, "matroska", "flac"),
        "asf": encoded(sound, "asf", "libmp3lame"),
    }
    each = {name: (await decoder.sound(data)).samples for name, data in files.items()}
    tag = b"ID3\x03\x00\x00\x00\x00\x01\x00" + bytes(128)
    for first, data in files.items():
        for second in ("wav", "flac", "mp3", "m4a"):
            for front in (b"", tag, bytes(1000)):
                heard = (await decoder.sound(front + data + files[second])).samples
                assert np.array_equal(heard, np.concatenate([each[first], each[second]])), (front[:3], first, second)


async def test_what_is_behind_samples_and_unknown_is_not_heard(decoder: MediaDecoder) -> None:
    """Where the file says twice that it has ended."""
    sound = media_files.sound(1)
    samples = (await decoder.sound(sound)).samples
    chance = np.random.default_rng(1)
    for size in (7, 500, len(sound) // 4, len(sound) * 3 // 4):
        assert np.array_equal((await decoder.sound(sound + chance.bytes(size))).samples, samples), size


async def test_however_many_places_look_like_a_beginning_the_work_has_a_bound(decoder: MediaDecoder) -> None:
    """Each took up to a hundred reads, of which small files could ask for minutes."""
    sound = media_files.sound(1)
    mp3 = encoded(sound, "mp3", "libmp3lame", write_xing="0", id3v2_version="0")
    ogg = media_files.written(media_files.samples(1), RATE_HZ, "OGG", "VORBIS")
    page = b"xOggS" + bytes(23)
    for data in (
        mp3 + b"ID3\3\0\0\0\0\0\0" * 100_000,
        wav(sound, riff=0, samples=0) + (b"JUNK" + bytes(4)) * 40_000 + b"\1",
        ogg + page * 20_000,
    ):
        file = CountingFile(data)
        for _ in joined_sounds(file, len(data)):
            pass
        assert file.reads < 500_000


class CountingFile(io.BytesIO):
    """A file that counts how often it is read."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def vorbis(sound: bytes) -> bytes:
    samples, rate_hz = soundfile.read(io.BytesIO(sound))
    return media_files.written(samples, rate_hz, "OGG")


async def test_files_with_loss_one_behind_the_other_are_all_heard(decoder: MediaDecoder) -> None:
    """Whatever rates and channels they have, and whatever is between them."""
    first, second = media_files.sound(1), media_files.sound(2, 0.5, 44_100, 2)
    makers: dict[str, Callable[[bytes], bytes]] = {
        "MP3": lambda sound: encoded(sound, "mp3", "libmp3lame"),
        "MP3 from a pipe": lambda sound: piped(sound, "mp3", "libmp3lame", write_xing="0"),
        "MP3 with tags and noise": lambda sound: encoded(sound, "mp3", "libmp3lame") + TAG + NOISE,
        "ADTS": lambda sound: encoded(sound, "adts", "aac"),
        "Vorbis": vorbis,
        "M4A": lambda sound: encoded(sound, "ipod", "aac"),
    }
    for name, make in makers.items():
        for between, between_s in ((first, 1.0), (second, 0.5)):
            samples = (await decoder.sound(make(first) + make(between) + make(first))).samples
            assert 1.95 + between_s < len(samples) / RATE_HZ < 2.5 + between_s, f"{name}: {len(samples) / RATE_HZ} s"
            assert alike(samples[-RATE_HZ * 3 // 2 :], media_files.samples(1)[:, 0]), name


def alike(heard: NDArray[np.float32], original: NDArray[np.float32]) -> bool:
    """Whether the end of a sound is heard, somewhere."""
    part = original[-RATE_HZ // 2 : -RATE_HZ // 8]
    return bool(np.correlate(heard, part, "valid").max() > 0.8 * np.sum(part**2))


def with_xing(mp3: bytes, *, frames: float = 1.0, size: float = 1.0) -> bytes:
    """Its header says so many times as many frames and bytes."""
    at = max(mp3.find(b"Xing"), mp3.find(b"Info")) + 8
    said_frames, said_size = struct.unpack_from(">II", mp3, at)
    return put(put(mp3, at=at, value=int(said_frames * frames), form=">I"), at=at + 4, value=int(said_size * size), form=">I")


async def test_a_sound_of_which_much_cannot_be_decoded_is_refused(decoder: MediaDecoder) -> None:
    """Joined sounds lose a frame where they meet; this one lost more."""
    data = bytearray(encoded(media_files.sound(1), "ipod", "aac"))
    begin = data.index(b"mdat") + 4
    data[begin + 2000 : begin + 6000] = np.random.default_rng(1).bytes(4000)
    with pytest.raises(BadMedia, match=r"\d+ of its \d+ frames of sound cannot be decoded: it is damaged, encode it anew"):
        await decoder.sound(bytes(data))


async def test_a_file_of_a_thousand_sounds_is_refused(decoder: MediaDecoder) -> None:
    with pytest.raises(BadMedia, match="more than 1000 sounds one behind the other: make one of them"):
        await decoder.sound(media_files.sound(1, 0.001) * 1001)


async def test_the_number_of_frames_in_an_mp3_is_no_end(decoder: MediaDecoder) -> None:
    sound = media_files.sound(1, 2.0)
    mp3 = encoded(sound, "mp3", "libmp3lame")
    samples = (await decoder.sound(mp3)).samples
    assert len(samples) == 2 * RATE_HZ
    files = {
        "no header": piped(sound, "mp3", "libmp3lame", write_xing="0"),
        "too few frames": with_xing(mp3, frames=0.3),
        "too few of both": with_xing(mp3, frames=0.3, size=0.3),
        "too many frames": with_xing(mp3, frames=3),
        "no frames": with_xing(mp3, frames=0),
        "a tag behind": mp3 + TAG,
    }
    for name, data in files.items():
        heard = (await decoder.sound(data)).samples
        assert 0 <= len(heard) - len(samples) <= 1600, name
        assert alike(heard, media_files.samples(1, 2.0)[:, 0]), name


async def test_a_guess_of_the_length_refuses_nothing() -> None:
    """After silence at the beginning, FFmpeg and libsndfile guess that all of a sound has as few bytes a second."""
    quiet = np.concatenate([np.zeros((2 * RATE_HZ, 1)), media_files.samples(1, 6.0)]).astype(np.float32)
    sound = media_files.written(quiet, RATE_HZ)
    async with decoding(MediaLimits(sound_s=10.0)) as decoder:
        for data in (piped(sound, "adts", "aac"), piped(sound, "mp3", "libmp3lame", write_xing="0", q="2")):
            assert len((await decoder.sound(data)).samples) == pytest.approx(8 * RATE_HZ, abs=4096)


async def test_what_our_client_writes_is_heard_whole(decoder: MediaDecoder) -> None:
    """As a file, and as it goes into a pipe."""
    quiet = np.concatenate([np.zeros(RATE_HZ), media_files.samples(1, 2.0)[:, 0]]).astype(np.float32)
    for kind in FORMATS:
        encoder = SoundEncoder(kind, RATE_HZ)
        piped = encoder.encode(quiet) + encoder.finish()
        file = encoder.head + piped[len(encoder.head) :]
        assert len((await decoder.sound(file)).samples) == len(quiet), kind
        heard = (await decoder.sound(piped)).samples
        assert 0 <= len(heard) - len(quiet) < 0.15 * RATE_HZ, kind
        assert alike(heard, media_files.samples(1, 2.0)[:, 0]), kind
