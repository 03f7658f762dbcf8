"""Several checkpoints of real families in one stack, two of them of one family: each is asked by its own name and by those that people know
it by, over gRPC, over HTTP and by the command."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.drawings import checkpoint
from helpers.processes import ProcessFamily
from helpers.serving import serving
from helpers.waiting import until
from omnistage.client import Omni

pytestmark = [
    pytest.mark.timeout(400),
    lengths.long_form(
        "cli/test_names.py::test_a_stack_is_asked_by_names",
        "cli/test_names.py::test_checkpoints_of_one_family_are_called_by_their_own_names",
        "gateway/test_listing.py::test_a_model_is_asked_by_each_of_its_names",
        unkept="checkpoints of one family are served together",
    ),
]

LIMIT_S = 120.0


@pytest.mark.parametrize(
    ("words", "own_names"),
    [
        (("Q25-Omni", "Wan2.2 T2V", "sa"), ("qwen2_5_omni", "wan2.2-t2v", "sa")),
        (("talk=Q25-Omni", "film=Wan2.2 T2V", "sound=sa"), ("talk", "film", "sound")),
    ],
    ids=["unnamed", "named"],
)
def test_each_is_asked_by_its_names(
    family: ProcessFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], own_names: tuple[str, ...]
) -> None:
    for name, kind in (("Q25-Omni", "qwen2.5-omni"), ("Wan2.2 T2V", "wan2.2-t2v"), ("sa", "stable-audio")):
        (tmp_path / name).symlink_to(checkpoint(kind))
    monkeypatch.chdir(tmp_path)
    devices = ("--device", "Q25-Omni/thinker=cpu", "--device", f"{own_names[1]}/diffusion=cpu", "--device", "sa/diffusion=cpu")
    with serving(family, *words, *devices, "--http", "127.0.0.1:0") as server, Omni(address=server.address()) as omni:
        url = f"{server.report('page: ').split()[0]}/v1"
        assert [server.report("serving ") for _ in range(2)] == [*own_names[1:]]
        asyncio.run(until(lambda: [one.state for one in omni.pipelines()] == ["ready"] * 3))
        talk, film, sound = own_names
        listed = {one.name: one for one in omni.pipelines()}
        assert [*listed] == [*own_names] and [listed[film].outputs, listed[sound].outputs] == [("video", "progress"), ("audio", "progress")]
        small = {"steps": 1, "width": 64, "height": 64, "frames": 5, "seed": 1}
        texts, films, films_over_http, sounds, sounds_over_http = set[str](), set[bytes](), set[bytes](), set[bytes](), set[bytes]()
        with httpx2.Client(base_url=url, timeout=LIMIT_S) as client:
            for name in (talk, "q25-omni", "Q25-Omni"):
                texts.add(omni.generate("Hi", pipeline=name, outputs=["text"], max_tokens=4, temperature=0).text)
                body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
                answered = client.post("/chat/completions", json=body).json()
                texts.add(answered["choices"][0]["message"]["content"])
                assert (answered["model"], client.get(f"/models/{name}").json()["id"]) == (name, talk)
            for name in (film, "WAN2.2 t2v"):
                films.add(omni.film("a hill", pipeline=name, **small).videos[0].data)  # type: ignore[arg-type]
                body = {"model": name, "prompt": "a hill", "size": "64x64", "steps": 1, "frames": 5, "seed": 1}
                film_url = f"/videos/{client.post('/videos', json=body).json()['id']}"
                films_over_http.add(client.get(f"{film_url}/content").content)
            for name in dict.fromkeys((sound, "SA")):
                audio = omni.sound("rain", pipeline=name, seconds=0.5, steps=1, seed=1).audio
                assert audio is not None
                sounds.add(audio.samples.tobytes())
                body = {"model": name, "prompt": "rain", "seconds": 0.5, "steps": 1, "seed": 1, "response_format": "wav"}
                sounds_over_http.add(client.post("/audio/generate", json=body).raise_for_status().content)
        assert [len(each) for each in (texts, films, films_over_http, sounds, sounds_over_http)] == [1] * 5, "it is the same model"
        done = omnistage("ask", "Hi", "--pipeline", "q25-omni", "--text-only", "--max-tokens", "4", "--address", omni.address)
        assert done.returncode == 0 and f"pipeline {talk}" in done.stderr
        assert set(own_names) <= {*omnistage("status", "--address", omni.address).stdout.split()}
