"""Answers in notebooks: HTML that holds the text, a player of the sound and the pictures, so that they stay in the notebook's file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from omnistage.client.encoder import channels_of
from omnistage.client.wav import to_pcm16, wav_head

LONGEST_S = 600.0
"""The most seconds of sound in a player. At 24,000 samples a second a millisecond takes 48 bytes, and a third more as base64."""

MOST_PICTURE_BYTES = 32 << 20
"""The most bytes of all pictures that are shown together."""

MOST_FILM_BYTES = 32 << 20
"""The most bytes of all films that are shown together."""

FILM_TYPES = ("video/webm", "video/mp4")
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")


def player(samples: NDArray[np.float32], sample_rate_hz: int) -> str:
    """HTML of a player with the sound as a WAV of 16 bit. samples: float32 [n] or [n, channels], full scale 1. If the sound is longer than
    `LONGEST_S`, the player has only its beginning, and a text says so."""
    shown = samples[: round(LONGEST_S * sample_rate_hz)]
    wav = wav_head(np.dtype("<i2"), channels_of(samples), sample_rate_hz, len(shown)) + to_pcm16(shown)
    html = f'<audio controls src="{_data_url("audio/wav", wav)}"></audio>'
    if len(shown) < len(samples):
        whole_s = len(samples) / sample_rate_hz
        html += f"<div>The first {LONGEST_S / 60:g} of {whole_s / 60:.1f} minutes; <code>save</code> writes all.</div>"
    return html


def pictures(encoded: Iterable[tuple[str, bytes]]) -> str:
    """HTML of pictures: those of types that browsers show, as far as they fit into `MOST_PICTURE_BYTES`, and the number of the others.
    encoded: (media type, bytes) of each."""
    html, room_bytes, hidden = "", MOST_PICTURE_BYTES, 0
    for media_type, data in encoded:
        if media_type in IMAGE_TYPES and len(data) <= room_bytes:
            room_bytes -= len(data)
            html += f'<img src="{_data_url(media_type, data)}">'
        else:
            hidden += 1
    if hidden:
        html += f"<div>{hidden} more in <code>pictures</code>, too large to be shown, or of another type.</div>"
    return html


def films(encoded: Iterable[tuple[str, bytes]]) -> str:
    """HTML of players of films. A film that is too large for the rest of `MOST_FILM_BYTES`, or of a type that browsers do not show, becomes
    a sentence. encoded: (media type, bytes) of each."""
    html, room_bytes = "", MOST_FILM_BYTES
    for media_type, data in encoded:
        if media_type in FILM_TYPES and len(data) <= room_bytes:
            room_bytes -= len(data)
            html += f'<video controls loop src="{_data_url(media_type, data)}"></video>'
        else:
            html += (
                "<div>One more in <code>videos</code>, too large to be shown, or of another type; its <code>save</code> writes it.</div>"
            )
    return html


def paragraph(text: str) -> str:
    """HTML of a text with its spaces and line breaks."""
    from html import escape  # The module's table of names is only for notebooks.

    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{b64encode(data).decode('ascii')}"
