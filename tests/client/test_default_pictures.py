"""A client that nobody told what to start draws with the default picture model, beside the default model that answers."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.processes import Family
from omnistage.client import AsyncOmni, BadRequestError, Omni

pytestmark = pytest.mark.slow

PROMPT = "a large red circle on a blue background"


def test_the_default_stack_draws_and_answers(family: Family) -> None:
    with Omni() as omni:
        assert [one.name for one in omni.pipelines()] == ["smol"]
        with pytest.raises(BadRequestError, match="smol has no diffusion") as error:
            omni.generate(PROMPT, width=128)
        assert error.value.hint == "`draw` draws, with a stack of the default picture model."

        drawn = omni.draw(PROMPT, seed=7, outputs=["image", "latents", "pixels"])
        assert drawn.pipeline == "picture"
        shown = np.asarray(drawn.images[0])
        assert shown.shape == (128, 128, 3)
        assert shown[64, 64].argmax() == 0 and shown[2, 2].argmax() == 2, "red on blue"
        assert np.array_equal(drawn.rows["pixels"].reshape(shown.shape), shown)
        assert drawn.rows["latents"].dtype == np.float32 and drawn.rows["latents"].std() > 0

        assert [one.name for one in omni.pipelines()] == ["smol", "picture"]
        assert {replica.pipeline for replica in omni.replicas()} == {"smol", "picture"}
        for again in (
            omni.draw(PROMPT, seed=7, pipeline=drawn.pipeline),
            omni.generate(PROMPT, seed=7, pipeline=drawn.pipeline),
            omni.generate(PROMPT, seed=7, width=128),
        ):
            assert (again.pipeline, again.pictures[0].data) == ("picture", drawn.pictures[0].data)
        answer = omni.generate("What is a kite?", outputs=["text"], max_tokens=4)
        assert (answer.pipeline, answer.pictures) == ("smol", ()) and answer.text
        with pytest.raises(BadRequestError, match="smol has no diffusion") as error:
            omni.draw(PROMPT, pipeline="smol")
        assert error.value.hint == "These draw: picture."
        with pytest.raises(BadRequestError, match="picture has no thinker"):
            omni.say("Good morning.", pipeline="picture")
    assert family.wait_ended() == []


async def test_who_only_draws_starts_no_other_stack(family: Family) -> None:
    omni = AsyncOmni()
    try:
        calls = [await omni.draw(PROMPT, seed=7, **named) for named in ({}, {"pipeline": "picture"})]  # type: ignore[arg-type]
        assert calls[0].pictures[0].data == calls[1].pictures[0].data and omni.address == ""
    finally:
        await omni.close()
    assert family.wait_ended() == []
