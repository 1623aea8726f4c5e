"""The page for those who do not see it, or not well: names, roles, order of headings, contrast. axe-core is the judge.

https://github.com/dequelabs/axe-core has the rules. Contrast is also worked out here, from the styles as they are
computed, since axe passes over what it is not sure of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.report.documents import document

# A link to a place of this page's own (#request=ID) is no link to an element, as the rule skip-link takes it to be.
AXE = {"resultTypes": ["violations"], "rules": {"skip-link": {"enabled": False}}}
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3; 3 for large text
# Of each text in sight: its colour, its background (every stop of a gradient), whether it is large, and its words.
# Colours become red, green, blue, alpha through a canvas, which reads every form that a style can have.
COLOURS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.canvas.width = canvas.canvas.height = 1;
    const known = new Map();
    const rgba = (text) => {
        if (!known.has(text)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = text;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
            known.set(text, [r, g, b, a / 255]);
        }
        return known.get(text);
    };
    const COLOUR = /(?:rgba?|color|oklch|oklab|lab|lch|hsla?)\\([^()]*\\)/g;
    const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
    const backgrounds = (one) => {
        if (one === null) return [[255, 255, 255, 1]];
        const style = getComputedStyle(one), own = rgba(style.backgroundColor);
        const stops = (style.backgroundImage.match(COLOUR) ?? []).map(rgba);
        if (own[3] === 1 && stops.length === 0) return [own];
        const below = own[3] === 1 ? [own] : backgrounds(one.parentElement).map((under) => over(own, under));
        return stops.length ? stops.flatMap((stop) => below.map((under) => over(stop, under))) : below;
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const one = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
        if (!words || !one.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        if (one.closest("script, style, noscript, .unseen, option, :disabled")) continue;
        const style = getComputedStyle(one), box = one.getBoundingClientRect();
        if (box.width < 2 || box.height < 2) continue;
        const size = parseFloat(style.fontSize), isBold = Number(style.fontWeight) >= 700;
        const faint = [];
        for (let at = one; at; at = at.parentElement) faint.push(Number(getComputedStyle(at).opacity));
        const colour = rgba(style.color);
        colour[3] *= faint.reduce((a, b) => a * b, 1);
        const isLarge = size >= 24 || (isBold && size >= 18.66);
        found.push([colour, backgrounds(one), isLarge, `${one.className || one.localName}: ${words.slice(0, 40)}`]);
    }
    return found;
}"""


def lightness(colour: list[float]) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: list[float], background: list[float]) -> float:
    """Contrast ratio, 1 to 21, of a colour that may let its background through."""
    mixed = [c * colour[3] + b * (1 - colour[3]) for c, b in zip(colour[:3], background[:3], strict=True)]
    light, dark = sorted((lightness(mixed), lightness(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def unfold(page: Opened) -> None:
    """Everything that can be seen at once is seen: a request, an edge, all that folds."""
    page.page.locator("#requests [data-row] td").first.click()
    page.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    expect(page.page.locator("#request-detail")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_text_stands_out_from_its_ground(open_document: Callable[..., Opened], scheme: Any) -> None:
    """Fault: grey on grey, or a text that is legible in one of the two schemes alone."""
    page = open_document(document(60, 2, unfinished=True), color_scheme=scheme)
    unfold(page)
    found = page.page.evaluate(COLOURS)
    assert len(found) > 200
    pale = {
        f"{words} ({least:.1f})"
        for colour, grounds, is_large, words in found
        if (least := min(contrast(colour, ground) for ground in grounds)) < (3 if is_large else LEAST_CONTRAST)
    }
    assert not pale


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 400)])
def test_axe_finds_nothing(open_document: Callable[..., Opened], scheme: Any, width: int) -> None:
    """Fault: a control without a name, a role without its children, a heading that skips a level, a pale text."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_document(document(60, 2), color_scheme=scheme, viewport={"width": width, "height": 900})
    unfold(page)
    found = axe.Axe().run(page.page, options=AXE).response["violations"]
    said = [f"{one['id']}: {one['help']}: {node['html'][:120]}" for one in found for node in one["nodes"][:3]]
    assert not said, "\n".join(said)


def test_the_outline_is_the_sections(open_document: Callable[..., Opened]) -> None:
    """Fault: a section that a screen reader's list of headings or of regions does not have, or has without a name."""
    page = open_document(document(20, 1, hostile=False))
    expect(page.page.locator("main")).to_match_aria_snapshot("""
        - region "Verdict":
          - heading "Verdict" [level=2]
        - region "Where the prompt tokens went":
          - heading "Where the prompt tokens went" [level=2]
          - img /Of .* prompt tokens/
        - region "Prefix tree":
          - heading "Prefix tree" [level=2]
          - group "Width":
            - radio "tokens saved" [checked]
            - radio "prompt tokens"
          - button "Whole tree" [disabled]
          - tree "Prefix tree":
            - treeitem /all requests/ [level=1] [selected]
            - treeitem /requests?, .* restored, .* computed/ [level=2]
          - complementary "Edge"
        - region "Timeline":
          - heading "Timeline" [level=2]
          - figure:
            - slider /Timeline of/
        - region "Prompt tokens by turn":
          - heading "Prompt tokens by turn" [level=2]
          - slider "Prompt tokens by turn"
        - region "Block sizes":
          - heading "Block sizes" [level=2]
          - group "Block sizes":
            - table "Block sizes"
        - region "Requests":
          - heading "Requests" [level=2]
          - searchbox "Filter"
          - status: 20 of 20 requests
          - region "Requests, rows":
            - table
        - region "Comparison":
          - heading "Comparison" [level=2]
        - region "What ran":
          - heading "What ran" [level=2]
    """)
    assert page.page.title() == "report" and page.page.locator("html").get_attribute("lang") == "en"
    assert page.page.locator("h1").count() == 1


def test_colours_have_words_or_patterns_beside_them(open_document: Callable[..., Opened]) -> None:
    """Fault: restored and lost differ by colour alone, and one reader in twelve sees one bar."""
    page = open_document(document(60, 2))
    legend = page.page.locator("#tokens .legend").inner_text()
    for words in ("restored from memory", "restored from disk", "computed", "lost", "ideal"):
        assert words in legend
    looks = page.page.evaluate("""() => [...document.querySelectorAll("#tokens .bar [data-part]")].map((one) => {
        const style = getComputedStyle(one);
        return [style.backgroundImage === "none", style.backgroundColor];
    })""")
    grounds = [lightness([float(c) for c in colour.strip("rgba()").split(", ")]) for plain, colour in looks if plain]
    assert all(abs(one - two) > 0.02 for number, one in enumerate(grounds) for two in grounds[:number]), (
        "two plain parts are equally light: in grey they are one"
    )
