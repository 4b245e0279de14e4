"""The book: what is on its pages, what must never be, and how it looks in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from bertlab.course import outline
from bertlab.course.authoring import backmatter, book, claims, pages
from bertlab.course.authoring import chapters as sources
from bertlab.course.authoring.mathematics import FormulaError, mathml, with_mathml

from . import links
from .test_release import SKIPPED, canary, found_in

LONG = "a line of a solution that is far too long to stand anywhere else by chance"


@pytest.fixture(scope="module")
def site(root, tmp_path_factory) -> SimpleNamespace:
    """The student's edition, and what was said while it was made."""
    folder = tmp_path_factory.mktemp("book") / "site"
    done = run_book(root, "--dest-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(folder=folder, said=done.stdout + done.stderr)


def run_book(root: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``bertlab book`` on the course at `root`, with that course's own code."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "bertlab.course.cli", "book", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


def asked(root: Path, src: str = "chapters", **settings: str) -> str:
    """What mdBook writes to a preprocessor: the context, and the first chapter as the book."""
    name = outline.chapters()[0].file
    config = {"book": {"src": src}, "preprocessor": {"bertlab": settings}}
    context = {"root": str(root), "config": config, "renderer": "html", "mdbook_version": "0.5.4"}
    chapter = {"name": "0", "content": "", "number": [1], "sub_items": [], "path": f"{name}.ipynb"}
    return json.dumps([context, {"items": [{"Chapter": chapter}]}])


# --- what is on the pages ---


def test_every_chapter_is_a_page_with_its_notebook_to_download(site):
    for chapter in outline.chapters():
        text = (site.folder / f"{chapter.file}.html").read_text("utf-8")
        assert f"bertlab lab --chapter {chapter.number}<" in text
        assert f'href="{chapter.file}.ipynb"' in text
        node = nbformat.read(site.folder / f"{chapter.file}.ipynb", as_version=4)
        assert not any(cell.get("outputs") for cell in node.cells)
        for entry in chapter.exercises:
            assert f'id="{pages.exercise_anchor(entry.id)}"' in text
            assert f'NotImplementedError("exercise {entry.id}")' in text.replace("&quot;", '"')


def test_outputs_tables_and_static_views_are_on_the_pages(site):
    text = (site.folder / "00_start_here.html").read_text("utf-8")
    assert "Hugging Face's BertModel, BERT-Base" in text.replace("&#39;", "'")  # a table
    assert "109,482,240 parameters</b>" in text  # the widget's static view
    assert "<style>" not in text.split("<main>")[1]  # the look is in one file, not in each output
    explorer = (site.folder / "03_attention.html").read_text("utf-8")
    assert "<svg" in explorer.split("<main>")[1] and "heat map" in explorer


def test_every_figure_is_a_file_with_alternative_text(site):
    assert "no alternative text" not in site.said
    count = 0
    for page in site.folder.glob("0*.html"):
        for image in links.page(page).images:
            count += 1
            assert (site.folder / (image["src"] or "")).is_file()
            assert len((image["alt"] or "").split()) >= 3, image
    assert count >= 10


def test_a_figure_is_named_by_its_source_or_by_its_labels():
    def named(source: str, **metadata: str) -> str:
        cell = nbformat.v4.new_code_cell(source, metadata=metadata)
        return pages.alternative_text(cell)

    plain = 'label(axes, "Falling loss", "steps", "nats")'
    assert named(plain) == "plot: Falling loss (nats over steps)"
    assert named(plain, alt="a falling line") == "a falling line"
    assert named('label(axes, f"Layer {n}", "x", "")') == "plot: Layer ... (x)"
    assert named('result.plot("Side by side")') == "plot: Side by side"
    assert named("axes.plot(x, y)") == named("%matplotlib inline") == "a figure without a name"


def test_no_formula_is_left_to_a_script(site):
    shown = 0
    for page in site.folder.glob("*.html"):
        if page.name == "print.html":
            continue
        body = page.read_text("utf-8").split("<main>")[-1]
        shown += body.count("<math")
        prose = re.sub(r"<(pre|code|math)\b.*?</\1>", "", body, flags=re.DOTALL)
        prose = re.sub(r"<[^>]*>", "", prose)
        assert not re.search(r"\$[a-zA-Z\\][^$\n]*\$|\\(frac|text|sum|sqrt)", prose), page.name
    assert shown >= 40
    assert "MathJax" not in "".join(p.read_text("utf-8") for p in site.folder.glob("*.html"))


def test_formulas_become_mathml_and_code_stays_code():
    assert with_mathml("width $h$.") == f"width {mathml('h')}."
    assert 'display="block"' in with_mathml("$$x^2$$")
    for code in ("`$h$`", "```sh\necho $HOME $PATH\n```", "it costs $5 or $6", "<!-- $x$ -->"):
        assert with_mathml(code) == code
    star = mathml("a * b_{i}")
    assert "*" not in star and "_" not in star  # Markdown would read them
    with pytest.raises(FormulaError, match="unknowncommand"):
        mathml(r"\unknowncommand{x}")


def test_the_preprocessor_speaks_mdbooks_protocol(root):
    made = json.loads(book.preprocess(asked(root)))
    chapters = [item["Chapter"] for item in made["items"] if "Chapter" in item]
    found = [chapter["path"] for chapter in chapters]
    assert found == ["index.md", "00_start_here.md", "claims.md", "exercises.md", "glossary.md"]
    assert 'src="data:image/png;base64,' in chapters[1]["content"]  # a bare `mdbook build`
    assert all(isinstance(chapter["sub_items"], list) for chapter in chapters)
    for renderer, status in (("html", 0), ("epub", 1)):
        assert run_book(root, "preprocess", "supports", renderer).returncode == status


# --- claims, exercises, glossary ---


def test_the_claims_lead_to_where_they_were_measured(site):
    text = (site.folder / "claims.html").read_text("utf-8")
    found = re.findall(r'href="(\w+\.html)#(claim-\d+-\d+)"', text)
    marked = sum(
        claims.count_marks((path).read_text("utf-8"))
        for path in (Path(pages.__file__).parents[3] / "solutions" / "chapters").glob("*.md")
    )
    assert len(found) == marked >= 20
    for page, anchor in found:
        assert anchor in links.page(site.folder / page).ids
    assert "<!-- claim" not in "".join(p.read_text("utf-8") for p in site.folder.glob("0*.html"))


MARK = "<!-- claim: each head has a job\noutcome: {}\nmeasured: {} of 72 heads -->"


def test_a_claim_says_what_came_of_it_in_one_of_four_words():
    found = claims.claims_of(MARK.format("wrong", 2), chapter=3)
    assert found == [claims.Claim("each head has a job", "wrong", "2 of 72 heads", "claim-3-1")]
    with pytest.raises(claims.ClaimError, match="'false', but must be one of"):
        claims.claims_of(MARK.format("false", 2), chapter=3)
    with pytest.raises(claims.ClaimError, match="three parts"):
        claims.claims_of("<!-- claim: each head has a job -->", chapter=3)


def test_a_number_that_was_not_measured_is_refused():
    mark = MARK.format("wrong", 3)
    claims.check_numbers(claims.claims_of(mark, 3), f"{mark} Of 72 heads, 3 have one.")
    with pytest.raises(claims.ClaimError, match="says 3, which"):
        claims.check_numbers(claims.claims_of(mark, 3), f"{mark} Of 72 heads, 2 have one.")


def test_the_index_has_every_exercise_with_difficulty_and_time(site):
    text = (site.folder / "exercises.html").read_text("utf-8")
    for entry in outline.entries().values():
        place = f"#{pages.exercise_anchor(entry.id)}"
        row = re.search(rf"<tr>(?:(?!</tr>).)*{place}\".*?</tr>", text, re.DOTALL)
        assert row, entry.id
        assert entry.difficulty in row[0] and f">{entry.minutes}<" in row[0]


def test_the_glossary_is_in_order_and_speaks_of_what_the_chapters_use(root):
    terms = backmatter.glossary()
    assert len(terms) == len({term.term for term in terms}) >= 40
    assert [term.term for term in terms][:3] == ["$c(ab)$", "$e_i$", "$h$"]
    files = {chapter.number: chapter.file for chapter in outline.chapters()}
    for term in terms:
        text = (root / "solutions" / "chapters" / f"{files[term.chapter]}.md").read_text("utf-8")
        words = re.findall(r"[\w()-]+", term.term)
        assert all(word.lower()[:6] in text.lower() for word in words), term.term


def test_no_link_of_the_site_leads_nowhere(site):
    assert links.dead_links_of_site(site.folder) == []


# --- what must not be there ---


@pytest.fixture(scope="module")
def planted(root, tmp_path_factory) -> Path:
    """A copy of the course with canaries in solutions, hidden tests and outputs of solved cells."""
    course = tmp_path_factory.mktemp("planted") / "course"
    shutil.copytree(root, course, ignore=SKIPPED)
    for path in sorted((course / "solutions" / "bertlab").glob("*.py")):
        text = path.read_text("utf-8")
        line = rf'\g<0>\1_ = "{canary(1)} {LONG}"\n'
        path.write_text(re.sub(r"( *)### BEGIN SOLUTION\n", line, text), "utf-8")
    (course / "tests" / "hidden").mkdir(exist_ok=True)
    (course / "tests" / "hidden" / "test_secret.py").write_text(f"# {canary(2)}\n")
    (course / "solutions" / "notes.md").write_text(f"{canary(3)}\n")
    (course / "chapters" / "scratch.txt").write_text(f"{canary(4)}: an author's own notes\n")
    for chapter in outline.chapters(root):
        rewrite_solved(course, chapter)
    return course


def rewrite_solved(course: Path, chapter: outline.Chapter, extra: str = "") -> None:
    """Write the solved notebook of changed solutions, with a canary in the output of each fill."""
    path = course / "solutions" / "chapters" / f"{chapter.file}.ipynb"
    stored = nbformat.read(path, as_version=4).cells
    node = sources.notebook(course, chapter, solved=True)
    for cell, other in zip(node.cells, stored, strict=True):
        if cell.cell_type == "code":
            cell.outputs = list(other.outputs)
            said = canary(5) if cell.source.startswith("%%fill") else extra
            cell.outputs += [nbformat.v4.new_output("stream", text=said)] if said else []
    path.write_text(sources.written(node), "utf-8")


def test_no_canary_reaches_the_students_site(planted, tmp_path):
    done = run_book(planted, "--dest-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "03_attention.html").is_file()
    assert found_in(tmp_path / "site", "x7q") == []


def test_the_instructors_edition_has_the_solutions_and_lies_elsewhere(planted):
    done = run_book(planted, "--edition", "instructor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (planted / "site").exists()
    told = found_in(planted / "site-instructor", canary(1))
    assert {f"{chapter.file}.html" for chapter in outline.chapters()} <= set(told)
    for number in (2, 3, 4):  # not even there
        assert found_in(planted / "site-instructor", canary(number)) == []


def test_an_output_that_tells_a_solution_is_refused(planted, tmp_path):
    course = tmp_path / "course"
    shutil.copytree(planted, course, ignore=SKIPPED)
    rewrite_solved(course, outline.chapters()[0], extra=f'    _ = "{canary(1)} {LONG}"\n')
    with pytest.raises(pages.PageError, match="tells a line of a solution"):
        book.preprocess(asked(course))
    json.loads(book.preprocess(asked(course, edition="instructor")))  # where it may


def test_mdbook_is_told_when_a_page_is_refused(planted, tmp_path):
    course = tmp_path / "course"
    shutil.copytree(planted, course, ignore=SKIPPED)
    path = course / "solutions" / "chapters" / f"{outline.chapters()[0].file}.ipynb"
    path.write_text(path.read_text("utf-8").replace("half an hour", "an hour"), "utf-8")
    done = run_book(course, "preprocess", given=asked(course))
    assert (done.returncode, done.stdout) == (1, "")
    assert "out of date: run `make build`" in done.stderr and "Traceback" not in done.stderr


def test_a_bare_mdbook_refuses_a_notebook_in_which_an_author_tried_a_solution(planted, tmp_path):
    pages_of_course = tmp_path / "chapters"
    pages_of_course.mkdir()
    (pages_of_course / "mine.ipynb").write_text(json.dumps([f'_ = "{canary(1)} {LONG}"']))
    with pytest.raises(pages.PageError, match="would be copied to the site"):
        book.refuse_leaks(planted, pages_of_course)


def test_a_students_own_copy_makes_a_book_but_no_instructors_edition(pristine_copy):
    chapter = outline.chapters()[0]
    page = pages.chapter_page(pristine_copy, chapter, False, lambda image, name: name)
    assert 'id="exercise-0-1"' in page.markdown
    with pytest.raises(book.BookError, match="no solutions"):
        book.make(pristine_copy, "instructor")
    with pytest.raises(book.BookError, match="must be one of"):
        book.make(pristine_copy, "teacher")
