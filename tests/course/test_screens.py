"""What a student sees: JupyterLab in a headless Chromium, driven by real clicks and typing.

Screenshots go to ``BERTLAB_SCREENSHOTS`` if that is set, to be looked at; the assertions hold
either way.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from bertlab.course import outline
from bertlab.course.authoring.chapters import environment
from bertlab.course.display import STYLE, card
from bertlab.course.regions import find_regions

from . import browser as browsing
from .browser import photograph

pytestmark = pytest.mark.browser

WRONG = """%%fill 3.1
def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)
    return weights @ value, weights
"""


#: The explorers of ``bertlab/course/widgets``, in the order of the cells that show them.
EXPLORERS = (
    "parameter_explorer",
    "tokenizer_explorer",
    "embedding_explorer",
    "attention_explorer",
    "agreement_explorer",
    "mask_explorer",
    "masking_explorer",
    "impact_explorer",
    "quantization_explorer",
    "pruning_explorer",
)
#: What an explorer is given that needs something of the reader's: a small model's heads here.
SMALL_MODEL = """
import torch
from bertlab.config import BertConfig
from bertlab.encoder import BertModel
from bertlab.fine_tuning import SequenceClassifier

torch.manual_seed(0)
small = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   intermediate_size=48, max_position_embeddings=16)
model = SequenceClassifier(BertModel(small), 5).eval()
ids = torch.randint(1, 40, (20, 9))
texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
texts["labels"] = model(**texts).logits.argmax(-1)  # with all heads it is always right
given = (model, [texts], [[0.3, 0.1, 0.5, 0.4], [0.05, 0.9, 0.2, 0.02]], 0)
"""
FIRST = 4  # the cell of the first explorer, counted from 0


def shown(name: str) -> str:
    """The code of the cell that shows an explorer."""
    begin = f"from bertlab.course.widgets.{name} import {name}\n"
    if name == "pruning_explorer":
        return f"{begin}{SMALL_MODEL}{name}(*given)"
    return f"{begin}{name}()"


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
        *map(shown, EXPLORERS),
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
    with browsing.chromium() as browser:
        # Tall, because JupyterLab takes cells that are out of sight off the page.
        page = browser.new_page(viewport={"width": 1440, "height": 5200})
        page.notes = browsing.Notes()  # type: ignore[attr-defined]  # for one test
        page.notes.watch(page)  # type: ignore[attr-defined]
        page.goto(f"{address}/lab/tree/chapters/screens.ipynb", timeout=90_000)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        page.get_by_text("(ipykernel) | Idle").wait_for(timeout=90_000)
        page.get_by_text("Run", exact=True).first.click()
        page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
        try:
            last = f".bertlab-view >> nth={len(EXPLORERS) - 1}"
            page.wait_for_selector(last, timeout=240_000)
        except Exception:
            photograph(page, "run_all_failed")
            raise
        yield page


def outputs(page, number: int):
    """Return the output area of a code cell, counted from 0, scrolled into view."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    return cell.locator(".jp-Cell-outputArea")


def explorer(page, name: str):
    """Return the output area of an explorer."""
    return outputs(page, FIRST + EXPLORERS.index(name))


def picture(area) -> str:
    """Return what an explorer shows below its controls, as HTML."""
    return area.locator(".bertlab-view .widget-html-content").last.inner_html()


def wait_for_text(page, area, text: str) -> None:
    """Wait until an explorer shows a text below its controls."""
    found = area.locator(".bertlab-view .widget-html-content").last.filter(has_text=text)
    found.wait_for(timeout=30_000)


def wait_for_another(page, area, before: str) -> None:
    """Wait until an explorer shows something else below its controls."""
    for _ in range(60):
        if picture(area) != before:
            return
        page.wait_for_timeout(500)
    raise AssertionError("the view has not changed for 30 seconds")


def type_into(area, number: int, text: str) -> None:
    """Type over what stands in a text control, and leave it with Tab."""
    box = area.locator("textarea, input[type=text]").nth(number)
    box.click()
    box.press("Control+a")
    box.press_sequentially(text)
    box.press("Tab")


def test_a_right_part_shows_a_passed_card(page):
    area = outputs(page, 1)
    card = area.locator(".bertlab.card.passed")
    assert "✓ passed" in card.inner_text()
    assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "5px"
    photograph(area, "card_passed")


def test_a_known_mistake_is_named_on_the_card(page):
    area = outputs(page, 2)
    text = area.locator(".bertlab.card.failed").inner_text()
    assert "✗ not yet" in text
    assert "It does what people get when" in text and "scaled" in text
    photograph(area, "card_failed")


def test_the_status_shows_the_course_as_a_path(page):
    area = outputs(page, 3)
    steps = [text.split("\n") for text in area.locator(".path li").all_inner_texts()]
    assert len(steps) == len(outline.chapters())
    assert steps[0][:2] == ["0 Start here", "1 of 1 done"]
    assert steps[1][0].startswith("→ 1 ") and "min left" in steps[1][1]
    assert "✗ 3.1" in steps[3][2].replace("\u2002", " ") and "○" in steps[3][2]
    assert area.locator(".path li.here").count() == 1
    photograph(area, "status")


