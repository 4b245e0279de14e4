"""No link inside the course leads nowhere: pages for people, chapters, and a student's copy."""

import subprocess
from pathlib import Path

import nbformat
import pytest

from .links import anchors, dead_links, dead_links_of_site


def test_no_link_of_the_project_leads_nowhere(root):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.ipynb"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    # Pages of the book link to pages that are made; the site is looked at in test_book.
    paths = [root / name for name in listed if "book_pages" not in name]
    paths = [path for path in paths if path.exists()]
    assert len(paths) >= 15
    assert [wrong for path in paths for wrong in dead_links(path)] == []


def test_no_link_of_a_students_copy_leads_nowhere(pristine_copy):
    paths = [*pristine_copy.rglob("*.md"), *pristine_copy.rglob("*.ipynb")]
    paths = [path for path in paths if "book_pages" not in path.parts]
    assert len(paths) >= 8
    assert [wrong for path in paths for wrong in dead_links(path)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](there.md)", []),
        ("[a](there.md#a-place)", []),
        ("[a](missing.md)", ["no such file"]),
        ("[a](there.md#no-place)", ["no such heading"]),
        ("[a](#here)\n\n# Here", []),
        ("[a](#nowhere)\n\n# Here", ["no such heading"]),
        ("[a][1]\n\n[1]: missing.md", ["no such file"]),
        ("![a](figures/missing.png)", ["no such file"]),
        ("`x[i](y)`\n\n```python\nx[i](y)\n```", []),
        ("[a](https://example.org/x)", []),
    ],
)
def test_the_checker_knows_a_dead_link_from_a_live_one(tmp_path, text, wrong):
    (tmp_path / "there.md").write_text("# A place\n")
    (tmp_path / "page.md").write_text(text + "\n")
    found = dead_links(tmp_path / "page.md")
    assert len(found) == len(wrong) and all(a in b for a, b in zip(wrong, found, strict=True))


def test_links_of_a_notebook_are_looked_at_as_jupyterlab_does(tmp_path):
    cell = nbformat.v4.new_markdown_cell("# Play first\n[a](#Play-first) [b](#play-first)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    assert anchors(tmp_path / "a.ipynb") == {"Play-first"}
    assert [link.split()[1] for link in dead_links(tmp_path / "a.ipynb")] == ["#play-first"]


def test_dead_links_of_a_site_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text("<a href='b.html#x'><a href='/b.html#y'><img src=c.png>")
    (tmp_path / "b.html").write_text("<p id=x><a href='a.html'></a>")
    assert dead_links_of_site(tmp_path) == [
        "a.html: /b.html#y (no such place)",
        "a.html: c.png (no such file)",
    ]
