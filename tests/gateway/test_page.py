"""The page, as a browser gets it and as somebody sees it, and when something goes wrong: nothing is lost; the next question works."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import wave
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from playwright.async_api import Locator, Page, Request, Route, expect

from helpers import lengths, servers
from helpers.browser import LAUNCHER, ask, browser, heard, needs_chromium, opened, page_at, page_of, serious_faults
from helpers.chain import addresses_of
from helpers.gateway import gateway, local_gateway
from helpers.ports import take_address
from omnistage.client.files import to_pcm16
from omnistage.gateway.page import FILES, FOLDER, HEADERS, HOME
from omnistage.models.toy import files, formulas
from omnistage.router.pipeline import load_pipeline

MAX_BYTES = 150_000
SEED = 5
LENGTH = formulas.NATURAL_LENGTH


# Its files -----------------------------------------------------------------------------------------------------------------------------


def test_its_files_come_with_what_a_browser_may_do(url: str) -> None:
    size = 0
    for name, media_type in FILES.items():
        answer = httpx2.get(f"{url}/" if name == HOME else f"{url}/page/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
        assert HEADERS.items() <= {name.title(): value for name, value in answer.headers.items()}.items()
        again = httpx2.get(str(answer.url), headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"") and "Content-Security-Policy" in again.headers
        size += 0 if name.startswith("docs.") else len(answer.content)  # test_endpoints_page.py has their limit.
    assert size <= MAX_BYTES


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "%2e%2e/door.py", ""])
def test_nothing_else_is_served(url: str, name: str) -> None:
    answer = httpx2.get(f"{url}/page/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_all_files_are_named() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FILES)


def test_its_files_name_no_other_host_and_make_no_html_of_text() -> None:
    text = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
    makes_html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\("
    assert [name for name, body in text.items() if re.search(makes_html, body)] == []
    assert set(re.findall(r"https?://[^\s\"'`]+", "".join(text.values()))) <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text["index.html"]) == []


# In a browser --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A chain that says a word in each second."""
    with servers.stack(tmp_path_factory.mktemp("slow"), options_of={"thinker": {"interval_s": 1.0, "max_chunk": 1}}) as stack:
        yield stack


