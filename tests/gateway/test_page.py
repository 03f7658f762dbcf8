"""The page, as a browser gets it and as somebody sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Page, expect

from helpers import servers
from helpers.browser import LAUNCHER, ask, browser, heard, needs_chromium, opened, serious_faults
from helpers.gateway import gateway
from omnistage.client.files import to_pcm16
from omnistage.gateway.page import FILES, FOLDER, HEADERS
from omnistage.models.toy import formulas

MOST_BYTES = 150_000
SEED = 5
LENGTH = formulas.NATURAL_LENGTH


# Its files -----------------------------------------------------------------------------------------------------------------------------


def test_its_files_come_with_what_a_browser_may_do(url: str) -> None:
    size = 0
    for name, media_type in FILES.items():
        answer = httpx2.get(f"{url}/" if name == "index.html" else f"{url}/page/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
        assert HEADERS.items() <= {name.title(): value for name, value in answer.headers.items()}.items()
        again = httpx2.get(str(answer.url), headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert "Content-Security-Policy" in again.headers
        size += len(answer.content)
    assert size <= MOST_BYTES


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "%2e%2e/door.py", ""])
def test_nothing_else_is_served(url: str, name: str) -> None:
    answer = httpx2.get(f"{url}/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_all_files_are_named() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FILES)


def test_its_files_name_no_other_host_and_make_no_html_of_text() -> None:
    text = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
    assert [
        name for name, body in text.items() if re.search(r"(innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\()", body)
    ] == []
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
    async with browser() as context:
        watched = await opened(context, url)
        page = watched.page
        await ask(page, "Hello", SEED)
        await heard(page, formulas.audio(SEED, "Hello", LENGTH))
        await said_all(page, tmp_path)
        assert await page.locator("#timeline .marks").count() == 2  # For text and for sound.
        assert await page.locator("#timeline .work").count() == 4  # For three stages, and for the sound that was heard.
        assert await page.locator("#timeline-text tbody tr").count() == 3
        assert await serious_faults(page) == []
        await watched.check(url)
        with gateway(slow.address, tmp_path) as server:
            url = f"http://{server.address}"
            watched = await opened(context, url)
            await it_stops(watched.page, slow)
            await watched.check(url)


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


async def it_stops(page: Page, stack: servers.ServerProcesses) -> None:
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
