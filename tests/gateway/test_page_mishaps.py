"""The page when something goes wrong: another tab, something in between, a full disk. Nothing is lost; the next question works."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from playwright.async_api import Locator, Page, Request, Route, expect

from helpers import lengths, servers
from helpers.browser import ask, browser, heard, needs_chromium, opened
from helpers.gateway import gateway
from omnistage.models.toy import files, formulas

SEED = 3
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

pytestmark = needs_chromium


@dataclass(frozen=True, slots=True)
class GatewayOfMishaps:
    """A gateway in front of a toy chain, and a folder of the test's own."""

    url: str
    folder: Path


@asynccontextmanager
async def page_of(place: GatewayOfMishaps, **chain: Any) -> AsyncIterator[Page]:
    """A page in front of a chain of its own."""
    async with browser() as context:
        with servers.stack(place.folder, **chain) as stack, gateway(stack.address, place.folder) as server:
            yield (await opened(context, f"http://{server.address}")).page


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


async def it_forgets_in_the_middle_of_an_answer(place: GatewayOfMishaps) -> None:
    async with page_of(place, options_of=SLOW) as page:
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


async def it_stops_at_any_moment(place: GatewayOfMishaps) -> None:
    """Before anything came, in the middle, and while it is asked again; afterwards the next question is answered."""
    async with page_of(place, options_of=SLOW) as page:
        faults = thrown(page)
        for count, moment in enumerate(
            (".assistant", ".assistant.live", ".assistant.live .body:not(:empty)", "#timeline .marks.code2wav"), 1
        ):
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


async def it_keeps_what_was_cut_off(place: GatewayOfMishaps) -> None:
    """Opened anew in the middle of an answer, it shows the question and what was said until then: nothing, or a part."""
    async with page_of(place, options_of={"thinker": {"interval_s": 2.0, "max_chunk": 1}}) as page:
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


async def it_asks_again_at_the_end(place: GatewayOfMishaps) -> None:
    """Whatever is chosen meanwhile: "Try again" moves its question behind all others, for the model and for who reads."""
    async with browser() as context:
        page = (await opened(context, place.url)).page
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
            assert (
                await page.locator("#thread article").evaluate_all("all => all.map((one) => one.classList[0])") == ["user", "assistant"] * 2
            )
            await expect(answers(page)).to_have_text(both)
            await reloaded(page)
        [[*earlier, newest]] = told
        assert (earlier[0], earlier[1].strip(), newest, faults) == ("Hello", TEXT, "First", [])


async def it_tells_what_makes_no_sense(place: GatewayOfMishaps) -> None:
    """An answer of something in between is told in words, and asked for again."""
    async with browser() as context:
        page = (await opened(context, place.url)).page
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


async def its_tabs_share_what_is_kept(place: GatewayOfMishaps) -> None:
    """Questions and answers of each of two tabs stay; if one tab forgets them the other does, too."""
    async with browser() as context:
        pages = [(await opened(context, place.url)).page for _ in range(2)]
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


async def it_opens_on_a_full_disk(place: GatewayOfMishaps) -> None:
    """Where the browser has no room for files, nor for the conversation, all else works."""
    async with browser() as context:
        page = (await opened(context, place.url)).page
        await page.locator("html[data-kept=true]").wait_for(state="attached")
        devtools = await context.new_cdp_session(page)
        await devtools.send("Storage.overrideQuotaForOrigin", {"origin": place.url, "quotaSize": 1})
        await page.evaluate(FILL)
        await reloaded(page)
        faults = thrown(page)
        await ask(page, "Hello", SEED)
        await expect(page.locator("#toast")).to_contain_text("no room")
        await expect(answers(page)).to_have_text(TEXT)
        await page.get_by_text("Draw", exact=True).click()
        await expect(page.locator("#size")).to_be_visible()
        assert faults == []


async def it_is_heard_without_its_worklet(place: GatewayOfMishaps) -> None:
    async with browser() as context:
        await context.add_init_script(NO_WORKLET)
        page = (await opened(context, place.url)).page
        await expect(page.locator("#plain")).to_be_hidden()
        await ask(page, "Hello", SEED)
        await heard(page, SOUND)
        await expect(page.locator("#plain")).to_contain_text("played in another way")


async def it_sends_large_pictures_once(place: GatewayOfMishaps) -> None:
    """A later question has no room for them, and says so; small ones go with it. The toy reads no large ones: another server does."""
    small = files.png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    large = small + bytes(7 << 20)
    async with page_of(place, family="toy-omni", pipeline="toy-omni") as page:
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


async def it_holds_many_turns(place: GatewayOfMishaps) -> None:
    async with browser() as context:
        page = (await opened(context, place.url)).page
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


DEEDS: tuple[Callable[[GatewayOfMishaps], Awaitable[None]], ...] = (
    it_forgets_in_the_middle_of_an_answer,
    it_stops_at_any_moment,
    it_keeps_what_was_cut_off,
    it_asks_again_at_the_end,
    it_tells_what_makes_no_sense,
    its_tabs_share_what_is_kept,
    it_opens_on_a_full_disk,
    it_is_heard_without_its_worklet,
    it_sends_large_pictures_once,
    it_holds_many_turns,
)
BY_NAME = {deed.__name__: deed for deed in DEEDS}


@lengths.long_form(
    "gateway/test_page_in_use.py::test_the_page_in_use",
    "gateway/test_page.py::test_it_talks_and_stops",
    unkept="what the page does when something goes wrong",
)
@lengths.one_or_all("deed", BY_NAME)
async def test_the_page_when_something_goes_wrong(deed: str, url: str, tmp_path: Path, seed: int) -> None:
    await BY_NAME[lengths.draw(deed, BY_NAME, seed)](GatewayOfMishaps(url, tmp_path))
