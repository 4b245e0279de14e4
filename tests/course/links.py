"""Finds links that lead nowhere: in Markdown, in notebooks, and in a website."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat

_CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1|(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


class Page(HTMLParser):
    """The ids, links and images of a page of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named[key] or "" for key in ("id", "name") if key in named}
        self.links += [named[key] or "" for key in ("href", "src") if key in named]
        if tag == "img":
            self.images.append(named)


def page(path: Path) -> Page:
    """Return what is on a page of HTML."""
    found = Page()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def prose(path: Path) -> str:
    """Return the Markdown of a file or of a notebook's cells, without code."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    return text


def dead_links(path: Path) -> list[str]:
    """Return the links of a Markdown file or notebook to files or headings that are not there."""
    text = _CODE.sub("", prose(path))
    wrong = []
    for link in [*_LINK.findall(text), *_REFERENCE.findall(text)]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue  # another host: not looked at, because tests have no network
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            wrong.append(f"{path.name}: {link} (no such file)")
        elif parts.fragment and unquote(parts.fragment) not in anchors(target):
            wrong.append(f"{path.name}: {link} (no such heading)")
    return wrong


def anchors(path: Path) -> set[str]:
    """Return the names under which a file's headings can be linked to."""
    if path.suffix == ".html":
        return page(path).ids
    if path.suffix not in (".md", ".ipynb"):
        return set()
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", prose(path), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[`*]", "", heading) for heading in _HEADING.findall(text)]
    if path.suffix == ".ipynb":  # as JupyterLab does
        return {heading.replace(" ", "-") for heading in headings}
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links_of_site(folder: Path) -> list[str]:
    """Return the links of every page of a website to files or places that are not there."""
    folder = folder.resolve()
    found = {path: page(path) for path in sorted(folder.rglob("*.html"))}
    wrong = []
    for path, here in found.items():
        for link in sorted(set(here.links)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "":
                continue
            start = folder if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if not target.exists():
                wrong.append(f"{path.name}: {link} (no such file)")
            elif target in found and unquote(parts.fragment) not in {"", *found[target].ids}:
                wrong.append(f"{path.name}: {link} (no such place)")
    return wrong
