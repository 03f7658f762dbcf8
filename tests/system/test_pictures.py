"""Pictures by real processes: what Diffusers draws of the same folder, whoever else draws beside it, goes away or is lost on the way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from helpers import lengths, media_files
from helpers.ask import WholeAnswer, ask, read, refused
from helpers.disturbed import DisturbanceStep, ask_through, disturbed, holder, kill_when
from helpers.drawings import checkpoint
from helpers.drawn import check_near, drawing, drawn_by_diffusers, files_of, pixels, steps_of
from helpers.fleet import Fleet
from helpers.loras import random_lora
from helpers.servers import ServerProcess, all_free, omni_stub, stack, stage_flags
from helpers.stable_diffusion import SIDE as WHOLE_SIDE
from helpers.stable_diffusion import stable_diffusion
from omnistage.client import AsyncOmni, BadRequestError, Done, Picture, Progress, Rows
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.v1 import stage_pb2

SIDE = 64
USUAL = {"width": SIDE, "height": SIDE, "steps": 4, "max_steps": 1000, "max_tokens": 1 << 16}
EDITED = {"steps": 4, "condition_area": SIDE * SIDE}
ENDLESS: Mapping[str, Any] = {"width": 768, "height": 768, "steps": 1000}
"""A picture that takes minutes."""
LARGE = 512
"""Side of a picture that takes long to decode, beside the time in which a process is killed."""

IDLE_S = 30.0
LOOK_S = 0.5
BUSY = 0.1
"""Part of the time that a thread computes: whoever draws does nothing else, and an event loop that only waits does much less."""

PIPELINE = {"description": "For a test.", "outputs": ["image", "progress"], "stages": [{"kind": "diffusion", "family": "diffusers"}]}
PIPELINES: Mapping[str, Mapping[str, object]] = {
    "painter": {"inputs": ["text"], "on_request": ["latents", "pixels"]},
    "editor": {"inputs": ["text", "image"]},
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two that draw from words, one that edits, and a router that serves them as two pipelines."""
    folder = tmp_path_factory.mktemp("house")
    for name, pipeline in PIPELINES.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"name": name, **PIPELINE, **pipeline}))
    running = Fleet(folder)
    try:
        for name in ("painter-0", "painter-1"):
            running.add(name, "omnistage.diffusion", *stage_flags(USUAL, "diffusers"), *of_checkpoint("z-image"))
        running.add("editor-0", "omnistage.diffusion", *stage_flags(EDITED, "diffusers"), *of_checkpoint("qwen-image-edit"))
        running.ready()
        stages = ",".join(f"{name}/diffusion={running.address(replica)}" for name in PIPELINES for replica in running.of(name))
        files = ",".join(str(folder / f"{name}.yaml") for name in PIPELINES)
        running.add("router", "omnistage.router", "--pipeline", files, "--stages", stages, "--grace", "5")
        running.ready("router")
        yield running
    except BaseException as error:
        error.add_note(running.logs())
        raise
    finally:
        running.close()


def of_checkpoint(name: str) -> list[str]:
    return ["--checkpoint", str(checkpoint(name)), "--dtype", "float32"]


@lengths.drawn_cells(1, "guidance", [0.0, 5.0])
async def test_a_picture_is_the_one_that_diffusers_draws(house: Fleet, seed: int, guidance: float) -> None:
    """A negative prompt only where there is guidance: else it would have no effect, which is refused."""
    said = {"negative_prompt": "rain"} if guidance else {}
    asked = drawing("a house on a hill, 写着", seed, width=128, height=96, steps=5, guidance_scale=guidance, **said)
    async with omni_stub(house.address("router")) as stub:
        answer = await ask(stub, asked)
    answer.check_whole()
    (file,) = files_of(answer)
    wanted = drawn_by_diffusers(
        checkpoint("z-image"), seed, asked.diffusion.prompt, width=128, height=96, num_inference_steps=5, guidance_scale=guidance, **said
    )
    check_near(pixels(file), wanted)


