"""Makes the pictures of the report in docs/images: Chromium opens the report of `make demo` and photographs its parts.

    make demo && python -m tools.make_report_pictures [demo-out/report.html]

Each picture is a PNG of few colours below MOST_BYTES. Needs Chromium, playwright and pillow (`make test-browser`).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
REPORT = ROOT / "demo-out" / "report.html"
MOST_BYTES = 200_000
COLOURS = 128  # text and flat colours: more are not seen
SCALE = 1.5  # image pixels per CSS pixel, so that text stays sharp where a page shows the picture smaller
WIDTH = 1100  # CSS pixels
MARGIN = 12


@dataclass(frozen=True)
class Picture:
    """One picture: what lies from one element to another (by id, or by tag), after something was done."""

    name: str
    first: str
    last: str
    before: Callable[[Page], None] = lambda page: None


def point_at_a_edge(page: Page) -> None:
    """Goes to the edge with the largest box by keys, so that its details are shown."""
    boxes = page.locator("#tree [data-node]:not([data-node='0'])")
    sizes = boxes.evaluate_all("(all) => all.map((one) => one.offsetWidth * one.offsetHeight)")
    boxes.nth(sizes.index(max(sizes))).focus()


def open_a_request(page: Page) -> None:
    """Sorts by prompt, the longest first, and opens the third row."""
    page.locator('#requests [data-sort="prompt"]').click()
    page.locator("#requests [data-row]").nth(2).locator("td").first.click()


PICTURES = (
    Picture("report", "header", "#tree"),
    Picture("report-tree", "#tree", "#tree", before=point_at_a_edge),
    Picture("report-timeline", "#timeline", "#timeline"),
    Picture("report-requests", "#requests", "#requests", before=open_a_request),
    Picture("report-comparison", "#comparison", "#comparison"),
)


def photograph(page: Page, picture: Picture) -> bytes:
    """The PNG of a picture, of few colours."""
    from PIL import Image

    first, last = (page.locator(one).first for one in (picture.first, picture.last))
    if not (first.is_visible() and last.is_visible()):
        raise SystemExit(
            f"{picture.name}: the report does not show {picture.first} and {picture.last}; run `make demo`"
        )
    top = max(0, first.evaluate("(one) => one.getBoundingClientRect().top + scrollY") - MARGIN)
    bottom = last.evaluate("(one) => one.getBoundingClientRect().bottom + scrollY") + MARGIN
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
    taken = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip)))
    few = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(written := io.BytesIO(), "PNG", optimize=True)
    return written.getvalue()


def main() -> None:
    """Writes every picture. Raises SystemExit with a sentence without a report or a browser, or if one is too large."""
    report = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORT
    if not report.is_file():
        raise SystemExit(f"there is no {report}: run `make demo`, or give the path of a report")
    if reason := chromium.why_not():
        raise SystemExit(reason)
    with chromium.opened() as browser:
        for picture in PICTURES:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": 900},
                reduced_motion="reduce",
                device_scale_factor=SCALE,
            )
            page.goto(report.resolve().as_uri())
            page.locator("html[data-ready]").wait_for()
            picture.before(page)
            data = photograph(page, picture)
            page.close()
            if len(data) > MOST_BYTES:
                raise SystemExit(f"{picture.name}.png has {len(data):,} bytes; at most {MOST_BYTES:,} are wanted")
            (FOLDER / f"{picture.name}.png").write_bytes(data)
            print(f"{picture.name}.png: {len(data):,} bytes")


if __name__ == "__main__":
    main()
