"""How fast the report's page is in Chromium: from opening to the first rows, one sort, one filter.

    python -m benchmarks.report_page [REPORT.html] [--requests 50000] [--times 5]

Without REPORT the page of a made-up document is opened. Each time is the median over as many openings, in milliseconds,
measured inside the page: `open` from the navigation's start to the first row on the screen, `sort` and `filter` from
the click, or the key, to the frame that shows the outcome; `open_processor` is what opening cost the page's process,
which a busy machine does not change much. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from apcbatch.report.page import page as make_page
from tests.report.documents import large_document
from tools import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Two frames: the first one draws what the event did, the second one begins after that was on the screen.
FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
OPENED = "document.querySelector('#requests [data-row]') && performance.now()"
SORT = f"""async (name) => {{
    const begin = performance.now();
    document.querySelector(`#requests [data-sort="${{name}}"]`).click();
    await {FRAME};
    return performance.now() - begin;
}}"""
FILTER = f"""async (wanted) => {{
    const box = document.querySelector("#requests-filter"), count = document.querySelector("#requests-count");
    const before = count.textContent, begin = performance.now();
    box.value = wanted;
    box.dispatchEvent(new Event("input", {{ bubbles: true }}));
    while (count.textContent === before && performance.now() - begin < 10_000) await {FRAME};
    return performance.now() - begin;
}}"""


def measure(browser: Browser, path: Path) -> dict[str, float]:
    """Milliseconds of one opening, one sort by prompt tokens and one filter by the text of an answer."""
    # The page's policy forbids eval, with which Playwright waits; it costs no time.
    page = browser.new_page(viewport={"width": 1100, "height": 900}, bypass_csp=True)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        page.goto(path.resolve().as_uri(), wait_until="commit")
        opened = page.wait_for_function(OPENED).json_value()
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return {
            "open": opened,
            "open_processor": 1000 * metrics["ProcessTime"],
            "sort": page.evaluate(SORT, "prompt"),
            "filter": page.evaluate(FILTER, "refund lisbon"),
        }
    finally:
        page.close()


def main() -> None:
    """Measures and prints. Raises SystemExit with a sentence where no browser is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    if reason := chromium.why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, chromium.opened() as browser:
        path = options.report
        if path is None:
            path = Path(folder) / "report.html"
            path.write_bytes(make_page(large_document(options.requests), "made-up requests"))
        found = [measure(browser, path) for _ in range(options.times)]
        medians = {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}
        print(json.dumps({"bytes": path.stat().st_size, "times": options.times, "median_ms": medians}))


if __name__ == "__main__":
    main()
