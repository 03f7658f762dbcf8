"""Pictures by real processes: what Diffusers draws of the same folder, whoever goes away or is lost on the way."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from helpers import lengths, media_files
from helpers.ask import WholeAnswer, ask, read, refused
from helpers.disturbed import ask_through, disturbed, holder, kill_when
from helpers.drawings import checkpoint
from helpers.drawn import drawing, files_of, pixels, steps_of
from helpers.fleet import Fleet
from helpers.servers import ServerProcess, all_free, omni_stub, stage_flags
from omnistage.client import AsyncOmni, Progress, Rows
from omnistage.models.diffusers.folder import mute_libraries
from omnistage.v1 import stage_pb2

SIDE = 64
USUAL = {"width": SIDE, "height": SIDE, "steps": 4, "max_steps": 1000, "max_tokens": 1 << 16}
EDITED = {"steps": 4, "condition_area": SIDE * SIDE}
ENDLESS: Mapping[str, Any] = {"width": 768, "height": 768, "steps": 1000}
"""A picture that takes minutes."""

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
    with Fleet(folder) as running:
        for name in ("painter-0", "painter-1"):
            running.add(name, "omnistage.diffusion", *stage_flags(USUAL, "diffusers"), *of_checkpoint("z-image"))
        running.add("editor-0", "omnistage.diffusion", *stage_flags(EDITED, "diffusers"), *of_checkpoint("qwen-image-edit"))
        running.ready()
        stages = ",".join(f"{name}/diffusion={running.address(replica)}" for name in PIPELINES for replica in running.of(name))
        files = ",".join(str(folder / f"{name}.yaml") for name in PIPELINES)
        running.add("router", "omnistage.router", "--pipeline", files, "--stages", stages, "--grace", "5")
        running.ready("router")
        yield running


def of_checkpoint(name: str) -> list[str]:
    return ["--checkpoint", str(checkpoint(name)), "--dtype", "float32"]


@lengths.drawn_cells(1, "guidance", [0.0, 5.0])
async def test_a_picture_is_the_one_that_diffusers_draws(house: Fleet, seed: int, guidance: float) -> None:
    """A negative prompt only where there is guidance: else it would have no effect, which is refused."""
    said: dict[str, Any] = {"negative_prompt": "rain"} if guidance else {}
    asked = drawing("a house on a hill, 写着", seed, width=128, height=96, steps=5, guidance_scale=guidance, **said)
    async with omni_stub(house.address("router")) as stub:
        answer = await ask(stub, asked)
    answer.check_whole()
    with mute_libraries():
        pipe: Any = DiffusionPipeline.from_pretrained(checkpoint("z-image"), local_files_only=True, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    said |= {"width": 128, "height": 96, "num_inference_steps": 5, "guidance_scale": guidance}
    image = pipe(prompt=asked.diffusion.prompt, generator=torch.Generator().manual_seed(seed), **said).images[0]
    (file,), wanted = files_of(answer), np.asarray(image).astype(np.int16)
    assert pixels(file).shape == wanted.shape and wanted.std() > 5 and np.abs(pixels(file) - wanted).max() <= 1


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
