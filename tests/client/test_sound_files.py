"""Sound as files: WAV, FLAC, Opus and MP3, whole, growing, and broken off."""

from __future__ import annotations

import io
import itertools
import random
import signal
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import lengths
from helpers.bare import bare_environment, bare_python
from omnistage.client import Audio, AudioChunk, BadRequestError, Omni, RequestError, SoundEncoder, SoundFile
from omnistage.client.files import FORMATS
from omnistage.models.toy import formulas

soundfile = pytest.importorskip("soundfile", reason="the cli extra is not installed")
av = pytest.importorskip("av", reason="the models extra is not installed")

Samples = NDArray[np.float32]

RATE_HZ = 24000
KINDS = list(FORMATS)
IN_OGG = (".ogg", ".opus")
"""A stream of Ogg has a number by chance, and pages of a second or more."""
LAG_S = {".wav": 0.0, ".flac": 0.2, ".mp3": 0.2, ".ogg": 1.5, ".opus": 1.1}
"""How much of what came a file that is broken off may lack."""
LOSSY = [".ogg", ".opus", ".mp3"]
ENCODED = [(".wav", "pcm16"), (".wav", "float32"), (".flac", "pcm16"), (".ogg", "pcm16"), (".opus", "pcm16"), (".mp3", "pcm16")]


def voice(seconds: float, rate_hz: int = RATE_HZ, seed: int = 0) -> Samples:
    """Harmonics of a pitch that glides, louder and softer, with some noise; as 16 bit."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate_hz)) / rate_hz
    phase = 2 * np.pi * np.cumsum(150 + 50 * np.sin(2 * np.pi * 0.7 * t)) / rate_hz
    sound = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t)) * 0.2
    return (np.rint((sound + 0.002 * rng.standard_normal(len(t))) * 32768) / 32768).astype(np.float32)


def pieces(sound: Samples, rng: random.Random) -> Iterator[Samples]:
    """As an answer comes: in pieces of any size."""
    at = 0
    while at < len(sound):
        count = rng.choice([1, rng.randint(1, 400), rng.randint(1, 9000)])
        yield sound[at : at + count]
        at += count


def chunks(sound: Samples, rng: random.Random, rate_hz: int = RATE_HZ, encoding: str = "pcm16") -> Iterator[AudioChunk]:
    first = 0
    for piece in pieces(sound, rng):
        yield AudioChunk(piece, first, rate_hz, 0.0, encoding)
        first += len(piece)


def decoded(data: bytes) -> tuple[Samples, int]:
    """By FFmpeg's libraries, as most players do: what can be read, without a word about what is missing."""
    parts, rate_hz = [np.empty(0, np.float32)], 0
    with av.open(io.BytesIO(data)) as file:
        try:
            for frame in file.decode(audio=0):
                rate_hz = frame.sample_rate
                samples = frame.to_ndarray()
                whole = samples.dtype.kind == "i"
                parts.append(samples.reshape(-1).astype(np.float32) / np.float32(32768 if whole else 1))
        except av.error.FFmpegError as error:
            if not len(parts) > 1:
                raise
            print(error)
    return np.concatenate(parts), rate_hz


