"""A headless Chromium for tests of the page, and what it must not do there."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.async_api import BrowserContext, ConsoleMessage, Page, Request, async_playwright, expect

from helpers import servers
from helpers.gateway import gateway
from tools.examples import BUILT, install_modules

CHROMIUM = shutil.which("chromium")
LAUNCHER = Path(__file__).with_name("chromium.sh")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-features=HttpsUpgrades", "--autoplay-policy=user-gesture-required"),
)

RATE_HZ = 24_000
"""The rate of sound in OpenAI's interface."""

WAIT_MS = 90_000
"""For anything that is waited for: an end, on a machine that is busy."""

PACKAGES = b'{"private": true, "dependencies": {"axe-core": "4.14.1"}}\n'

LISTENING = """
window.listening = {contexts: [], peak: 0, violations: []};
document.addEventListener("securitypolicyviolation", (event) => listening.violations.push(event.violatedDirective));
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode && !(this instanceof AnalyserNode)) {
    const {context} = this;
    if (!listening.contexts.includes(context)) {
      listening.contexts.push(context);
      context.ear = new AnalyserNode(context, {fftSize: 32768});
      const wave = new Float32Array(32768);
      setInterval(() => {
        context.ear.getFloatTimeDomainData(wave);
        listening.peak = Math.max(listening.peak, ...wave);
        document.documentElement.dataset.peak = Math.round(listening.peak * 32768);
      }, 100);
    }
    connect.call(this, context.ear);
  }
  return connect.call(this, target, ...rest);
};
"""
"""In a page: what really goes to the loudspeaker, the newest 1.4 s of it ten times a second; and what the page's policy refused."""


@dataclass
class BrowserPage:
    """A page, and what went wrong in it. hosts: it asked these. urls: all that it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)

    @property
    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.urls if urlsplit(url).scheme not in ("data", "blob")}

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _request(self, request: Request) -> None:
        self.urls.append(request.url)

    async def check(self, url: str) -> None:
        """Nothing went wrong, and nobody else was asked."""
        assert self.errors == []
        assert await self.page.evaluate("listening.violations") == []
        assert self.hosts == {urlsplit(url).netloc}


@asynccontextmanager
async def browser(*flags: str, **options: Any) -> AsyncIterator[BrowserContext]:
    """One, without anything of an earlier one. options: of playwright's `new_context`, such as viewport."""
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=LAUNCHER, args=[*FLAGS, *flags], timeout=WAIT_MS)
        try:
            context = await running.new_context(**options)
            context.set_default_timeout(WAIT_MS)
            expect.set_options(timeout=WAIT_MS)
            await context.add_init_script(LISTENING)
            yield context
        finally:
            await running.close()


async def opened(context: BrowserContext, url: str) -> BrowserPage:
    """The page of a gateway, when it knows its models."""
    watched = BrowserPage(await context.new_page())
    await watched.page.goto(url)
    await watched.page.locator("#state.ready").wait_for()
    return watched


@asynccontextmanager
async def page_at(url: str, *flags: str, checks: bool = True, **options: Any) -> AsyncIterator[Page]:
    """The page of a gateway in a browser of its own. checks: at the end nothing has gone wrong. flags, options: of `browser`."""
    async with browser(*flags, **options) as context:
        watched = await opened(context, url)
        yield watched.page
        if checks:
            await watched.check(url)


@asynccontextmanager
async def page_of(folder: Path, **chain: Any) -> AsyncIterator[tuple[Page, servers.ServerProcesses]]:
    """A page in front of a chain of its own, and the chain, of which something may go wrong. folder: of its logs."""
    with servers.stack(folder, **chain) as stack, gateway(stack.address, folder) as server:
        async with page_at(f"http://{server.address}", checks=False) as page:
            yield page, stack


async def ask(page: Page, text: str, seed: int | None = None) -> None:
    """As somebody would who has a keyboard."""
    await page.locator("#seed").fill("" if seed is None else str(seed))
    await page.locator("#text").fill(text)
    await page.keyboard.press("Enter")


async def heard(page: Page, samples: NDArray[np.float32]) -> None:
    """All samples of the newest answer went through the browser's audio to its loudspeaker."""
    played = f'[data-sent="{len(samples)}"][data-played="{len(samples)}"]'
    await page.locator(f'#stage[data-is-playing="false"]{played}').wait_for()
    told = await page.evaluate("listening.contexts.map((one) => [one.state, one.currentTime > 0, one.sampleRate])")
    assert told == [["running", True, RATE_HZ]]
    # The ear listens to the newest 1.4 s, ten times a second.
    await page.locator(f'html[data-peak="{samples.max() * 32768:.0f}"]').wait_for(state="attached")


async def serious_faults(page: Page) -> list[str]:
    """The serious faults of a page for people who cannot see or click well, as axe-core finds them. Skips the test where npm cannot bring
    axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which brings axe-core")
    await page.evaluate((axe_folder() / "axe.min.js").read_text(encoding="utf-8"))
    found = await page.evaluate("axe.run()")
    serious = [fault for fault in found["violations"] if fault["impact"] in ("serious", "critical")]
    return [f"{fault['id']}: {node['html']}: {node['failureSummary']}" for fault in serious for node in fault["nodes"]]


def axe_folder() -> Path:
    """The folder of axe-core, which is fetched once."""
    folder = BUILT / "axe"
    install_modules(PACKAGES, folder)
    return folder / "node_modules" / "axe-core"