# --- the explorers ---


def test_every_explorer_of_the_course_is_driven_here(page):
    folder = Path(outline.__file__).parent / "widgets"
    there = {path.stem for path in folder.glob("*.py")} - {"__init__", "view"}
    assert there == set(EXPLORERS)
    driven = {name for name in globals() if name.startswith("test_the_")}
    for name in EXPLORERS:
        assert any(name in test for test in driven), name


def test_the_parameter_explorer_follows_the_arrow_keys(page):
    area = explorer(page, "parameter_explorer")
    assert "109,482,240 parameters" in picture(area)
    area.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowLeft")
    wait_for_text(page, area, "102,394,368 parameters")  # 11 layers
    page.keyboard.press("Tab")  # to the number beside the slider
    page.keyboard.press("Tab")  # to the next slider
    eleven_layers = picture(area)
    page.keyboard.press("ArrowLeft")  # 704 wide
    wait_for_another(page, area, eleven_layers)
    assert "102,394,368" not in picture(area)
    photograph(area, "parameter_explorer")


def test_the_tokenizer_explorer_follows_typing_and_a_click(page):
    area = explorer(page, "tokenizer_explorer")
    type_into(area, 0, "unhappiness of BERT")
    wait_for_text(page, area, "##iness")
    assert "unknown: " not in picture(area)
    area.locator("input[type=checkbox]").click()  # the vocabulary knows no capitals
    wait_for_text(page, area, "✗ unknown: BERT")
    photograph(area, "tokenizer_explorer")


def test_the_embedding_explorer_follows_typing_and_says_what_it_cannot_show(page):
    area = explorer(page, "embedding_explorer")
    type_into(area, 0, "python")
    wait_for_text(page, area, "Nearest to python")
    assert "snakes" in picture(area)
    type_into(area, 0, "unhappiness")
    wait_for_text(page, area, "is not one piece of the vocabulary")
    type_into(area, 0, "good")
    type_into(area, 1, "a short sentence")
    wait_for_text(page, area, "sentence")
    wait_for_text(page, area, "Nearest to good")
    photograph(area, "embedding_explorer")


def test_the_attention_explorer_follows_clicks_keys_and_typing(page):
    area = explorer(page, "attention_explorer")
    handle = area.locator(".noUi-handle").first
    handle.click()
    handle.press("ArrowRight")
    wait_for_text(page, area, "layer 2, head 3")
    area.locator(".noUi-handle").nth(1).press("ArrowLeft")
    wait_for_text(page, area, "layer 2, head 2")
    type_into(area, 0, "It returns (nearly always) nothing.")
    wait_for_text(page, area, "nearly")
    assert area.locator("svg[role=img][aria-label]").count() == 2
    photograph(area, "attention_explorer")


def test_the_agreement_explorer_follows_its_menus(page):
    area = explorer(page, "agreement_explorer")
    wait_for_text(page, area, "layer 3: tanh-GELU")
    area.locator("select").first.select_option("none")
    wait_for_text(page, area, "every part agrees")
    area.locator("select").first.select_option("query and key are exchanged")
    area.locator(".noUi-handle").first.press("ArrowLeft")
    wait_for_text(page, area, "layer 2: query and key are exchanged")
    wait_for_text(page, area, "the first part to depart: ")
    area.locator("select").nth(1).select_option("float64")
    wait_for_text(page, area, "In float64")
    photograph(area, "agreement_explorer")


def test_the_mask_explorer_follows_the_slider_and_typing(page):
    area = explorer(page, "mask_explorer")
    assert "[MASK] (array)" in picture(area)
    area.locator(".noUi-handle").first.press("ArrowLeft")
    wait_for_text(page, area, "[MASK] (the)")
    type_into(area, 0, "the matrix must be square")
    wait_for_text(page, area, "square")
    assert "rank" in picture(area)
    photograph(area, "mask_explorer")


def test_the_masking_explorer_follows_the_sliders_and_typing(page):
    area = explorer(page, "masking_explorer")
    assert "pieces chosen" in picture(area)
    first = picture(area)
    area.locator(".noUi-handle").nth(1).press("ArrowRight")  # another draw
    wait_for_another(page, area, first)
    for _ in range(20):
        area.locator(".noUi-handle").first.press("ArrowRight")  # every piece is chosen
    type_into(area, 0, "the matrix must be square")
    wait_for_text(page, area, "5 of 5")
    photograph(area, "masking_explorer")


def test_the_impact_explorer_follows_typing_and_its_menu(page):
    area = explorer(page, "impact_explorer")
    assert "It would come from torch" in picture(area)
    type_into(area, 0, "Draw the graph with its nodes and edges.")
    wait_for_text(page, area, "What speaks for networkx")
    assert "It would come from networkx" in picture(area)
    area.locator("select").first.select_option("sympy")
    wait_for_text(page, area, "What speaks for sympy")
    assert "It would come from networkx" in picture(area)  # the decision is the same
    photograph(area, "impact_explorer")


