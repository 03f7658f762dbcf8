"""The picture of the page for the readme: an answer with sound and a drawing, in one window.

PYTHONPATH=.:tests python -m helpers.page_picture URL PATH

of a gateway that talks and draws. docs/images/page.png is of the default models.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from PIL import Image
from playwright.async_api import Page

from helpers.browser import ask, browser, opened

QUESTION = "What is photosynthesis?"
DRAWING = "A red circle on blue."
SEED = 3
WIDTH, HEIGHT, SCALE = 1100, 980, 1.5


async def take_picture(url: str, path: Path) -> None:
    """Draw, then ask, and take it while the answer is heard."""
    async with browser(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE, color_scheme="light") as context:
        page = (await opened(context, url)).page
        await draw(page, DRAWING)
        await page.get_by_text("Talk", exact=True).click()
        await ask(page, QUESTION, SEED)
        await page.locator("#stage:not(.live)").wait_for()
        await page.locator(".assistant:not(.live) .body:not(:empty)").wait_for()
        await page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)


async def draw(page: Page, prompt: str) -> None:
    await page.get_by_text("Draw", exact=True).click()
    await ask(page, prompt, SEED)
    await page.locator(".assistant:not(.live) .whole").last.wait_for()


if __name__ == "__main__":
    asyncio.run(take_picture(sys.argv[1], Path(sys.argv[2])))
