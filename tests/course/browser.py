"""A headless Chromium, and what a page may be asked: contrast, overflow, requests, errors."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Notes:
    """What went wrong on a page while it was looked at."""

    elsewhere: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        """Note requests to other hosts, failed requests, and errors of the console."""
        page.on("request", self._requested)
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _requested(self, request: Any) -> None:
        if not re.match(r"(https?|wss?)://127\.0\.0\.1|data:|blob:|about:", request.url):
            self.elsewhere.append(request.url)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # that is the window that went on to another page
            self.failed.append(request.url)

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.failed.append(f"{response.status} {response.url}")

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("BERTLAB_CHROMIUM") or shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        try:
            yield browser
        finally:
            browser.close()


def photograph(area: Any, name: str, **options: Any) -> None:
    """Keep a picture below ``BERTLAB_SCREENSHOTS``, if that is set."""
    folder = os.environ.get("BERTLAB_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        area.screenshot(path=str(Path(folder) / f"{name}.png"), **options)


def overflow(page: Any) -> int:
    """Return by how many pixels a page is wider than its window."""
    return page.evaluate(
        "() => document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
    )


def low_contrast(page: Any, within: str = "body", only: str = "*") -> list[str]:
    """Return the texts that can be seen and have less contrast than WCAG 2 AA asks for.

    That is a ratio of 4.5, or 3 for large text (24 pixels, or 18.7 bold). Backgrounds and
    opacities are mixed as the browser does, pictures aside. Disabled controls are exempt.

    Args:
        within: a selector for the element to be looked at.
        only: a selector; texts outside of what it names are left out.
    """
    return page.evaluate(_LOW_CONTRAST, [within, only])


_LOW_CONTRAST = r"""([within, only]) => {
  const parse = text => {
    const canvas = parse.canvas ||= Object.assign(document.createElement('canvas'),
      {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under, alpha) => [0, 1, 2].map(i => top[i] * alpha + under[i] * (1 - alpha));
  const light = rgb => {
    const [r, g, b] = rgb.map(c => c / 255).map(
      c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ancestors = element => {
    const found = [];
    for (let e = element; e; e = e.parentElement) found.unshift(e);
    return found;
  };
  const back = element => ancestors(element).reduce((under, e) => {
    const colour = parse(getComputedStyle(e).backgroundColor);
    return over(colour, under, colour[3]);
  }, [255, 255, 255]);
  const opacity = element => ancestors(element).reduce(
    (value, e) => value * parseFloat(getComputedStyle(e).opacity), 1);
  const problems = new Set();
  const walker = document.createTreeWalker(document.querySelector(within), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e.closest(only)) continue;
    if (e.closest('script, style, noscript, title, :disabled')) continue;
    if (!e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    if (!range.getClientRects().length) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    if (size === 0) continue;
    const colour = parse(e.closest('svg') ? style.fill : style.color);
    const under = back(e), ink = over(colour, under, colour[3] * opacity(e));
    const [bright, dark] = [light(ink), light(under)].sort((a, b) => b - a);
    const ratio = (bright + 0.05) / (dark + 0.05);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      problems.add(`${ratio.toFixed(2)} ${e.tagName}.${e.getAttribute('class') || ''}: `
        + node.data.trim().slice(0, 40));
    }
  }
  return [...problems];
}"""
