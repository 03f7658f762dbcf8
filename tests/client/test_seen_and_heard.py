"""Pictures and sound that a client sends are what the model sees and hears."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from helpers.families import PICTURE, SOUND
from helpers.servers import CHAIN, family_logic, local_router, local_stage
from omnistage.client import AsyncOmni, BadRequestError, Omni
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.router.pipeline import load_pipeline


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a router whose pipeline sees pictures and hears sound."""
    async with AsyncExitStack() as house:
        stages = {kind: (await house.enter_async_context(local_stage(family_logic("toy-omni", kind)))).address for kind in CHAIN}
        yield (await house.enter_async_context(local_router(stages, load_pipeline("toy-omni")))).address


def said(*seen: formulas.Seen) -> str:
    items = formulas.items(["u", *seen])
    return "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))


async def test_a_picture_and_a_sound_of_a_client_are_in_what_is_said(address: str) -> None:
    async with AsyncOmni(address=address) as omni:
        picture, sound = png(PICTURE), wav(SOUND, formulas.SAMPLE_RATE_HZ)
        answer = await omni.generate("What is it?", images=[picture], audios=[sound], seed=3)
        assert answer.text == said(PICTURE, SOUND, "What is it?")
        items = formulas.items(["u", PICTURE, SOUND, "What is it?"])
        tokens = [formulas.omni_token(3, items, n) for n in range(formulas.NATURAL_LENGTH)]
        assert answer.audio is not None
        np.testing.assert_array_equal(answer.audio.samples, formulas.samples(formulas.omni_frames(items, tokens))[:, 0])
        with pytest.raises(BadRequestError, match="PNG"):
            await omni.generate("What is it?", images=[picture[:60]], seed=3)


async def test_media_and_text_are_seen_in_the_order_in_which_they_were_given(address: str) -> None:
    picture = png(PICTURE)
    content: list[dict[str, object]] = [
        {"type": "text", "text": "First "},
        {"type": "audio", "audio": (SOUND, formulas.SAMPLE_RATE_HZ)},
        {"type": "text", "text": "then"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}},
        {"type": "image", "image": io.BytesIO(picture)},
    ]
    expected = said("First ", SOUND, "then", PICTURE, PICTURE)
    assert expected != said(PICTURE, PICTURE, SOUND, "First then")
    async with AsyncOmni(address=address) as omni:
        assert (await omni.chat([{"role": "user", "content": content}], seed=3))["content"] == expected

    def ask() -> str:
        with Omni(address=address) as sync:
            content[-1]["image"] = picture
            return sync.chat([{"role": "user", "content": content}], seed=3)["content"]

    assert await asyncio.to_thread(ask) == expected


async def test_pictures_come_before_sounds_and_both_before_the_text(address: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(png(PICTURE))
    turn = {"role": "user", "content": "What?", "audios": [(SOUND, formulas.SAMPLE_RATE_HZ)], "images": [path, str(path)]}
    async with AsyncOmni(address=address) as omni:
        answer = await omni.chat([turn], seed=3)
    assert answer["content"] == said(PICTURE, PICTURE, SOUND, "What?")


async def test_a_film_is_refused_by_a_pipeline_that_takes_none(address: str) -> None:
    async with AsyncOmni(address=address) as omni:
        with pytest.raises(BadRequestError, match=r"takes text, image and audio, not 'video/mp4'"):
            await omni.generate("What?", videos=[bytes(4) + b"ftypisom"])