def test_a_browser_may_not_run_in_real_time(tmp_path: Path) -> None:
    """Otherwise its threads of sound could keep a machine of two cores from everything else."""
    asking = tmp_path / "chromium"
    asking.write_text(f"#!{sys.executable}\nimport os\nos.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\n", encoding="utf-8")
    asking.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run([LAUNCHER], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert "PermissionError" in ended.stderr


@needs_chromium
async def test_it_talks_and_stops(url: str, slow: servers.ServerProcesses, tmp_path: Path) -> None:
    async with page_at(url) as page:
        await ask(page, "Hello", SEED)
        await heard(page, formulas.audio(SEED, "Hello", LENGTH))
        await said_all(page, tmp_path)
        assert await page.locator("#timeline .marks").count() == 2  # For text and for sound.
        assert await page.locator("#timeline .work").count() == 4  # For three stages, and for the sound that was heard.
        assert await page.locator("#timeline-text tbody tr").count() == 3 and await serious_faults(page) == []
    with gateway(slow.address, tmp_path) as server:
        async with page_at(f"http://{server.address}") as page:
            await check_that_it_stops(page, slow)


async def said_all(page: Page, folder: Path) -> None:
    """The text, the figures, and the sound as a file are those of the answer."""
    await expect(page.locator(".assistant:not(.live) .body")).to_have_text(formulas.text(SEED, "Hello", LENGTH).strip())
    # How many there were is the machine's: where it is busy, sound comes late.
    await expect(page.locator("[data-figure=underruns] dd")).to_have_text(re.compile(r"^\d+$"))
    for name in ("ttft", "ttfa"):
        await expect(page.locator(f"[data-figure={name}] dd")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    async with page.expect_download() as download:
        await page.get_by_text("Save sound").click()
    await (await download.value).save_as(folder / "answer.wav")
    with wave.open(str(folder / "answer.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, formulas.SAMPLE_RATE_HZ)
        assert file.readframes(file.getnframes()) == to_pcm16(formulas.audio(SEED, "Hello", LENGTH)[:, 0])


async def check_that_it_stops(page: Page, stack: servers.ServerProcesses) -> None:
    """Output that has come moves the timeline; then Stop ends the answer, here and in the stages, and the next question can be asked."""
    await ask(page, "Hello", SEED)
    marks = page.locator("#timeline .marks.thinker")
    seen = await marks.get_attribute("d")
    await expect(marks).not_to_have_attribute("d", seen or "")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator(".assistant:not(.live) .note")).to_have_text("Stopped.")
    await servers.all_free(list(stack.addresses.values()))
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert formulas.text(SEED, "Hello", LENGTH).startswith(await page.locator(".assistant .body").inner_text())


@needs_chromium
async def test_it_offers_what_a_starting_pipeline_is_sure_to_give() -> None:
    """The rest is there as soon as its checkpoint is loaded, on the page that is open."""
    film, address = load_pipeline("toy-film").model_copy(update={"outputs_vary": True}), take_address()
    async with (
        servers.local_chain() as chain,
        servers.local_router({**addresses_of(chain), "toy-film/diffusion": address}, load_pipeline("toy"), film) as router,
        local_gateway(router.address) as (url, _),
        page_at(url) as page,
    ):
        modes = {name: page.locator("label", has=page.locator(f"input[value={name}]")) for name in ("film", "sound")}
        await expect(page.locator("#state")).to_have_text("2 models")
        for label in modes.values():
            await expect(label).to_be_hidden()
        async with servers.local_stage(servers.family_logic("toy-film", "diffusion"), address=address):
            for label in modes.values():
                await expect(label).to_be_visible()


# Mishaps


TEXT = formulas.text(SEED, "Hello", formulas.NATURAL_LENGTH).strip()
SOUND = formulas.audio(SEED, "Hello", formulas.NATURAL_LENGTH)
SLOW = {"thinker": {"interval_s": 0.5, "max_chunk": 1}}
CHAT = "**/v1/chat/completions"
EVENTS = {"content_type": "text/event-stream"}

SENTENCE = re.compile(r"^\w.*\w.*\.$|^busy$")

STRANGE: tuple[dict[str, Any], ...] = (
    {"status": 503, "json": None},
    {"status": 503, "json": {"error": "busy"}},
    {"status": 502, "body": "<html>Bad gateway</html>", "content_type": "text/html"},
    {"body": "<html>Log in</html>", "content_type": "text/html"},
    {"body": "data: {}\n\n", **EVENTS},
    {"body": "data: not json\n\n", **EVENTS},
    {"body": "data: null\n\n", **EVENTS},
    {"body": 'data: {"choices": {}}\n\n', **EVENTS},
    {"body": 'data: {"choices": [{}]}\n\n', **EVENTS},
    {"body": 'data: {"choices": [{"delta": {"audio": {"data": "?"}}}]}\n\n', **EVENTS},
    {"body": 'data: {"error": {"type": "server_error"}}\n\n', **EVENTS},
)
"""Answers of a proxy, or of another server at this address."""

SEEN = {"body": 'data: {"choices": [{"delta": {"content": "I see."}, "finish_reason": "stop"}]}\n\n', **EVENTS}

TURNS = """
(count) => localStorage.setItem("omnistage.turns", JSON.stringify(Array.from({length: count}, (_, n) =>
  ({id: `${n}`, at: n, text: `Question ${n}`, pictures: [], answer: {text: "Well.", pictures: []}, isDrawn: false}))))
"""
"""In a page: so many turns were kept."""

FILL = """
for (let size = 1 << 22; size; size >>= 1) {
  try { for (;;) localStorage.setItem(`other.${size}.${localStorage.length}`, "x".repeat(size)); } catch {}
}
"""
"""In a page: another program of this address took all the room."""

NO_WORKLET = """
const add = AudioWorklet.prototype.addModule;
AudioWorklet.prototype.addModule = function (url) { return add.call(this, `${url}.none`); };
"""
"""In a page: its worklet's file is not there."""


def questions(page: Page) -> Locator:
    return page.locator(".user p")


def answers(page: Page) -> Locator:
    return page.locator(".assistant:not(.live) .body")


async def clear(page: Page) -> None:
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_role("button", name="Clear the conversation").click()
    await page.get_by_role("button", name="Done").click()


async def reloaded(page: Page) -> None:
    await page.reload()
    await page.locator("#state.ready").wait_for()


def _messages(request: Request) -> list[dict[str, Any]]:
    body = request.post_data_json
    assert body
    messages: list[dict[str, Any]] = body["messages"]
    return messages


def chats(page: Page) -> list[list[str]]:
    """The messages that the model gets from now on: for each request their contents."""
    told: list[list[str]] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            told.append([message["content"] for message in _messages(request)])

    page.on("request", note)
    return told


async def it_forgets_in_the_middle_of_an_answer(url: str, folder: Path) -> None:
    async with page_of(folder, options_of=SLOW) as (page, _):
        faults = thrown(page)
        await ask(page, "Forget me", SEED)
        await page.locator(".assistant.live .body:not(:empty)").wait_for()
        await clear(page)
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        await expect(page.locator("#empty")).to_be_visible()
        await expect(page.locator("#thread article")).to_have_count(0)
        await expect(page.get_by_role("button", name="Copy as curl")).to_be_disabled()
        assert await page.evaluate("localStorage.getItem('omnistage.turns')") == "[]"
        told = chats(page)
        await ask(page, "Hello", SEED)
        await expect(answers(page)).to_have_text(TEXT)
        assert (told, faults) == ([["Hello"]], [])


async def it_stops_at_any_moment(url: str, folder: Path) -> None:
    """Before anything came, in the middle, and while it is asked again; afterwards the next question is answered."""
    async with page_of(folder, options_of=SLOW) as (page, _):
        faults = thrown(page)
        moments = (".assistant", ".assistant.live", ".assistant.live .body:not(:empty)", "#timeline .marks.code2wav")
        for count, moment in enumerate(moments, 1):
            await ask(page, f"Question {count}", SEED)
            await page.locator(moment).last.wait_for(state="attached")
            await page.keyboard.press("Escape")
            await expect(page.locator(".assistant:not(.live) .note").filter(has_text="Stopped.")).to_have_count(count)
            await expect(page.locator("#stage[data-is-playing=true], .assistant.live")).to_have_count(0)
        await page.route(CHAT, answering({"status": 503, "json": None}), times=1)
        await ask(page, "Hello", SEED)
        await page.get_by_role("button", name="Try again", exact=True).click()
        await page.locator(".assistant.live .body:not(:empty)").wait_for()
        await page.keyboard.press("Escape")
        await expect(page.locator(".note").filter(has_text="Stopped.")).to_have_count(count + 1)
        await ask(page, "Hello", SEED)
        await expect(answers(page).last).to_have_text(TEXT)
        assert faults == []


async def it_keeps_what_was_cut_off(url: str, folder: Path) -> None:
    """Opened anew in the middle of an answer, it shows the question and what was said until then: nothing, or a part."""
    async with page_of(folder, options_of={"thinker": {"interval_s": 2.0, "max_chunk": 1}}) as (page, _):
        await ask(page, "Early", SEED)
        await page.locator(".assistant.live").wait_for(state="attached")
        await reloaded(page)
        await expect(questions(page)).to_have_text("Early")
        await ask(page, "Hello", SEED)
        await page.locator(".assistant.live .body:not(:empty)").wait_for()
        await reloaded(page)
        await expect(questions(page)).to_have_text(["Early", "Hello"])
        said = await answers(page).last.inner_text()
        assert said and TEXT.startswith(said)


async def it_asks_again_at_the_end(url: str, folder: Path) -> None:
    """Whatever is chosen meanwhile: "Try again" moves its question behind all others, for the model and for who reads."""
    async with page_at(url, checks=False) as page:
        faults = thrown(page)
        await page.route(CHAT, lambda route: route.fulfill(status=503, headers={"Retry-After": "0"}, json={"error": {"message": "Busy."}}))
        await ask(page, "First", SEED)
        again = page.get_by_role("button", name="Try again", exact=True)
        await again.wait_for()
        await page.unroute(CHAT)
        await ask(page, "Hello", SEED)
        await expect(answers(page)).to_have_text(TEXT)
        await page.get_by_text("Draw", exact=True).click()  # No model here does.
        told = chats(page)
        await again.click()
        both = [TEXT, formulas.text(SEED, "First", formulas.NATURAL_LENGTH).strip()]
        for _ in range(2):
            await expect(answers(page)).to_have_count(2)
            await expect(questions(page)).to_have_text(["Hello", "First"])
            kinds = await page.locator("#thread article").evaluate_all("all => all.map((one) => one.classList[0])")
            assert kinds == ["user", "assistant"] * 2
            await expect(answers(page)).to_have_text(both)
            await reloaded(page)
        [[*earlier, newest]] = told
        assert (earlier[0], earlier[1].strip(), newest, faults) == ("Hello", TEXT, "First", [])


async def it_tells_what_makes_no_sense(url: str, folder: Path) -> None:
    """An answer of something in between is told in words, and asked for again."""
    async with page_at(url, checks=False) as page:
        faults = thrown(page)
        for odd in STRANGE:
            await page.route(CHAT, answering(odd))
            await ask(page, "Hello", SEED)
            card = page.get_by_role("alert")
            await expect(card.locator(".what")).to_have_text(SENTENCE)
            again = card.get_by_role("button", name="Try again", exact=True)
            await page.unroute(CHAT)
            await again.click()
            await expect(answers(page)).to_have_text(TEXT)
            await clear(page)
        await page.route("**/v1/models", answering({"json": {"data": [{"id": 1}]}}))
        await page.reload()
        await expect(page.locator("#state")).to_contain_text("makes no sense")
        assert faults == []


async def its_tabs_share_what_is_kept(url: str, folder: Path) -> None:
    """Questions and answers of each of two tabs stay; if one tab forgets them the other does, too."""
    async with browser() as context:
        pages = [(await opened(context, url)).page for _ in range(2)]
        for n, page in enumerate((*pages, *pages)):
            await page.bring_to_front()
            await ask(page, f"Question {n}", SEED)
            await expect(answers(page)).to_have_count(1 + n // 2)
        for page in pages:
            await reloaded(page)
            await expect(questions(page)).to_have_text([f"Question {n}" for n in range(4)])
            await expect(answers(page)).to_have_count(4)
        await clear(pages[0])
        await expect(pages[1].locator("#empty")).to_be_visible()
        await reloaded(pages[1])
        await expect(questions(pages[1])).to_have_count(0)


async def it_opens_on_a_full_disk(url: str, folder: Path) -> None:
    """Where the browser has no room for files, nor for the conversation, all else works."""
    async with page_at(url, checks=False) as page:
        await page.locator("html[data-kept=true]").wait_for(state="attached")
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Storage.overrideQuotaForOrigin", {"origin": url, "quotaSize": 1})
        await page.evaluate(FILL)
        await reloaded(page)
        faults = thrown(page)
        await ask(page, "Hello", SEED)
        await expect(page.locator("#toast")).to_contain_text("no room")
        await expect(answers(page)).to_have_text(TEXT)
        await page.get_by_text("Draw", exact=True).click()
        await expect(page.locator("#size")).to_be_visible()
        assert faults == []


async def it_is_heard_without_its_worklet(url: str, folder: Path) -> None:
    async with browser() as context:
        await context.add_init_script(NO_WORKLET)
        page = (await opened(context, url)).page
        await expect(page.locator("#plain")).to_be_hidden()
        await ask(page, "Hello", SEED)
        await heard(page, SOUND)
        await expect(page.locator("#plain")).to_contain_text("played in another way")


async def it_sends_large_pictures_once(url: str, folder: Path) -> None:
    """A later question has no room for them, and says so; small ones go with it. The toy reads no large ones: another server does."""
    small = files.png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    large = small + bytes(7 << 20)
    async with page_of(folder, family="toy-omni", pipeline="toy-omni") as (page, _):
        sent: list[list[int]] = []
        page.on("request", lambda request: sent.append(_pictures(request)) if request.method == "POST" else None)
        await page.route(CHAT, answering(SEEN), times=1)
        for count, picture in enumerate((large, small, None), 1):
            if picture:
                await page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": picture})
                await page.get_by_role("img", name="a.png").wait_for()
            await ask(page, "Hello", SEED)
            await expect(answers(page)).to_have_count(count)
        sizes = [len(base64.b64encode(picture)) + len("data:image/png;base64,") for picture in (large, small)]
        assert sent == [sizes[:1], sizes[1:], sizes[1:]]
        await expect(page.locator(".note").filter(has_text="not all sent again, 1 not")).to_have_count(2)


def _pictures(request: Request) -> list[int]:
    """Characters of each picture that is sent."""
    parts = [part for message in _messages(request) for part in message["content"] if isinstance(part, dict)]
    return [len(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]


async def it_holds_many_turns(url: str, folder: Path) -> None:
    async with page_at(url, checks=False) as page:
        await page.evaluate(TURNS, 1000)
        await reloaded(page)
        told = chats(page)
        await ask(page, "Hello", SEED)
        await expect(answers(page).last).not_to_have_text("Well.")
        assert told[0][0] == "Question 901"
        await reloaded(page)
        await expect(questions(page)).to_have_text([*[f"Question {n}" for n in range(901, 1000)], "Hello"])


def thrown(page: Page) -> list[str]:
    """Faults of the page, from now on."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    return faults


def answering(odd: dict[str, Any]) -> Callable[[Route], Awaitable[None]]:
    async def answer(route: Route) -> None:
        await route.fulfill(**odd)

    return answer


BY_NAME = {name: deed for name, deed in globals().items() if name.startswith(("it_", "its_"))}


@lengths.long_form(
    "gateway/test_page_in_use.py::test_the_page_in_use",
    "gateway/test_page.py::test_it_talks_and_stops",
    unkept="what the page does when something goes wrong",
)
@needs_chromium
@lengths.one_or_all("deed", BY_NAME)
async def test_the_page_when_something_goes_wrong(deed: str, url: str, tmp_path: Path, seed: int) -> None:
    await BY_NAME[lengths.draw(deed, BY_NAME, seed)](url, tmp_path)
