"""A client that nobody told what to start draws with the default picture model, in the stack whose default model answers."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import lengths
from helpers.processes import ProcessFamily
from omnistage.client import AsyncOmni, BadRequestError, DeadlineError

pytestmark = lengths.long_form(
    "client/test_begin.py::test_it_is_started_once_for_all_threads_that_ask",
    "client/test_drawing.py::test_generate_draws_where_nothing_else_can_be_done",
    "models/diffusers/test_default_picture.py::test_a_picture_follows_its_prompt",
    unkept="the stack that nobody has chosen has both default models",
)

PROMPT = "a large red circle on a blue background"


async def test_the_default_stack_answers_and_draws(family: ProcessFamily) -> None:
    """The picture model starts with the first drawing, which waits for it; where the call's time is over before, the next one finds it."""
    omni = AsyncOmni(api_key="swordfish")
    try:
        await omni.start()
        assert [(one.name, one.state) for one in await omni.pipelines()] == [("smol", "ready"), ("picture", "starting")]
        with pytest.raises(DeadlineError):
            await omni.draw(PROMPT, timeout_s=0.2)
        drawn = await omni.draw(PROMPT, seed=7, outputs=["image", "latents", "pixels"])
        assert drawn.pipeline == "picture"
        shown = np.asarray(drawn.images[0])
        assert shown.shape == (128, 128, 3)
        assert shown[64, 64].argmax() == 0 and shown[2, 2].argmax() == 2, "red on blue"
        assert np.array_equal(drawn.rows["pixels"].reshape(shown.shape), shown)
        assert drawn.rows["latents"].dtype == np.float32 and drawn.rows["latents"].std() > 0
        named = await omni.draw(PROMPT, seed=7, pipeline=drawn.pipeline)
        assert named.pictures[0].data == drawn.pictures[0].data

        assert {(one.name, one.state) for one in await omni.pipelines()} == {("smol", "ready"), ("picture", "ready")}
        assert {replica.pipeline for replica in await omni.replicas()} == {"smol", "picture"}
        again = await omni.generate(PROMPT, seed=7, width=128)
        assert (again.pipeline, again.pictures[0].data) == ("picture", drawn.pictures[0].data)
        answer = await omni.generate("What is a kite?", outputs=["text"], max_tokens=4)
        assert (answer.pipeline, answer.pictures, answer.drew) == ("smol", (), False) and answer.text
        said = await omni.say("2 * 3, 你好 🙂!", max_frames=100)
        assert (said.unspoken, said.unspoken_words, said.drew, said.notes) == (3, "你好 🙂", False, ())
        other = await omni.say("2 * 3, 你好 🙂!", max_frames=100, seed=said.seed + 1)
        assert said.audio is not None and other.audio is not None and np.array_equal(said.audio.samples, other.audio.samples)
        assert (drawn.drew, drawn.notes) == (True, ())
        (note,) = (await omni.draw("a cat", seed=1)).notes
        assert note == "this model draws coloured shapes: circle, square, triangle, star, heart; this prompt names none of them"
        with pytest.raises(BadRequestError, match="smol does not draw"):
            await omni.draw(PROMPT, pipeline="smol")
        with pytest.raises(BadRequestError, match="picture does not speak a text"):
            await omni.say("Good morning.", pipeline="picture")
    finally:
        await omni.close()
    assert family.wait_ended() == []
