"""The page as people use it, each test in a browser of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from playwright.async_api import Request, Route, expect

from helpers import lengths, servers
from helpers.browser import ask, browser, heard, needs_chromium, opened, page_at, page_of, serious_faults
from helpers.fleet import fleet
from helpers.gateway import gateway
from helpers.page_picture import take_picture
from helpers.servers import ServerProcess
from helpers.waiting import until
from omnistage.client.files import SoundEncoder
from omnistage.models.toy import files, film, formulas

SEED = 7
QUESTION = "Hello"
TEXT = formulas.text(SEED, QUESTION, formulas.NATURAL_LENGTH).strip()
SOUND = formulas.audio(SEED, QUESTION, formulas.NATURAL_LENGTH)
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 800}, "has_touch": True, "is_mobile": True}
KEY = "s3cret-of-ann"
MAX_PICTURE_BYTES = 200_000

WATCH_PICTURES = """
window.seen = [];
const watching = new MutationObserver((changes) => changes.forEach(({target}) => seen.push(target.src)));
watching.observe(document.querySelector("#thread"), {subtree: true, attributes: true, attributeFilter: ["src"]});
"""
"""In a page: every picture that comes into the place of another one."""

BRING = """
([deed, bytes]) => {
  const given = new DataTransfer();
  given.items.add(new File([new Uint8Array(bytes)], `${deed}.png`, {type: "image/png"}));
  const options = {bubbles: true, dataTransfer: given, clipboardData: given};
  document.querySelector("#text").dispatchEvent(deed === "drop" ? new DragEvent("drop", options) : new ClipboardEvent("paste", options));
}
"""
"""In a page: a picture is dropped or pasted."""

FITS = """
[...document.querySelectorAll("button, select, input, textarea, #figures dt, #figures dd")].every((one) => {
  const {left, right} = one.getBoundingClientRect();
  return left >= 0 && right <= innerWidth && one.scrollWidth <= Math.max(one.clientWidth, 1) + 1;
})
"""
"""In a page: nothing that can be used, and no figure, lies beside the screen or is cut off."""

FRAMES = 11

pytestmark = needs_chromium


@dataclass(frozen=True, slots=True)
class GatewayInUse:
    """A gateway, and a folder of the test's own. router: in front of which it is."""

    url: str
    router: str
    folder: Path


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that talks, sees, draws, and draws from pictures."""
    folder = tmp_path_factory.mktemp("router")
    chains: Mapping[str, Mapping[str, Any]] = {
        "toy": {},
        "toy-omni": {"family": "toy-omni"},
        "toy-picture": {"kinds": ("diffusion",), "options": {"interval_s": 0.05}},
        "toy-film": {"kinds": ("diffusion",), "family": "toy-film", "options": {"interval_s": 0.05}},
    }
    with ExitStack() as stack:
        found = []
        for pipeline, chain in chains.items():
            made = stack.enter_context(servers.stack(folder, router_args=None, **chain))
            found += [f"{pipeline}/{kind}={address}" for kind, address in made.addresses.items()]
        flags = ("--pipeline", ",".join(chains), "--stages", ",".join(found), "--grace", "5")
        router = stack.enter_context(ServerProcess("omnistage.router", *flags, log_folder=folder))
        router.wait_ready()
        yield router.address


@pytest.fixture
def place(router: str, tmp_path: Path) -> Iterator[GatewayInUse]:
    with gateway(router, tmp_path) as server:
        yield GatewayInUse(f"http://{server.address}", router, tmp_path)


async def it_draws(place: GatewayInUse) -> None:
    """Previews come and go; the last one makes way for the picture that the same seed gives whoever asks. All are seen, on a phone too."""
    async with page_at(place.url, **PHONE) as page:
        await page.evaluate(WATCH_PICTURES)
        await page.get_by_text("Draw", exact=True).click()
        await page.locator("#model").select_option("toy-picture")
        await ask(page, "A cat", SEED)
        shown = page.locator(".assistant:not(.live) .whole")
        await shown.wait_for()
        asked = {"model": "toy-picture", "prompt": "A cat", "seed": SEED, "response_format": "b64_json"}
        whole = httpx2.post(f"{place.url}/v1/images/generations", json=asked).json()["data"][0]["b64_json"]
        assert await shown.get_attribute("src") == f"data:image/png;base64,{whole}"
        *previews, last = await page.evaluate("seen")
        assert len(previews) >= 2 and last not in previews
        assert await page.locator("#timeline .marks.diffusion").count() == 1 and await serious_faults(page) == []
        await ask(page, "A cat", SEED)  # Below what is in sight.
        await expect(shown).to_have_count(2)
        await expect(shown.last).to_be_in_viewport(ratio=0.7)


async def it_sees(place: GatewayInUse) -> None:
    """A picture that was chosen goes with the question, and with a drawing."""
    picture = files.png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    async with page_at(place.url) as page:
        await page.locator("#model").select_option("toy-omni")
        await page.locator("#file").set_input_files({"name": "cat.png", "mimeType": "image/png", "buffer": picture})
        await page.get_by_role("img", name="cat.png").wait_for()
        await ask(page, QUESTION, SEED)
        uri = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
        asked = {"model": "toy-omni", "messages": [{"role": "user", "content": content}], "seed": SEED}
        told = httpx2.post(f"{place.url}/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        await expect(page.locator(".assistant:not(.live) .body")).to_have_text(told.strip())
        await page.get_by_text("Draw", exact=True).click()
        await page.locator("#model").select_option("toy-film")
        for deed in ("drop", "paste"):
            await page.evaluate(BRING, [deed, list(picture)])
            await page.get_by_role("img", name=f"{deed}.png").wait_for()
        await page.get_by_role("button", name="Remove paste.png").click()
        await expect(page.locator("#pictures img")).to_have_count(1)
        await ask(page, "A cat", SEED)
        await page.locator(".assistant:not(.live) .whole").first.wait_for()


async def it_makes_sound(place: GatewayInUse) -> None:
    """The page asks for a described sound; all of it goes to the loudspeaker."""
    async with page_at(place.url) as page:
        await page.get_by_text("Sound", exact=True).click()
        await expect(page.locator("#attach")).to_be_hidden()
        await page.get_by_label("Seconds").fill("0.5")
        await ask(page, "Rain", SEED)
        steer = formulas.steer("Rain", "", film.GUIDANCE)
        await heard(page, formulas.film_sound(SEED, steer, 0, formulas.SAMPLE_RATE_HZ // 2)[:, 0])
        await page.get_by_text(f"toy-film · seed {SEED}").wait_for()
        await expect(page.get_by_role("link", name="Save sound")).to_be_visible()
        assert await serious_faults(page) == []


async def it_plays_the_mean_of_two_channels(place: GatewayInUse) -> None:
    """As many samples as each channel has: the router's models have one, so the answer is that of another gateway."""
    whole = formulas.film_sound(SEED, 0, 0, formulas.SAMPLE_RATE_HZ // 2)
    encoder = SoundEncoder(".wav", formulas.SAMPLE_RATE_HZ, channels=2)
    pieces = [encoder.encode(np.hstack([whole, 0 * whole])[at : at + 5000]) for at in range(0, len(whole), 5000)]
    events = [
        *({"type": "audio.delta", "audio": base64.b64encode(piece).decode()} for piece in pieces),
        {"type": "audio.done", "usage": {"stages": []}, "seed": SEED, "pipeline": "toy-film", "session_id": "0"},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    async with page_at(place.url) as page:
        await page.route("**/v1/audio/generate", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        await page.get_by_text("Sound", exact=True).click()
        await ask(page, "Rain", SEED)
        await heard(page, (np.trunc(whole[:, 0] * 32768 / 2) / 32768).astype(np.float32))


async def with_frames(route: Route) -> None:
    """The toy makes a film only if it is told of how many frames."""
    asked: dict[str, Any] = route.request.post_data_json or {}
    await route.continue_(post_data={**asked, "frames": FRAMES})


async def listed(place: GatewayInUse, count: int) -> list[dict[str, Any]]:
    """The films, newest first, when there are so many."""
    found: list[dict[str, Any]] = []

    def are_so_many() -> bool:
        found[:] = httpx2.get(f"{place.url}/v1/videos").json()["data"]
        return len(found) == count

    await until(are_so_many)
    return found


async def it_makes_films(place: GatewayInUse) -> None:
    """The page asks for a film that no browser plays: the file is there to be saved. A stopped film is deleted."""
    async with page_at(place.url) as page:
        await page.get_by_text("Film", exact=True).click()
        await page.route("**/v1/videos", with_frames)
        await ask(page, "A cat", SEED)
        link = page.get_by_role("link", name="Save film")
        await link.wait_for()
        async with page.expect_download() as downloading:
            await link.click()
        saved = await (await downloading.value).path()
        steer = formulas.steer("A cat", "", film.GUIDANCE)
        begun = formulas.noise(SEED, *(np.arange(side) for side in (FRAMES, film.SIDE, film.SIDE)))
        assert saved.read_bytes() == formulas.latent_after(begun, steer, film.STEPS).astype(np.uint8).tobytes()
        await page.get_by_text(f"{FRAMES} frames").wait_for()
        assert await serious_faults(page) == []
        await page.locator("#steps").fill("1000")
        await ask(page, "A dog", SEED)
        (running, _) = await listed(place, 2)
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_text("Stopped.").wait_for()
        (left,) = await listed(place, 1)
        assert running["prompt"] == "A dog" and left["prompt"] == "A cat"


async def it_fits_a_phone(place: GatewayInUse) -> None:
    await _looks(place, {**PHONE, "color_scheme": "light"})


async def it_is_dark_where_that_is_wanted(place: GatewayInUse) -> None:
    await _looks(place, {"color_scheme": "dark", "reduced_motion": "reduce"})


async def _looks(place: GatewayInUse, options: Mapping[str, Any]) -> None:
    async with page_at(place.url, **options) as page:
        await ask(page, QUESTION, SEED)
        await heard(page, SOUND)
        assert await serious_faults(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth") and await page.evaluate(FITS)
        await page.locator("#table summary").click()
        await page.get_by_role("button", name="Settings").click()
        assert await serious_faults(page) == []


async def it_speaks_over_plain_http(place: GatewayInUse) -> None:
    """As on a phone: by a name that is not of this machine no page has a worklet. It says so, and is heard all the same."""
    name = "omnistage.example.com"
    with gateway(place.router, place.folder, "--allowed-hosts", name) as server:
        url = f"http://{name}:{server.address.rpartition(':')[2]}"
        async with page_at(url, f"--host-resolver-rules=MAP {name} 127.0.0.1") as page:
            assert await page.evaluate("isSecureContext") is False
            await page.get_by_text("plain HTTP").wait_for()
            await ask(page, QUESTION, SEED)
            await heard(page, SOUND)
            await expect(page.locator(".assistant:not(.live) .body")).to_have_text(TEXT)


async def it_remembers_all_but_the_key(place: GatewayInUse) -> None:
    async with browser() as context:
        watched = await opened(context, place.url)
        page = watched.page
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Done").click()
        sent: list[Request] = []
        page.on("request", lambda request: sent.append(request))  # Playwright marks what it is given.
        await ask(page, QUESTION, SEED)
        await heard(page, SOUND)
        [chat] = [request for request in sent if request.url.endswith("/chat/completions")]
        assert (await chat.all_headers())["authorization"] == f"Bearer {KEY}"
        assert [url for url in watched.urls if KEY in url] == []
        places = "JSON.stringify({...localStorage}) + document.cookie + location.href + document.documentElement.outerHTML"
        assert KEY not in await page.evaluate(places)
        await page.reload()
        await expect(page.locator(".assistant .body")).to_have_text(TEXT)
        other = (await opened(context, place.url)).page  # Another tab: no key.
        assert await other.evaluate("sessionStorage.length") == 0
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_role("button", name="Clear the conversation").click()
        await page.get_by_role("button", name="Done").click()
        await page.reload()
        await expect(page.locator("#empty")).to_be_visible()
        assert QUESTION not in await page.evaluate("localStorage.getItem('omnistage.turns') ?? ''")
        await watched.check(place.url)


async def it_opens_without_its_gateway(place: GatewayInUse) -> None:
    async with browser() as context:
        with gateway(place.router, place.folder) as server:
            page = (await opened(context, f"http://{server.address}")).page
            await ask(page, QUESTION, SEED)
            await heard(page, SOUND)
            await page.locator("html[data-kept=true]").wait_for(state="attached")
        await page.reload()
        await expect(page.locator(".assistant .body")).to_have_text(TEXT)
        await expect(page.locator("#state")).to_have_text("The gateway cannot be reached.")


async def it_goes_on_when_a_conversation_is_too_long(place: GatewayInUse) -> None:
    """Without its oldest turns, also when the page is opened again. A question that is too long is told, and leaves the rest."""
    room = 2 * len(TEXT)
    async with page_of(place.folder, options_of={"thinker": {"room": room}}) as (page, _):
        sent: list[int] = []
        page.on("request", lambda request: sent.append(_turns(request)) if request.method == "POST" else None)
        for count, turns in enumerate(([1], [1, 3], [1, 3, 5, 3]), 1):
            await ask(page, QUESTION, SEED)
            await expect(page.locator(".assistant:not(.live) .body")).to_have_text([TEXT] * count)
            assert sent == turns
        note = page.locator(".note").filter(has_text="no longer fit")
        await expect(note).to_have_count(1)
        await page.reload()
        await page.locator("#state.ready").wait_for()
        await ask(page, "x" * (room + 1), SEED)
        await page.get_by_role("alert").filter(has_text="shorten the conversation").wait_for()
        await expect(note).to_have_count(0)
        await ask(page, QUESTION, SEED)
        await expect(page.locator(".assistant:not(.live) .body")).to_have_text([TEXT] * 4)
        assert sent[4:] == [5, 3, 1, 5, 3]


def _turns(request: Request) -> int:
    return len(json.loads(request.post_data or "{}")["messages"])


async def it_tells_when_the_sound_runs_dry(place: GatewayInUse) -> None:
    """A word in a fifth of a second is 5 ms of sound: it waits for more, says so, and in the end nothing is missing."""
    async with page_of(place.folder, options_of={"thinker": {"interval_s": 0.2, "max_chunk": 1}}) as (page, _):
        await ask(page, QUESTION, SEED)
        await heard(page, SOUND)
        await expect(page.locator("[data-figure=underruns] dd")).to_have_text(re.compile("^[1-9]"))


async def it_waits_as_it_was_told(place: GatewayInUse) -> None:
    """Sound that came earlier than it can be played without a gap is held back for as long as the server said."""
    loud = {"samples_per_frame": 12_000}
    options = {"thinker": {"interval_s": 0.5, "max_chunk": 1}, "talker": loud, "code2wav": {**loud, "prebuffer_s": 1.0}}
    async with page_of(place.folder, options_of=options) as (page, _):
        await ask(page, QUESTION, SEED)
        playing = page.locator('#stage[data-begun-s]:not([data-begun-s="null"])')
        places = [await playing.get_attribute(f"data-{name}-s") for name in ("prebuffer", "came", "begun")]
        prebuffer_s, came_s, begun_s = [float(place or "nan") for place in places]
        assert prebuffer_s == 1.0
        assert begun_s - came_s >= 0.99  # A timer of a browser may be a millisecond early.
        await page.keyboard.press("Escape")


async def it_falls_silent(place: GatewayInUse) -> None:
    """Stop ends a sound that has come as a whole; it can be heard again from its beginning."""
    loud = {kind: {"samples_per_frame": 12_000} for kind in ("talker", "code2wav")}
    async with page_of(place.folder, options_of=loud) as (page, _):
        await ask(page, QUESTION, SEED)
        again = page.get_by_role("button", name="Hear again")
        for _ in range(2):
            await again.wait_for()
            await page.locator("#stage[data-is-playing=true]").wait_for()
            await page.get_by_role("button", name="Stop").click()
            silent = page.locator("#stage[data-is-playing=false]")
            await silent.wait_for()
            played, sent = [int(await silent.get_attribute(f"data-{name}") or 0) for name in ("played", "sent")]
            assert 0 < played < sent == 12_000 * formulas.FRAMES_PER_ROW * formulas.NATURAL_LENGTH
            await again.click()


async def it_shows_a_loss(place: GatewayInUse) -> None:
    """A Talker is killed in the middle: the timeline and a note tell of it, and of text and sound nothing is missing."""
    slow = {"thinker": {"interval_s": 1.0, "max_chunk": 1}}
    with fleet(place.folder, replicas={"talker": 2}, options_of=slow) as toys, gateway(toys.address("router"), place.folder) as server:
        async with page_at(f"http://{server.address}", checks=False) as page:
            await ask(page, QUESTION, SEED)
            await page.locator("#timeline .marks.code2wav").wait_for()
            toys.kill("talker-0")
            toys.begin("talker-0")
            toys.ready("talker-0")
            async with servers.omni_stub(toys.address("router")) as stub:
                await servers.until_serving(stub, {toys.address(name) for name in toys.stages})
            toys.kill("talker-1")
            await page.locator("#timeline .lost").first.wait_for()
            await expect(page.locator(".note").filter(has_text="talker was lost")).not_to_have_count(0)
            await heard(page, SOUND)
            await expect(page.locator(".assistant:not(.live) .body")).to_have_text(TEXT)


async def it_is_used_by_keys_alone(place: GatewayInUse) -> None:
    """All that can be done is reached by Tab, in the order in which it is seen; Escape stops."""
    name = "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
    async with page_of(place.folder, options_of={"thinker": {"interval_s": 1.0}}) as (page, stack):
        await page.locator("body").click(position={"x": 1, "y": 1})
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate(name))
        assert reached[:4] == ["settings-open", "SUMMARY", "thread", "BUTTON"]
        assert reached[6:] == ["text", "mode", "model", "voice", "speed", "seed"]
        await ask(page, QUESTION)
        await page.locator(".assistant.live .body:not(:empty)").wait_for()
        await page.keyboard.press("Escape")
        await expect(page.locator(".assistant:not(.live) .note")).to_have_text("Stopped.")
        await servers.all_free(list(stack.addresses.values()))


async def its_snippets_run(place: GatewayInUse) -> None:
    """A copied snippet asks the same, and gets the same answer."""
    async with page_at(place.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        await ask(page, 'It\'s "so" $HOME', SEED)
        await page.locator(".assistant:not(.live)").wait_for()
        variables = {**os.environ, "OMNISTAGE_API_KEY": KEY}
        for name, command in (("curl", ("bash", "-c")), ("Python", (sys.executable, "-c"))):
            await page.get_by_role("button", name=f"Copy as {name}").click()
            await expect(page.locator("#toast")).to_contain_text("Copied")
            snippet = await page.evaluate("navigator.clipboard.readText()")
            assert "include_events" not in snippet and KEY not in snippet
            words = [*command, snippet]
            done = await asyncio.to_thread(subprocess.run, words, env=variables, capture_output=True, text=True, check=False, timeout=90)
            assert done.returncode == 0, done.stderr
            said = formulas.text(SEED, 'It\'s "so" $HOME', formulas.NATURAL_LENGTH).split()
            assert [word for word in said if word not in done.stdout] == []


async def its_picture_is_taken(place: GatewayInUse) -> None:
    """As for the readme."""
    path = place.folder / "page.png"
    await take_picture(place.url, path)
    assert 10_000 < path.stat().st_size <= MAX_PICTURE_BYTES


BY_NAME = {name: deed for name, deed in globals().items() if name.startswith(("it_", "its_"))}


@lengths.one_or_all("deed", BY_NAME)
async def test_the_page_in_use(deed: str, place: GatewayInUse, seed: int) -> None:
    await BY_NAME[lengths.draw(deed, BY_NAME, seed)](place)
