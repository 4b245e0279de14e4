"""What `from bertlab import ...` gives, and that the README's example runs."""

import re
from functools import partial

import pytest

from bertlab.course.authoring.build import complete_package
from bertlab.course.reference import minilm_folder

from . import kernels


@pytest.fixture(scope="module")
def python(root, tmp_path_factory):
    """Run code in a new process on the complete package, and return what it prints."""
    folder = complete_package(root, tmp_path_factory.mktemp("face"))
    return partial(kernels.python, folder)


def test_the_readme_example_runs(root, python):
    readme = (root / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert '"bert-base-uncased"' in example
    code = example.replace('"bert-base-uncased"', repr(str(minilm_folder())))
    said = re.search(r"# (\[.*\])", example)
    assert said is not None
    expected = said[1].replace("768", "384")  # MiniLM is narrower
    assert expected in python(code)


def test_the_whole_public_face_is_what_it_says(python):
    names = python("import bertlab; print(*sorted(bertlab.__all__))").split()
    assert names == [
        "BertConfig",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertModel",
        "WordPieceTokenizer",
        "from_pretrained",
    ]
    python("from bertlab import *; print(BertConfig.mini(), BertModel, from_pretrained)")
    assert "BertModel" in python("import bertlab; print(dir(bertlab))")


def test_the_tokenizer_needs_no_pytorch(python):
    code = "import sys, bertlab; bertlab.WordPieceTokenizer; print('torch' in sys.modules)"
    assert python(code).strip() == "False"


def test_an_unknown_name_is_an_attribute_error(python):
    code = "import bertlab\ntry: bertlab.Bert\nexcept AttributeError as e: print(e)"
    assert "no attribute 'Bert'" in python(code)
