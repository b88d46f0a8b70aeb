"""Check every page of the built site in Chromium: none may be wider than its window, and no block lose its code.

`make docs` builds the site first. With a directory as its argument, the tops of the pages are kept there as pictures.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from playwright.async_api import Page, async_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.server.chromium import LACKING, found  # noqa: E402  (the tests are found from the root only)

SITE = ROOT / "build" / "site"
WIDTHS = (390, 800, 1440)
IS_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
IS_BROKEN = "document.querySelector('.md-content')?.innerText.includes('```')"


async def faults(page: Page, width: int, scheme: str, pictures: Path | None) -> AsyncIterator[str]:
    for file in sorted(SITE.rglob("*.html")):
        await page.goto(file.as_uri())
        name = file.relative_to(SITE).with_suffix("")
        if await page.evaluate(IS_WIDE):
            yield f"{name} is wider than {width} px ({scheme})"
        if await page.evaluate(IS_BROKEN):
            yield f"{name} shows the marks of a block"
        if pictures is not None:
            await page.screenshot(path=pictures / f"{str(name).replace('/', '_')}-{width}-{scheme}.png")


async def main(pictures: Path | None) -> int:
    where = found()
    if where is None or not SITE.exists():
        print(LACKING if where is None else f"{SITE} is missing. Type: make docs")
        return 2
    told = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in WIDTHS:
                page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                told |= {fault async for fault in faults(page, width, scheme, pictures)}
                await page.close()
        await browser.close()
    print("\n".join(sorted(told)) or "no page is wider than its window")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else None)))
