"""The page of endpoints at /docs: it has all that the gateway's own document has, and is bound as the page is."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import httpx2
import pytest
from playwright.async_api import expect

from helpers.browser import BrowserPage, browser, needs_chromium, serious_faults
from omnistage.gateway.page import FILES, FOLDER, HEADERS

MAX_BYTES = 15_000
WIDTHS = (390, 1280)


def test_its_files_are_small_and_bound_as_the_page(url: str) -> None:
    answer = httpx2.get(f"{url}/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert HEADERS.items() <= {name.title(): value for name, value in answer.headers.items()}.items()
    assert httpx2.head(f"{url}/docs").status_code == 200
    names = re.findall(r'"page/([\w.]+)"', answer.text)
    assert {"docs.js", "docs.css"} <= set(names) <= set(FILES)
    assert sum((FOLDER / name).stat().st_size for name in FILES if name.startswith("docs.")) <= MAX_BYTES
    assert 'href="docs"' in httpx2.get(f"{url}/").text


def heeded(document: dict[str, Any], operation: dict[str, Any]) -> set[str]:
    """The fields of a body of JSON, but for those that change nothing or are refused."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    fields = document["components"]["schemas"].get(name, body).get("properties", {})
    return {name for name, field in fields.items() if not field.get("description", "").startswith(("Taken, and", "Refused, if"))}


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_shows_every_endpoint_and_field_of_the_document(url: str, scheme: Any) -> None:
    document = httpx2.get(f"{url}/openapi.json").json()
    operations = [(method, path, one) for path, several in document["paths"].items() for method, one in several.items()]
    for width in WIDTHS:
        async with browser(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
            watched = BrowserPage(await context.new_page())
            await watched.page.goto(f"{url}/docs")
            await expect(watched.page.locator("article")).to_have_count(len(operations))
            for article, (method, path, operation) in zip(await watched.page.locator("article").all(), operations, strict=True):
                assert await article.locator("h3").inner_text() == f"{method.upper()}\n{path}"
                assert operation["description"] in await article.inner_text()
                assert heeded(document, operation) <= set(await article.locator("dt code").all_text_contents()), path
            assert await watched.page.evaluate("document.documentElement.scrollWidth") == width
            await watched.page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            assert await serious_faults(watched.page) == []
            await watched.check(url)


@needs_chromium
async def test_its_commands_ask_the_gateway_that_shows_it(url: str) -> None:
    async with browser() as context:
        page = await context.new_page()
        await page.goto(f"{url}/docs")
        await page.locator("article").first.wait_for()
        commands = await page.locator("pre").all_text_contents()
    answers = {one: asked(one) for one in commands if "--output" not in one and "@FILE" not in one}
    assert len(answers) > 20 and all(answers.values())
    models, chat = (json.loads(next(answers[one] for one in answers if end in one)) for end in ("/v1/models", "/v1/chat/"))
    assert models["data"] and "'smol' does not exist here; there are: toy" in chat["error"]["message"]


def asked(command: str) -> str:
    """The answer to a command as a reader would type it."""
    return subprocess.run(["sh", "-c", f"{command} --silent"], capture_output=True, text=True, check=True, timeout=60).stdout


@needs_chromium
async def test_without_the_document_it_says_why_it_is_empty(url: str) -> None:
    async with browser() as context:
        page = await context.new_page()
        await page.route("**/openapi.json", lambda route: route.fulfill(status=503))
        await page.goto(f"{url}/docs")
        await expect(page.locator("#state")).to_have_text(
            "Nothing can be shown: the gateway answers 503. Is the gateway there? Reload to try again."
        )
