"""Pictures and sound that a client sends are what the model sees and hears."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest

from helpers.families import PICTURE, SOUND
from helpers.servers import CHAIN, family_logic, local_router, local_stage
from omnistage.client import AsyncOmni, BadRequestError
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.router.pipeline import load_pipeline


async def test_a_picture_and_a_sound_of_a_client_are_in_what_is_said():
    async with AsyncExitStack() as house:
        stages = {kind: (await house.enter_async_context(local_stage(family_logic("toy-omni", kind)))).address for kind in CHAIN}
        router = await house.enter_async_context(local_router(stages, load_pipeline("toy-omni")))
        omni = await house.enter_async_context(AsyncOmni(address=router.address))
        picture, sound = png(PICTURE), wav(SOUND, formulas.SAMPLE_RATE_HZ)
        answer = await omni.generate("What is it?", images=[picture], audios=[sound], seed=3)
        items = formulas.items(["u", PICTURE, SOUND, "What is it?"])
        tokens = [formulas.omni_token(3, items, n) for n in range(formulas.NATURAL_LENGTH)]
        assert answer.text == "".join(map(formulas.word, tokens))
        assert answer.audio is not None
        np.testing.assert_array_equal(answer.audio.samples, formulas.samples(formulas.omni_frames(items, tokens))[:, 0])
        with pytest.raises(BadRequestError, match="PNG"):
            await omni.generate("What is it?", images=[picture[:60]], seed=3)