def likeness(one: Samples, other: Samples) -> float:
    """Correlation of what both have, sample on sample."""
    count = min(len(one), len(other))
    return float(np.corrcoef(one[:count], other[:count])[0, 1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def streamed(kind: str, sound: Samples, rng: random.Random, rate_hz: int = RATE_HZ, encoding: str = "pcm16") -> bytes:
    encoder = SoundEncoder(kind, rate_hz, encoding)
    return b"".join([*(encoder.encode(piece) for piece in pieces(sound, rng)), encoder.finish()])


@pytest.mark.parametrize("kind", [".wav", ".flac", ".ogg", ".opus", ".mp3"])
@lengths.drawn_cells(1, "count", [1, 2])
def test_channels_stay_apart(kind: str, count: int, tmp_path: Path, seed: int) -> None:
    """Whether the file is written at once or grows."""
    sound = np.stack([voice(1.0, RATE_HZ, seed + number) for number in range(count)], axis=1)
    Audio(sound, RATE_HZ).save(tmp_path / f"whole{kind}")
    with SoundFile(tmp_path / f"grown{kind}") as file:
        for first in range(0, len(sound), 5000):
            file.write(AudioChunk(sound[first : first + 5000], first, RATE_HZ, 0.0))
    for name in ("whole", "grown"):
        samples, rate_hz = soundfile.read(tmp_path / f"{name}{kind}", dtype="float32", always_2d=True)
        assert rate_hz == RATE_HZ and samples.shape[1] == count
        for number in range(count):
            likest = max(abs(likeness(samples[shift:, number], sound[:, number])) for shift in range(0, 1500, 1))
            assert likest > 0.9


@pytest.mark.parametrize("rate_hz", [8000, 22050, 24000, 44100])
def test_flac_and_wav_hold_every_sample(tmp_path: Path, rate_hz: int, seed: int) -> None:
    sound = voice(1.3, rate_hz, seed)
    for name in ("x.wav", "x.flac", "x.FLAC"):
        Audio(sound, rate_hz).save(tmp_path / name)
        samples, found_hz = soundfile.read(tmp_path / name, dtype="int16")
        assert found_hz == rate_hz and np.array_equal(samples, np.rint(sound * 32768))
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth(), file.getnchannels()) == (rate_hz, len(sound), 2, 1)


def test_float32_stands_in_a_wav_as_it_is(tmp_path: Path, seed: int) -> None:
    sound = np.random.default_rng(seed).uniform(-1.5, 1.5, 5000).astype(np.float32)
    Audio(sound, 16000, "float32").save(tmp_path / "x.wav")
    samples, rate_hz = soundfile.read(tmp_path / "x.wav", dtype="float32")
    assert rate_hz == 16000 and np.array_equal(samples, sound)
    assert soundfile.info(tmp_path / "x.wav").subtype == "FLOAT"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_loud_is_clipped(tmp_path: Path, kind: str) -> None:
    """Never wrapped around, which would crack."""
    loud = np.clip(3 * voice(0.5) / np.abs(voice(0.5)).max(), -1.2, 1.2)
    Audio(loud, RATE_HZ).save(tmp_path / f"x{kind}")
    samples, _ = soundfile.read(tmp_path / f"x{kind}", dtype="float32")
    assert likeness(samples, np.clip(loud, -1, 1)) > 0.98


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("rate_hz", [8000, 16000, 24000, 48000])
def test_lossy_kinds_sound_alike_and_are_as_long(tmp_path: Path, kind: str, rate_hz: int, seed: int) -> None:
    """Sample on sample: what an encoder puts before the sound is said in the file, and readers take it away."""
    sound = voice(2.37, rate_hz, seed)
    Audio(sound, rate_hz).save(tmp_path / f"x{kind}")
    samples, found_hz = soundfile.read(tmp_path / f"x{kind}", dtype="float32")
    assert (found_hz, len(samples)) == (rate_hz, len(sound)) and likeness(samples, sound) > 0.95
    assert (tmp_path / f"x{kind}").stat().st_size < len(sound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_without_samples_is_a_wav_only(tmp_path: Path, kind: str) -> None:
    """The others have their form from their first samples."""
    empty = Audio(np.empty(0, np.float32), RATE_HZ)
    if kind == ".wav":
        empty.save(tmp_path / "x.wav")
        info = soundfile.info(tmp_path / "x.wav")
        assert (info.samplerate, info.frames) == (RATE_HZ, 0)
    else:
        with pytest.raises(RequestError, match="has no sample"):
            empty.save(tmp_path / f"x{kind}")
        assert names(tmp_path) == []


@pytest.mark.parametrize(("kind", "encoding"), [one for one in ENCODED if one[0] not in IN_OGG])
def test_equal_sounds_are_equal_files(kind: str, encoding: str, seed: int) -> None:
    """Also where they came in other pieces."""
    rng = random.Random(seed)
    assert streamed(kind, voice(1), rng, encoding=encoding) == streamed(kind, voice(1), rng, encoding=encoding)


@pytest.mark.parametrize(("kind", "encoding"), ENCODED)
def test_bytes_for_whoever_sends_them_are_a_file_wherever_they_end(kind: str, encoding: str, seed: int) -> None:
    """A stream is never rewound. All sound that has come is heard, except for the last second in Ogg and a tenth of a second in the
    others."""
    rng = random.Random(seed)
    sound = voice(4, seed=seed)
    encoder = SoundEncoder(kind, RATE_HZ, encoding)
    given, data = 0, b""
    for piece in pieces(sound, rng):
        data += encoder.encode(piece)
        given += len(piece)
        if given > 2 * RATE_HZ and rng.random() < 0.2:
            samples, rate_hz = decoded(data)
            assert rate_hz == (48000 if kind == ".opus" else RATE_HZ)
            heard = samples[:: rate_hz // RATE_HZ]
            assert given - len(heard) <= RATE_HZ * max(LAG_S[kind], 0.2)
    data += encoder.finish()
    samples, rate_hz = decoded(data)
    assert abs(len(samples) / rate_hz - 4) < 0.1


@pytest.mark.parametrize(("kind", "encoding"), ENCODED)
def test_a_file_that_grows_ends_as_one_that_is_written_at_once(tmp_path: Path, kind: str, encoding: str, seed: int) -> None:
    sound = voice(1.7, seed=seed)
    rng = random.Random(seed)
    with SoundFile(tmp_path / f"grown{kind}") as file:
        for chunk in chunks(sound, rng, encoding=encoding):
            file.write(chunk)
    Audio(sound, RATE_HZ, encoding).save(tmp_path / f"saved{kind}")
    grown, saved = ((tmp_path / f"{name}{kind}").read_bytes() for name in ("grown", "saved"))
    if kind == ".ogg":  # Vorbis begins a little differently with pieces of another length.
        assert len(decoded(grown)[0]) == len(decoded(saved)[0]) == len(sound)
        assert likeness(decoded(grown)[0], decoded(saved)[0]) > 0.99
        return
    if kind == ".opus":
        assert np.array_equal(decoded(grown)[0], decoded(saved)[0])
    else:
        assert grown == saved
    if kind != ".wav":  # It is what libsndfile writes by itself into a file, into which it can go back.
        form = FORMATS[kind]
        written = np.rint(sound * 32768).astype(np.int16) if kind == ".flac" else sound
        soundfile.write(tmp_path / "own", written, RATE_HZ, form.subtype, format=form.container, **form.options(RATE_HZ))
        own = (tmp_path / "own").read_bytes()
        assert np.array_equal(decoded(grown)[0], decoded(own)[0]) if kind == ".opus" else grown == own


@pytest.mark.parametrize(("kind", "encoding"), ENCODED)
def test_a_file_of_an_answer_that_is_broken_off_is_whole_as_far_as_it_goes(tmp_path: Path, kind: str, encoding: str, seed: int) -> None:
    """By an error in the stream: every sample that came is there."""
    sound = voice(2, seed=seed)
    path, given = tmp_path / f"x{kind}", 0
    with pytest.raises(ConnectionError), SoundFile(path) as file:
        for chunk in chunks(sound, random.Random(seed), encoding=encoding):
            if given > RATE_HZ:
                raise ConnectionError
            file.write(chunk)
            given += len(chunk.samples)
    samples, rate_hz = soundfile.read(path, dtype="float32")
    assert (rate_hz, len(samples)) == (RATE_HZ, given) and likeness(samples, sound) > 0.95
    with pytest.raises(ValueError, match="closed"):
        file.write(chunk)
    file.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ".flac"])  # libsndfile opens none that says no length.
def test_what_an_encoder_gives_libsndfile_reads_to_its_end(kind: str, seed: int) -> None:
    """Also where it begins with silence, by which readers guess how long it is."""
    quiet = np.concatenate([np.zeros(2 * RATE_HZ, np.float32), voice(3, seed=seed)])
    samples, _ = soundfile.read(io.BytesIO(streamed(kind, quiet, random.Random(seed))), dtype="float32")
    assert 0 <= len(samples) - len(quiet) < 0.1 * RATE_HZ
    assert np.abs(samples[4 * RATE_HZ : 5 * RATE_HZ]).max() > 0.1


KILLED = """
import os, signal, sys
import numpy as np
from omnistage.client import AudioChunk, SoundFile
sound = np.load(sys.argv[1])
file = SoundFile(sys.argv[2])
for at in range(0, len(sound), 1200):
    file.write(AudioChunk(sound[at : at + 1200], at, 24000, 0.0, sys.argv[3]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@lengths.drawn_cells(3, ("kind", "encoding"), ENCODED)
def test_a_file_of_a_program_that_was_killed_can_be_played(tmp_path: Path, kind: str, encoding: str, seed: int) -> None:
    sound, path = voice(3, seed=seed), tmp_path / f"x{kind}"
    np.save(tmp_path / "sound.npy", sound)
    words = [sys.executable, "-c", KILLED, str(tmp_path / "sound.npy"), str(path), encoding]
    assert subprocess.run(words, timeout=60).returncode == -signal.SIGKILL
    samples, rate_hz = decoded(path.read_bytes())
    missing_s = 3 - len(samples) / rate_hz
    assert missing_s <= LAG_S[kind]
    if kind != ".mp3":  # Its head says only at the end how much of its beginning is to be left out.
        assert likeness(samples[:: rate_hz // RATE_HZ], sound) > 0.95
    if kind == ".wav":
        assert soundfile.info(path).frames == len(sound)


def test_there_is_no_file_before_the_first_sound(tmp_path: Path) -> None:
    with SoundFile(tmp_path / "x.flac"):
        pass
    assert names(tmp_path) == []


def test_the_form_of_a_file_does_not_change(tmp_path: Path) -> None:
    with SoundFile(tmp_path / "x.wav") as file:
        file.write(AudioChunk(voice(0.1), 0, RATE_HZ, 0.0))
        for rate_hz, encoding in ((16000, "pcm16"), (RATE_HZ, "float32")):
            with pytest.raises(RequestError, match="has 24000 samples a second as pcm16"):
                file.write(AudioChunk(voice(0.1), 2400, rate_hz, 0.0, encoding))
    assert len(soundfile.read(tmp_path / "x.wav")[0]) == 2400


@pytest.mark.parametrize("name", ["x.aac", "x", "wav", "x.wav.gz", ".opus.tmp"])
def test_another_ending_is_told_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    acts: list[Callable[[Path], object]] = [SoundFile, lambda path: SoundEncoder(name, RATE_HZ), Audio(voice(0.1), RATE_HZ).save]
    for act in acts:
        with pytest.raises(RequestError, match="only WAV, FLAC, Ogg Vorbis, Opus and MP3 can be written") as told:
            act(tmp_path / name)
        assert told.value.hint == "Give a name that ends in .wav, .flac, .ogg, .opus or .mp3."
    assert names(tmp_path) == []


def test_rates_and_encodings_that_cannot_be(tmp_path: Path) -> None:
    for kind, rate_hz in ((".opus", 44100), (".opus", 11025), (".mp3", 96000)):
        with pytest.raises(RequestError, match=f"cannot have {rate_hz} samples a second, only 8000, "):
            SoundEncoder(kind, rate_hz)
        with pytest.raises(RequestError, match="cannot have"):
            Audio(voice(0.1, rate_hz), rate_hz).save(tmp_path / f"x{kind}")
    for kind in (".flac", *LOSSY):
        with pytest.raises(RequestError, match="does not hold samples as float32"):
            SoundEncoder(kind, RATE_HZ, "float32")
        Audio(voice(0.1), RATE_HZ, "float32").save(tmp_path / f"x{kind}")  # An answer that came so can be kept in any file.
    with pytest.raises(RequestError, match="none of that name"):
        SoundEncoder(".wav", RATE_HZ, "alaw")


BARE = """
import sys
import numpy as np
from omnistage.client import Audio, NotAvailableError, SoundFile
audio = Audio(np.zeros(240, np.float32), 24000)
audio.save(sys.argv[1] + "/x.wav")
for ending in ("flac", "ogg", "opus", "mp3"):
    try:
        SoundFile(f"{sys.argv[1]}/x.{ending}")
    except NotAvailableError as error:
        print(error, error.hint)
"""


def refusals(folder: Path, package: str = "") -> list[str]:
    """The lines of a program that has this package soundfile, or none. It has written a WAV and nothing else."""
    packages, files = folder / "packages", folder / "files"
    packages.mkdir()
    files.mkdir()
    if package:
        (packages / "soundfile.py").write_text(package)
    words = [*bare_python(), "-c", BARE, str(files)]
    said = subprocess.run(words, env=bare_environment(packages), capture_output=True, text=True, timeout=60, check=True).stdout
    assert names(files) == ["x.wav"]
    return said.splitlines()


def test_without_the_package_wav_remains(tmp_path: Path) -> None:
    lines = refusals(tmp_path)
    assert [line.split()[0] for line in lines] == ["FLAC", "Ogg", "Opus", "MP3"]
    assert all("not installed: soundfile" in line and "pip install 'soundfile" in line and ".wav needs nothing" in line for line in lines)


@pytest.mark.parametrize(
    ("package", "told"),
    [
        ("raise OSError('sndfile library not found')", "needs libsndfile, which does not load: sndfile library not found"),
        ("__libsndfile_version__ = '1.0.31'\ndef check_format(*_): return False", "libsndfile 1.0.31 cannot write it, 1.1 and later can"),
    ],
)
def test_a_library_that_does_not_load_or_is_too_old_is_told(tmp_path: Path, package: str, told: str) -> None:
    assert [told in line for line in refusals(tmp_path, package)] == [True] * 4


def test_an_answer_in_every_kind(toy_address: str, tmp_path: Path) -> None:
    own = formulas.audio(5, "Hello", formulas.NATURAL_LENGTH)[:, 0]
    with Omni(address=toy_address) as omni:
        for encoding, kind in itertools.product(("pcm16", "float32"), KINDS):
            with SoundFile(tmp_path / f"grown{kind}") as file:
                for event in omni.stream("Hello", seed=5, encoding=encoding):
                    if isinstance(event, AudioChunk):
                        assert event.encoding == encoding
                        file.write(event)
            answer = omni.generate("Hello", seed=5, encoding=encoding)
            assert answer.audio is not None and answer.audio.encoding == encoding
            answer.save(tmp_path / f"saved{kind}")
            for name in ("grown", "saved"):
                samples, rate_hz = soundfile.read(tmp_path / f"{name}{kind}", dtype="float32")
                assert (rate_hz, len(samples)) == (RATE_HZ, len(own))
                assert kind in LOSSY or np.array_equal(samples, own)
            if kind == ".wav":
                assert soundfile.info(tmp_path / "saved.wav").subtype == {"pcm16": "PCM_16", "float32": "FLOAT"}[encoding]


def test_float32_says_more_than_16_bit(toy_address: str) -> None:
    """Sound that was converted to another rate has values between those of 16 bit."""
    pytest.importorskip("soxr", reason="the models extra is not installed")
    with Omni(address=toy_address) as omni:
        fine, coarse = (omni.generate("Hello", seed=5, sample_rate_hz=16000, encoding=encoding).audio for encoding in ("float32", "pcm16"))
    assert fine is not None and coarse is not None
    assert np.array_equal(np.rint(fine.samples * 32768) / np.float32(32768), coarse.samples)
    assert not np.array_equal(fine.samples, coarse.samples)


def test_an_encoding_that_is_none_is_told(toy_address: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(BadRequestError, match="encoding: is 'mp3'; it must be pcm16 or float32"):
        omni.generate("Hello", encoding="mp3")