@lengths.long_form(
    "models/diffusers/test_pipelines.py::test_a_picture_is_that_of_the_pipeline",
    "models/diffusers/test_own_options.py::test_a_photo_of_any_size_is_resized_once_as_the_pipeline_does_it",
)
async def test_an_edited_picture_is_the_one_that_diffusers_draws(house: Fleet, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers makes what it edits as large as a million pixels; here it is told to be content with as few as the stage."""
    edit = diffusers.pipelines.qwenimage.pipeline_qwenimage_edit
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio, of=edit.calculate_dimensions: of(SIDE * SIDE, ratio))
    file = media_files.picture(seed)
    given = [stage_pb2.Media(data=file, media_type="image/png")]
    async with omni_stub(house.address("router")) as stub:
        answer = await ask(stub, drawing("make it night", seed, "editor", images=given, width=96, height=64, steps=4))
    given_to_diffusers = Image.open(io.BytesIO(file)).convert("RGB")
    said: dict[str, Any] = {"true_cfg_scale": 4.0, "negative_prompt": " ", "num_inference_steps": 4}
    wanted = drawn_by_diffusers(checkpoint("qwen-image-edit"), seed, "make it night", image=given_to_diffusers, width=96, height=64, **said)
    check_near(pixels(*files_of(answer)), wanted)


@lengths.drawn_cells(1, "way", ["cancelled", "closed", "disconnected"])
async def test_who_goes_away_is_not_drawn_for_any_more(house: Fleet, seed: int, way: str) -> None:
    """It would go on for minutes; long before that nothing of it is left, and the thread that drew it computes nothing."""
    stages, endless = [house.address(name) for name in house.stages], drawing("a hill", seed, **ENDLESS)
    if way == "closed":
        stream = {"pipeline": "painter", **ENDLESS}
        async with AsyncOmni(address=house.address("router")) as omni, aclosing(omni.stream_draw("a hill", **stream)) as events:
            async for event in events:
                if isinstance(event, Progress) and event.done:
                    drawing_one = await holder(house, "painter")
                    break
    else:
        async with omni_stub(house.address("router")) as stub:
            call, answer = stub.Generate(endless, timeout=120), WholeAnswer()
            while len(steps_of(answer)) < 2:
                answer.take(await read(call))
            drawing_one = await holder(house, "painter")
            if way == "cancelled":
                call.cancel()
    await all_free(stages)
    await idle(house.server(drawing_one))
    async with omni_stub(house.address("router")) as stub:
        for _ in range(2):
            assert len(files_of(await ask(stub, drawing("a hill", seed)))) == 1


async def idle(server: ServerProcess) -> None:
    """Return when no thread of a process computes. Raises TimeoutError."""
    async with asyncio.timeout(IDLE_S):
        while True:
            before = spent(server.pid)
            await asyncio.sleep(LOOK_S)
            if max(ticks - before.get(thread, 0) for thread, ticks in spent(server.pid).items()) < BUSY * LOOK_S * os.sysconf("SC_CLK_TCK"):
                return


def spent(pid: int) -> dict[str, int]:
    """CPU time of each thread of a process, in ticks of the clock."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        found[thread.name] = int(fields[11]) + int(fields[12])
    return found


KEPT = {"20": 0, "150": 125}
"""The step that was kept, by the one that is drawn when a process is killed."""


@lengths.one_or_all("killed_at", KEPT)
async def test_one_is_killed_in_mid_picture(house: Fleet, seed: int, killed_at: str) -> None:
    """The other goes on at the last step whose latents were kept, or at the first: the same file, for its steps are nobody else's."""
    killed_at = lengths.draw(killed_at, KEPT, seed)
    at, kept = int(killed_at), KEPT[killed_at]
    asked = drawing("a hill", seed, width=128, height=128, steps=250)

    async with disturbed(house, alike=False, after=drawing("after")) as stub:
        answer = await ask_through(
            stub, asked, kill_when(lambda answer: bool(steps_of(answer)) and steps_of(answer)[-1][0] >= at, house, "painter")
        )
        answer.check_whole()
        assert len(answer.failovers) == 1
        steps = [done for done, _ in steps_of(answer)]
        falls = [after for before, after in pairwise(steps) if after < before]
        assert len(falls) <= 1 and steps[-1] == 250
        # Where it goes on is told at once, but a later step may already have taken the place of that.
        assert all(step >= kept and min(step - begun for begun in (0, 63, 125, 188) if begun <= step) < 30 for step in falls)
        (file,) = files_of(answer)
        assert pixels(file).std() > 5 and [file] == files_of(await ask(stub, asked))


@lengths.long_form(
    "system/test_pictures.py::test_one_is_killed_in_mid_picture",
    "models/diffusers/test_model.py::test_a_drawing_goes_on_at_the_step_that_was_kept",
    "models/diffusers/test_pipelines.py::test_pictures_that_join_one_by_one_are_those_drawn_alone",
)
async def test_those_of_one_that_is_killed_go_on_beside_those_of_the_other(house: Fleet, seed: int) -> None:
    """Each is what it is alone, to rounding: from there on all share the steps of one process."""
    asked = [drawing("hill " * (1 + n), seed + n, steps=100 + 10 * n, guidance_scale=n % 3) for n in range(4)]

    async with disturbed(house, alike=False, after=drawing("after")) as stub:
        halfway = kill_when(lambda answer: bool(steps_of(answer)) and steps_of(answer)[-1][0] >= 30, house, "painter")
        answers = await asyncio.gather(ask_through(stub, asked[0], halfway), *(ask(stub, one) for one in asked[1:]))
        assert 0 < sum(len(answer.failovers) for answer in answers) < 4
        for one, answer in zip(asked, answers, strict=True):
            answer.check_whole()
            (found,), (wanted,) = files_of(answer), files_of(await ask(stub, one))
            check_near(pixels(found), pixels(wanted))


@lengths.long_form(
    "models/diffusers/test_model.py::test_of_several_results_those_that_somebody_has_are_not_drawn_again",
    "models/diffusers/test_model.py::test_of_what_was_kept_only_those_pictures_that_are_wanted_go_on",
    "system/test_pictures.py::test_one_is_killed_in_mid_picture",
)
async def test_one_is_killed_after_the_first_of_three_pictures(house: Fleet, seed: int) -> None:
    """That one does not come again, and all three are those of who is not disturbed."""
    asked, drawing_one = drawing("a hill", seed, width=LARGE, height=LARGE, steps=2, guidance_scale=0, results=3), list[str]()

    async def look() -> None:
        drawing_one.append(await holder(house, "painter"))

    async def kill() -> None:
        house.kill(drawing_one[0])

    async with disturbed(house, alike=False, after=drawing("after")) as stub:
        steps = (
            DisturbanceStep(lambda answer: bool(steps_of(answer)), look),
            DisturbanceStep(lambda answer: len(files_of(answer)) == 1, kill),
        )
        answer = await ask_through(stub, asked, *steps)
        answer.check_whole()
        assert len(answer.failovers) == 1
        quiet_answer = await ask(stub, asked)
        assert len(files_of(answer)) == len(files_of(quiet_answer)) == 3
        for found, wanted in zip(files_of(answer), files_of(quiet_answer), strict=True):
            check_near(pixels(found), pixels(wanted))
        assert files_of(answer)[0] == files_of(quiet_answer)[0] and len(set(files_of(answer))) == 3


def media(data: bytes, media_type: str = "image/png") -> list[stage_pb2.Media]:
    return [stage_pb2.Media(data=data, media_type=media_type)]


def said_to_be(file: bytes, width: int, height: int) -> bytes:
    """A PNG whose header says so."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + file[24:29]
    return file[:12] + header + zlib.crc32(header).to_bytes(4, "big") + file[33:]


GOOD = media_files.picture(1)
Bad = Sequence[tuple[str, Mapping[str, object], str]]
OF_ANY: Bad = (
    ("steps that are too many", {"steps": 1001}, "steps"),
    ("steps that were below 0", {"steps": (1 << 32) - 1}, "steps"),
    ("a width that is no multiple", {"width": 72}, "width"),
    ("a height that is no multiple", {"height": 33}, "height"),
    ("a side below the least", {"width": 16}, "width"),
    ("one pixel", {"height": 1}, "height"),
    ("more pixels than are drawn", {"width": 8192, "height": 8192}, "width"),
    ("a side of no picture", {"height": (1 << 32) - 1}, "height"),
    ("more pixels times steps than are drawn", {"width": 2048, "height": 2048, "results": 8, "steps": 200}, "steps"),
    ("no prompt", {"prompt": ""}, "prompt"),
    ("a blank prompt", {"prompt": " \n\t "}, "prompt"),
    ("a prompt of too many tokens", {"prompt": "hill " * 3000}, "prompt"),
    ("a prompt of too many characters", {"prompt": "a" * 32_001}, "prompt"),
    ("a negative prompt of too many characters", {"negative_prompt": "a" * 32_001, "guidance_scale": 4}, "negative_prompt"),
    ("a negative prompt of too many tokens", {"negative_prompt": "hill " * 3000, "guidance_scale": 4}, "negative_prompt"),
    ("a negative prompt without guidance", {"negative_prompt": "rain", "guidance_scale": 0}, "negative_prompt"),
    ("guidance that is no number", {"guidance_scale": float("nan")}, "guidance_scale"),
    ("guidance without end", {"guidance_scale": float("inf")}, "guidance_scale"),
    ("guidance of 1e9", {"guidance_scale": 1e9}, "guidance_scale"),
    ("guidance above what is taken", {"guidance_scale": 31}, "guidance_scale"),
    ("guidance below 0", {"guidance_scale": -1}, "guidance_scale"),
    ("nine results", {"results": 9}, "results"),
    ("layers", {"layers": 2}, "layers"),
    ("a film", {"frames": 9}, "frames"),
    ("sound", {"duration_s": 1.0}, "duration_s"),
    ("sound of no length that there is", {"duration_s": float("nan")}, "duration_s"),
    ("a type that there is not", {"media_type": "image/tiff"}, "media_type"),
    ("a type of something else", {"media_type": "video/mp4"}, "media_type"),
    ("no type at all", {"media_type": "../../png"}, "media_type"),
    ("seventeen previews", {"previews": 17}, "previews"),
    ("a preview that is too large", {"previews": 1, "preview_side": 1025}, "preview_side"),
)
BAD: Mapping[str, Bad] = {
    "painter": (*OF_ANY, ("a picture", {"images": media(GOOD)}, "images")),
    "editor": (
        *OF_ANY,
        ("one step, which this schedule cannot take", {"steps": 1}, "steps"),
        ("no picture", {"images": []}, "images"),
        ("two pictures", {"images": media(GOOD) * 2}, "images"),
        ("a picture without bytes", {"images": media(b"")}, "images.data"),
        ("a picture that is cut", {"images": media(GOOD[:-300])}, "images"),
        ("words instead of a picture", {"images": media(b"no picture")}, "images"),
        ("a sound", {"images": media(media_files.sound(1), "audio/wav")}, "images"),
        ("a sound that is said to be a picture", {"images": media(media_files.sound(1))}, "images"),
        ("a picture of no type", {"images": media(GOOD, "")}, "images.media_type"),
        ("a picture that says that it is huge", {"images": media(said_to_be(GOOD, 60_000, 60_000))}, "images"),
        ("a picture that says that it has no width", {"images": media(said_to_be(GOOD, 0, 60))}, "images"),
        ("a picture that is too long", {"images": media(media_files.picture(1, 4, 8000))}, "images"),
    ),
}


@pytest.mark.parametrize("pipeline", BAD)
async def test_what_cannot_be_drawn_is_told_and_the_next_good_request_works(house: Fleet, pipeline: str, subtests: pytest.Subtests) -> None:
    """At once, before anything is drawn: of all that Diffusers itself would make noise, a black picture or an error without sense."""
    good: dict[str, Any] = {"images": media(GOOD)} if pipeline == "editor" else {}
    async with omni_stub(house.address("router")) as stub:
        for name, fields, field in BAD[pipeline]:
            with subtests.test(name):
                refusal = await refused(stub, drawing(**{"pipeline": pipeline, **good, **fields}))
                assert (refusal.code.name, refusal.reason) == ("INVALID_ARGUMENT", "BAD_REQUEST")
                assert refusal.metadata["field"] == f"diffusion.{field}" and refusal.fields == [f"diffusion.{field}"]
                assert len(refusal.message) < 300
        for _ in house.of(pipeline):
            answer = await ask(stub, drawing(pipeline=pipeline, **good))
            answer.check_whole()
            assert len(files_of(answer)) == 1 and steps_of(answer)[-1] == (4, 4)
    await all_free([house.address(name) for name in house.stages])
    assert all(house.server(name).alive for name in house.names)


LATENTS, PIXELS = "latents", "pixels"
OF_ROWS: Mapping[str, Any] = {"outputs": ["image", LATENTS, PIXELS], "guidance_scale": 0.0}
ABOVE_INLINE = 64 << 10
"""Tensors of as many bytes go through shared memory, where the reader can see it."""


async def test_latents_and_pixels_come_in_the_message_however_large(house: Fleet, seed: int) -> None:
    """A client is on whatever machine: nothing that it gets points into the memory of a stage."""
    side = 256
    asked = drawing("a hill", seed, width=side, height=side, steps=2, guidance_scale=0, results=2)
    asked.outputs.extend([LATENTS, PIXELS])
    async with omni_stub(house.address("router")) as stub:
        answer = await ask(stub, asked)
    answer.check_whole()
    tensors = [chunk.tensor for port in (LATENTS, PIXELS) for chunk in answer.of(port) if chunk.count]
    assert {tensor.WhichOneof("place") for tensor in tensors} == {"inline"}
    assert min(tensor.inline.total_bytes for tensor in tensors) >= ABOVE_INLINE
    assert not answer.of("image") and not answer.of("progress")

    async with AsyncOmni(address=house.address("router")) as omni:
        (offered,) = [one for one in await omni.pipelines() if one.name == "painter"]
        assert (offered.outputs, offered.on_request) == (("image", "progress"), (LATENTS, PIXELS))
        both = await omni.draw("a hill", pipeline="painter", seed=seed, width=side, height=side, steps=2, results=2, **OF_ROWS)
        async with aclosing(omni.stream_draw("a hill", pipeline="painter", seed=seed, steps=2, **OF_ROWS)) as events:
            small = [event async for event in events if isinstance(event, Rows)]
        assert not (await omni.draw("a hill", pipeline="painter", seed=seed, steps=2)).rows
    shown = np.stack([np.asarray(image) for image in both.images])
    assert np.array_equal(both.rows[PIXELS].reshape(2, side, side, 3), shown) and both.rows[PIXELS].dtype == np.uint8
    latents = both.rows[LATENTS]
    assert latents.shape == (2 * (side // 8) ** 2, 16) and latents.dtype == np.float32 and np.isfinite(latents).all()
    assert not np.array_equal(latents[: len(latents) // 2], latents[len(latents) // 2 :])
    for port, tensors_of in ((LATENTS, np.float32), (PIXELS, np.uint8)):
        sent = [chunk.tensor.inline.data for chunk in answer.of(port) if chunk.count]
        assert b"".join(sent) == both.rows[port].astype(tensors_of).tobytes(), "whatever else is asked for"
    assert [(rows.port, rows.first_row, rows.rows.shape) for rows in small] == [
        (LATENTS, 0, ((SIDE // 8) ** 2, 16)),
        (PIXELS, 0, (SIDE * SIDE, 3)),
    ]


@lengths.long_form(
    "models/diffusers/test_model.py::test_latents_and_pixels_come_on_ports_of_their_own",
    "client/test_reader.py::test_a_row_that_comes_in_parts_is_put_together_also_after_a_loss",
    "system/test_pictures.py::test_one_is_killed_in_mid_picture",
)
async def test_rows_go_on_where_they_were_when_a_replica_is_killed(house: Fleet, seed: int) -> None:
    said: dict[str, Any] = {"pipeline": "painter", "seed": seed, "width": LARGE, "height": LARGE, "steps": 2, "results": 3, **OF_ROWS}
    said["outputs"] = [*said["outputs"], "progress"]
    async with disturbed(house, alike=False, after=drawing("after")), AsyncOmni(address=house.address("router")) as omni:
        rows: dict[str, list[Rows]] = {LATENTS: [], PIXELS: []}
        drawing_one, killed, done = "", False, None
        async with aclosing(omni.stream_draw("a hill", **said)) as events:
            async for event in events:
                match event:
                    case Progress() if not drawing_one:
                        drawing_one = await holder(house, "painter")
                    case Picture() if not killed:
                        killed = True
                        house.kill(drawing_one)
                    case Rows():
                        rows[event.port].append(event)
                    case Done():
                        done = event
        assert done is not None and len(done.failovers) == 1
        quiet_answer = await omni.draw("a hill", **said)
    for port, pieces in rows.items():
        ends = [piece.first_row + len(piece.rows) for piece in pieces]
        assert [piece.first_row for piece in pieces] == [0, *ends[:-1]], "without gap or repeat"
        found, wanted = np.concatenate([piece.rows for piece in pieces]), quiet_answer.rows[port]
        assert found.shape == wanted.shape and np.abs(found.astype(np.float32) - wanted).max() <= (1 if port == PIXELS else 1e-4)


@lengths.long_form(
    "models/diffusers/test_whole.py::test_a_picture_is_that_of_the_pipeline",
    "models/diffusers/test_lora.py::test_whole_calls_draw_with_it_too",
    "models/diffusers/test_own_options.py::test_an_option_that_a_pipeline_cannot_follow_is_not_offered",
    "router/test_pipeline.py::test_what_a_pipeline_may_give_it_gives_where_a_stage_has_it",
)
async def test_a_pipeline_by_whole_calls_draws_and_offers_no_rows(seed: int, tmp_path: Path) -> None:
    """By the file that comes along, which promises what every checkpoint can give."""
    lora = random_lora(load_pipeline(stable_diffusion(), torch.float32), "unet", tmp_path / "style.safetensors", seed=seed)
    flags = ("--checkpoint", str(stable_diffusion()), "--dtype", "float32", "--options", json.dumps({"lora": str(lora)}))
    with stack(tmp_path, kinds=["diffusion"], pipeline="diffusers", family="diffusers", stage_args=flags) as running:
        async with AsyncOmni(address=running.address) as omni:
            (offered,) = await omni.pipelines()
            assert (offered.inputs, offered.outputs, offered.on_request) == (("text",), ("image", "progress"), ())
            with pytest.raises(BadRequestError, match="diffusers gives image, progress, not 'latents'"):
                await omni.draw("a hill", outputs=["image", LATENTS])
            with pytest.raises(BadRequestError, match="step_cache"):
                await omni.draw("a hill", step_cache=0.5)
            with pytest.raises(BadRequestError, match="guidance_rescale is 'x': give a number"):
                await omni.draw("a hill", options={"guidance_rescale": "x"})
            with pytest.raises(BadRequestError, match="has no option 'clip_skip': it has guidance_rescale"):
                await omni.draw("a hill", options={"clip_skip": 0})
            async with aclosing(omni.stream_draw("a hill", seed=seed, steps=3, options={"guidance_rescale": 0.5})) as events:
                *told, picture, done = [event async for event in events]
            again = await omni.draw("a hill", seed=seed, steps=3, options={"guidance_rescale": 0.5})
    assert isinstance(done, Done) and isinstance(picture, Picture)
    assert [(event.done, event.total) for event in told if isinstance(event, Progress)][-1] == (3, 3)
    assert again.pictures[0].data == picture.data and not again.rows
    said = {"width": WHOLE_SIDE, "height": WHOLE_SIDE, "num_inference_steps": 3}
    wanted = drawn_by_diffusers(stable_diffusion(), seed, "a hill", lora, guidance_rescale=0.5, **said)
    check_near(pixels(picture.data), wanted)
