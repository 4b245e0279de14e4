"""What a student sees: JupyterLab in a headless Chromium, driven by real clicks and typing.

Screenshots go to ``BERTLAB_SCREENSHOTS`` if that is set, to be looked at; the assertions hold
either way.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from bertlab.course.authoring.chapters import environment
from bertlab.course.regions import find_regions

pytestmark = pytest.mark.browser

WRONG = """%%fill 3.1
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)
    return weights @ value, weights
"""


@pytest.fixture(scope="module")
def copy(root, pristine_copy, tmp_path_factory) -> Path:
    """A student's copy with one more notebook, which shows everything there is to see."""
    folder = tmp_path_factory.mktemp("screens") / "course"
    shutil.copytree(pristine_copy, folder)
    source = (root / "solutions" / "bertlab" / "config.py").read_text(encoding="utf-8")
    cells = [
        "%load_ext bertlab.course",
        f"%%fill 0.1\n{find_regions(source)['0.1'].text}",
        WRONG,
        "%status",
        "from bertlab.course.widgets.tokenizer_explorer import tokenizer_explorer\n"
        "tokenizer_explorer()",
        "from bertlab.course.widgets.attention_explorer import attention_explorer\n"
        "attention_explorer()",
    ]
    node = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(node, folder / "chapters" / "screens.ipynb")
    return folder


@pytest.fixture(scope="module")
def address(copy) -> Iterator[str]:
    """The address of a JupyterLab that `bertlab lab` started in the copy."""
    runtime = copy / ".runtime"
    settings = {
        **environment(copy),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_WORKSPACES_DIR": str(copy / ".workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(copy / ".settings"),
    }
    command = [
        sys.executable,
        "-m",
        "bertlab.course.cli",
        "lab",
        "--no-browser",
        "--ip=127.0.0.1",
        "--port=0",
        "--IdentityProvider.token=",
    ]
    with open(copy / "lab.log", "w") as log:
        server = subprocess.Popen(command, cwd=copy, env=settings, stdout=log, stderr=log)
    try:
        yield _waited_for(runtime, server, copy / "lab.log")
    finally:
        server.terminate()
        server.wait(timeout=30)


def _waited_for(runtime: Path, server: subprocess.Popen, log: Path) -> str:
    for _ in range(120):
        for file in runtime.glob("jpserver-*.json"):
            return json.loads(file.read_text())["url"].rstrip("/")
        assert server.poll() is None, log.read_text()
        time.sleep(0.5)
    raise AssertionError("JupyterLab did not start: " + log.read_text())


@pytest.fixture(scope="module")
def page(address):
    """The notebook, open in a browser, after Run All Cells."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("BERTLAB_CHROMIUM") or shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        # Tall, because JupyterLab takes cells that are out of sight off the page.
        page = browser.new_page(viewport={"width": 1440, "height": 3600})
        page.requests_elsewhere = []  # type: ignore[attr-defined]  # a note for one test
        page.on("request", lambda request: _note_elsewhere(page, request.url))
        page.goto(f"{address}/lab/tree/chapters/screens.ipynb", timeout=90_000)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        page.get_by_text("(ipykernel) | Idle").wait_for(timeout=90_000)
        page.get_by_text("Run", exact=True).first.click()
        page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
        try:
            page.wait_for_selector(".bertlab-view >> nth=1", timeout=120_000)
        except Exception:
            photograph(page, page, "run_all_failed")
            raise
        yield page
        browser.close()


def _note_elsewhere(page, url: str) -> None:
    if not re.match(r"(https?|wss?)://127\.0\.0\.1|data:|blob:|about:", url):
        page.requests_elsewhere.append(url)


def outputs(page, number: int):
    """Return the output area of a code cell, counted from 0, scrolled into view."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    return cell.locator(".jp-Cell-outputArea")


def photograph(page, area, name: str) -> None:
    folder = os.environ.get("BERTLAB_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        area.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_a_right_part_shows_a_passed_card(page):
    area = outputs(page, 1)
    card = area.locator(".bertlab.card.passed")
    assert "✓ passed" in card.inner_text()
    assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "5px"
    photograph(page, area, "card_passed")


def test_a_known_mistake_is_named_on_the_card(page):
    area = outputs(page, 2)
    text = area.locator(".bertlab.card.failed").inner_text()
    assert "✗ not yet" in text
    assert "It does what people get when" in text and "scaled" in text
    photograph(page, area, "card_failed")


def test_the_status_shows_the_course_at_a_glance(page):
    area = outputs(page, 3)
    text = area.inner_text()
    assert "The course at a glance" in text and "Attention" in text and "Next:" in text
    photograph(page, area, "status")


def test_the_tokenizer_explorer_follows_what_is_typed(page):
    area = outputs(page, 4)
    photograph(page, area, "tokenizer_before")
    box = area.locator("textarea, input[type=text]").first
    box.click()
    box.fill("unhappiness")
    box.press("Tab")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.bertlab-view')].some("
        "e => e.innerText.includes('##iness'))",
        timeout=20_000,
    )
    photograph(page, area, "tokenizer_after")


def test_the_attention_explorer_follows_a_click(page):
    area = outputs(page, 5)
    area.scroll_into_view_if_needed()
    before = area.locator(".bertlab-view .widget-html").last.inner_html()
    photograph(page, area, "attention_before")
    handle = area.locator(".noUi-handle").first
    handle.click()
    handle.press("ArrowRight")
    page.wait_for_timeout(2_000)
    after = area.locator(".bertlab-view .widget-html").last.inner_html()
    assert after != before
    photograph(page, area, "attention_after")


def test_nothing_was_asked_of_another_host(page):
    assert page.requests_elsewhere == []


def test_the_cards_can_be_read_in_the_dark_theme(page):
    page.get_by_text("Settings", exact=True).first.click()
    page.get_by_text("Theme", exact=True).first.hover()
    page.get_by_text("JupyterLab Dark", exact=True).first.click()
    page.wait_for_selector("[data-jp-theme-light='false']", state="attached", timeout=20_000)
    card = outputs(page, 2).locator(".bertlab.card")
    colours = card.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
    assert contrast(*colours) >= 4.5, colours
    photograph(page, outputs(page, 2), "card_failed_dark")
    photograph(page, outputs(page, 5), "attention_dark")


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two CSS colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