def test_the_quantization_explorer_follows_the_slider_the_box_and_the_menu(page):
    area = explorer(page, "quantization_explorer")
    assert "feed-forward down, layer 6: 4 bits, one range for all" in picture(area)
    area.locator(".noUi-handle").first.press("ArrowRight")
    wait_for_text(page, area, "5 bits, one range for all")
    area.locator("input[type=checkbox]").click()
    wait_for_text(page, area, "5 bits, one range for each row")
    area.locator("select").first.select_option("query weight, layer 1")
    wait_for_text(page, area, "query weight, layer 1: 5 bits")
    assert area.locator("svg[role=img][aria-label]").count() == 1
    photograph(area, "quantization_explorer")


def test_the_pruning_explorer_follows_the_slider_and_the_switches(page):
    area = explorer(page, "pruning_explorer")
    assert "8 of 8 heads are on" in picture(area)
    area.locator(".noUi-handle").first.press("ArrowRight")
    wait_for_text(page, area, "7 of 8 heads are on")
    switches = area.locator("button.widget-toggle-button")
    assert switches.count() == 8
    assert "mod-active" in (switches.nth(7).get_attribute("class") or "")  # the least important
    switches.nth(0).press("Space")
    wait_for_text(page, area, "6 of 8 heads are on")
    for number in (1, 2, 3):  # a layer needs one
        switches.nth(number).press("Space")
    wait_for_text(page, area, "layer 1 has no head left")
    switches.nth(3).press("Space")
    wait_for_text(page, area, "4 of 8 heads are on")
    photograph(area, "pruning_explorer")


def test_nothing_failed_and_nothing_was_asked_of_another_host(page):
    assert page.notes.elsewhere == []
    assert page.notes.failed == []


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_everything_can_be_read_in_both_themes(page, theme):
    page.get_by_text("Settings", exact=True).first.click()
    page.get_by_text("Theme", exact=True).first.hover()
    page.get_by_text(theme, exact=True).first.click()
    light = "true" if theme.endswith("Light") else "false"
    page.wait_for_selector(f"[data-jp-theme-light='{light}']", state="attached", timeout=20_000)
    page.wait_for_timeout(1_000)
    cards = page.locator(".bertlab")
    assert cards.count() >= 10
    assert browsing.low_contrast(page, only=".bertlab, .bertlab-view") == []
    photograph(page, f"everything_{light}")


def test_the_cards_can_be_read_in_vs_code(page):
    """The same cards on a page with VS Code's variables and not JupyterLab's."""
    html = card("failed", "3.1 title", ["a `name`"], code="x = 1", soft=["small print"]).html
    dark = "--vscode-foreground:#ccc;--vscode-editor-background:#1f1f1f;--vscode-panel-border:#333"
    vscode = page.context.browser.new_page()
    for look in (f"{dark};background:#1f1f1f", "background:#fff"):
        vscode.set_content(f"<body style='{look}'>{STYLE}{html}</body>")
        assert browsing.low_contrast(vscode) == []
    vscode.close()


# --- last, because it stops the kernel ---


def restart(page) -> None:
    page.get_by_text("Kernel", exact=True).first.click()
    page.locator(".lm-Menu-item[data-command='kernelmenu:restart']").click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=90_000)


def save_and_reload(page) -> None:
    page.keyboard.press("Control+s")
    page.wait_for_timeout(3_000)
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=90_000)


def test_a_reload_and_a_restart_leave_what_was_shown(page):
    """The picture of every explorer stays on a page loaded anew, and without its kernel."""
    before = [picture(explorer(page, name)) for name in EXPLORERS]
    save_and_reload(page)
    page.wait_for_selector(f".bertlab-view >> nth={len(EXPLORERS) - 1}", timeout=60_000)
    assert [picture(explorer(page, name)) for name in EXPLORERS] == before
    restart(page)
    assert [picture(explorer(page, name)) for name in EXPLORERS] == before


def test_an_explorer_that_jupyterlab_has_lost_says_what_brings_it_back(page):
    save_and_reload(page)  # after the restart: there is no state to be saved
    lost = page.locator(".jp-OutputArea-output.jupyter-widgets", has_text="model not found")
    lost.nth(len(EXPLORERS) - 1).wait_for(state="attached", timeout=60_000)
    size, said = lost.first.evaluate(
        "e => [getComputedStyle(e).fontSize, getComputedStyle(e, '::after').content]"
    )
    assert size == "0px" and "Run this cell" in said
    photograph(page, "after_restart")


def test_the_landing_page_leads_to_the_next_exercise(page, address):
    page = page.context.browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(address, timeout=90_000)  # what `bertlab lab` opens
    link = page.locator(".jp-MarkdownViewer a", has_text="chapter 0, Start here")
    link.wait_for(timeout=90_000)
    assert page.locator(".jp-MarkdownViewer table tr").count() == 1 + len(outline.chapters())
    photograph(page, "landing")
    link.click()
    page.wait_for_url("**/chapters/00_start_here.ipynb*", timeout=90_000)
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell", timeout=90_000)
    page.close()
