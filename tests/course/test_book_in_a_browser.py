"""The book in a headless Chromium: light and dark, wide and narrow, searched and printed.

Screenshots go to ``BERTLAB_SCREENSHOTS`` if that is set, to be looked at.
"""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bertlab.course import outline
from bertlab.course.authoring import book

from . import browser as browsing

pytestmark = pytest.mark.browser

WIDTHS = {"phone": 390, "wide": 1440}


@pytest.fixture(scope="module")
def pages() -> list[str]:
    names = ["index", *(chapter.file for chapter in outline.chapters())]
    return [f"{name}.html" for name in [*names, "claims", "exercises", "glossary", "404"]]


@pytest.fixture(scope="module")
def address(root, tmp_path_factory) -> Iterator[str]:
    """The address of the book, served from this machine."""
    folder = tmp_path_factory.mktemp("book") / "site"
    assert book.make(root, arguments=("--dest-dir", str(folder))) == 0
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *words: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browsing.chromium() as browser:
        yield browser


@pytest.fixture
def window(chromium) -> Iterator[Any]:
    """Opens a page of the book: in a scheme, at a width, watched."""
    opened = []

    def open_window(scheme: str = "light", width: int = 1440) -> Any:
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.notes = browsing.Notes()
        page.notes.watch(page)
        opened.append(page)
        return page

    yield open_window
    for page in opened:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_read_at_both_widths(address, window, pages, scheme):
    wrong = []
    for kind, width in WIDTHS.items():
        page = window(scheme, width)
        for name in pages:
            page.goto(f"{address}/{name}", wait_until="load")
            wrong += [f"{name} {kind}: {what}" for what in browsing.low_contrast(page)]
            if browsing.overflow(page) > 0:
                wrong.append(f"{name} {kind}: wider than the window by {browsing.overflow(page)}")
            browsing.photograph(page, f"book_{name[:-5]}_{kind}_{scheme}")
        assert page.notes == browsing.Notes()
    assert wrong == []


def test_the_measure_of_contrast_and_width_finds_what_is_wrong(window):
    page = window(width=390)
    page.set_content(
        "<p style='color:#999'>pale</p><p style='color:#767676'>fair</p>"
        "<p style='color:#000;opacity:.3'>faint</p>"
        "<p style='font-size:30px;color:#949494'>large</p>"
        "<div style='width:500px;background:#000'><p style='color:#222'>dark on dark</p></div>"
    )
    found = " ".join(browsing.low_contrast(page))
    assert "pale" in found and "faint" in found and "dark on dark" in found
    assert "fair" not in found and "large" not in found
    assert browsing.overflow(page) > 100


def test_a_request_that_fails_or_goes_elsewhere_is_noted(address, window):
    page = window()
    page.route("http://elsewhere.example/*", lambda route: route.abort())
    page.goto(f"{address}/index.html")
    page.evaluate(
        "() => { new Image().src = '/missing.png'; "
        "new Image().src = 'http://elsewhere.example/x.png'; }"
    )
    page.wait_for_timeout(500)
    assert any("missing.png" in failed for failed in page.notes.failed)
    assert page.notes.elsewhere == ["http://elsewhere.example/x.png"]
    assert page.notes.errors


def test_the_search_finds_a_page(address, window):
    page = window()
    page.goto(f"{address}/index.html")
    page.keyboard.press("s")
    page.keyboard.type("unhappiness", delay=10)
    found = page.locator("#mdbook-searchresults a")
    found.first.wait_for(timeout=20_000)
    browsing.photograph(page, "book_search")
    found.first.click()
    page.wait_for_url("**/01_tokenizer.html*")
    assert page.notes == browsing.Notes()


def test_next_and_previous_go_through_the_chapters(address, window, pages):
    page = window()
    page.goto(f"{address}/{pages[0]}")
    for name in pages[1:-1]:
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**/{name}")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**/{pages[-3]}")


def test_the_theme_is_chosen_from_light_and_dark(address, window):
    page = window("light")
    page.goto(f"{address}/index.html")
    page.locator("#mdbook-theme-toggle").click()
    shown = page.locator("#mdbook-theme-list button:visible")
    assert shown.count() == 3  # Auto, Light, Dark
    before = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.locator("#mdbook-theme-navy").click()
    after = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert before != after
    assert browsing.low_contrast(page) == []


def test_a_formula_is_drawn_by_the_browser(address, window):
    page = window()
    page.goto(f"{address}/04_feed_forward.html")
    heights = page.evaluate(
        "() => [...document.querySelectorAll('mfrac')].map(e => e.getBoundingClientRect().height)"
    )
    text = page.evaluate("() => parseFloat(getComputedStyle(document.querySelector('p')).fontSize)")
    assert len(heights) >= 2 and min(heights) > 1.1 * text  # numerator over denominator
    browsing.photograph(page.locator("math[display=block]").first, "book_formula")


def test_a_chapter_can_be_printed(address, window):
    page = window("dark")
    page.goto(f"{address}/03_attention.html")
    page.emulate_media(media="print")
    assert not page.locator("#mdbook-sidebar").is_visible()
    ink, paper = page.evaluate(
        "() => ['color', 'backgroundColor'].map(k => getComputedStyle(document.documentElement)[k])"
    )
    assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    assert browsing.low_contrast(page, "main") == []
    cut = page.evaluate(
        "() => [...document.querySelectorAll('main .output')].filter("
        "e => getComputedStyle(e).overflowX !== 'visible').length"
    )
    assert cut == 0
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
