"""Films of Wan and sound of Stable Audio by real processes: it is the same when one is killed at a step or while it decodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, ask
from helpers.disturbed import ask_through, begun, disturbed, kill_when
from helpers.drawings import checkpoint
from helpers.drawn import drawing, steps_of
from helpers.fleet import Fleet
from helpers.moving import frames_of, show_same_frames
from helpers.servers import stage_flags

pytestmark = [
    lengths.long_form(
        "router/test_chain.py::test_a_film_maker_that_is_lost_in_mid_film_leaves_no_gap",
        "router/test_chain.py::test_a_drawing_that_is_lost_between_steps_goes_on_with_all_that_its_sampler_remembers",
        "models/diffusers/test_wan_model.py::test_a_film_goes_on_from_what_was_kept_with_the_same_bits",
        "models/diffusers/test_film_files.py::test_who_has_some_of_a_film_gets_the_rest_of_its_file",
        "models/diffusers/test_stable_audio.py::test_a_sound_goes_on_from_what_was_kept_with_the_same_bits",
    )
]

STEPS = 12


class FilmPort(NamedTuple):
    """The product of a pipeline. port: the port of its items."""

    checkpoint: str
    port: str
    asked: Mapping[str, Any]


MADE = {
    "film": FilmPort("wan2.2-t2v", "video", {"width": 128, "height": 128, "frames": 49, "steps": STEPS, "guidance_scale_2": 3.0}),
    "sound": FilmPort("stable-audio", "audio", {"duration_s": 2.9, "steps": STEPS}),
}


def steps(count: int) -> Callable[[WholeAnswer], bool]:
    return lambda answer: bool(steps_of(answer)) and steps_of(answer)[-1][0] >= count


def decoded(port: str) -> Callable[[WholeAnswer], bool]:
    """A piece of the file has come, and not the last one."""
    return lambda answer: bool(answer.of(port)) and not answer.of(port)[-1].last


MOMENTS = {"opened": begun, **{f"step {count}": steps(count) for count in (1, 5, 8, STEPS - 1)}}
CELLS = {f"{name}, {moment}": (name, moment) for name in MADE for moment in (*MOMENTS, "decoding")}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two that make films, two that make sound, and a router of both."""
    folder = tmp_path_factory.mktemp("films")
    with Fleet(folder) as running:
        for name, made in MADE.items():
            told = {"name": name, "description": "For a test.", "inputs": ["text"], "outputs": [made.port, "progress"]}
            (folder / f"{name}.yaml").write_text(json.dumps({**told, "stages": [{"kind": "diffusion", "family": "diffusers"}]}))
            for number in range(2):
                flags = (*stage_flags({}, "diffusers"), "--checkpoint", str(checkpoint(made.checkpoint)), "--dtype", "float32")
                running.add(f"{name}-{number}", "omnistage.diffusion", *flags)
        running.ready()
        running.add("router", "omnistage.router", *router_flags(running, folder))
        running.ready("router")
        yield running


def router_flags(running: Fleet, folder: Path) -> list[str]:
    stages = [f"{name}/diffusion={running.address(replica)}" for name in MADE for replica in running.of(name)]
    files = [str(folder / f"{name}.yaml") for name in MADE]
    return ["--pipeline", ",".join(files), "--stages", ",".join(stages), "--grace", "5"]


def file_of(answer: WholeAnswer, port: str) -> bytes:
    return b"".join(getattr(chunk, port).data for chunk in answer.of(port) if chunk.count)


@lengths.one_or_all("cell", CELLS)
async def test_one_is_killed_and_the_other_goes_on(house: Fleet, seed: int, cell: str) -> None:
    """History of the samplers, the noise that is drawn anew in each step, the expert, and the place in the file are all taken along."""
    name, moment = CELLS[lengths.draw(cell, CELLS, seed)]
    made = MADE[name]
    asked = drawing("a hill", seed, name, **made.asked)

    async with disturbed(house, alike=False, after=drawing("after", 2, name, **made.asked)) as stub:
        answer = await ask_through(stub, asked, kill_when(MOMENTS.get(moment) or decoded(made.port), house, name))
        answer.check_whole()
        assert len(answer.failovers) == 1
        file, whole = file_of(answer, made.port), file_of(await ask(stub, asked), made.port)
        assert len(file) > 1000
        if made.port == "video" and moment == "decoding":  # The rest begins with a key frame.
            assert len(frames_of(whole)[0]) == made.asked["frames"]
            assert show_same_frames(file, whole)
        else:
            assert file == whole
