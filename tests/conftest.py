"""What the tests share: the complete package, a student's copy, the corpus."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("BERTLAB_REFERENCE", "seeded")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the course."""
    return ROOT


@pytest.fixture(scope="session")
def complete(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """The complete package, module by module: ``complete.attention.split_heads``."""
    from bertlab.course import outline
    from bertlab.course.authoring.build import complete_package
    from bertlab.course.package import Package, remove_packages
    from bertlab.course.workspace import Workspace

    folder = complete_package(ROOT, tmp_path_factory.mktemp("complete"))
    package = Package(Workspace(folder))
    for exercise_id in outline.entries():
        package.use_own(exercise_id)
    package.install()
    modules = {name: importlib.import_module(f"bertlab.{name}") for name in outline.modules()}
    yield SimpleNamespace(**modules)
    remove_packages()
    for name in outline.modules():
        sys.modules.pop(f"bertlab.{name}", None)


@pytest.fixture(autouse=True)
def _no_package_is_loaded_over_the_complete_one() -> Iterator[None]:
    """`complete` is there for every test of a process: one that loads a package would swap it.

    Such a test runs its code in a process of its own (`kernels.python`).
    """
    before = _packages()
    yield
    assert not before or before == _packages(), "this test loaded a package over `complete`"


def _packages() -> list[object]:
    """The packages that are installed: by name, because `Package` takes seconds to import."""
    return [finder for finder in sys.meta_path if type(finder).__name__ == "Package"]


@pytest.fixture(scope="session")
def pristine_copy(tmp_path_factory) -> Path:
    """A student's copy that no test may change; copy it with `student_copy`."""
    from bertlab.course.authoring.release import release

    folder = tmp_path_factory.mktemp("release") / "course"
    release(ROOT, folder)
    return folder


@pytest.fixture
def student_copy(pristine_copy: Path, tmp_path: Path) -> Path:
    """A student's fresh copy of the course, to do with as the test likes."""
    folder = tmp_path / "course"
    shutil.copytree(pristine_copy, folder)
    return folder


@pytest.fixture(scope="session")
def documentation_paragraphs() -> list[str]:
    """Every paragraph of the documentation corpus."""
    from bertlab.course.corpus import paragraphs

    return [paragraph.text for paragraph in paragraphs()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: "test_solved_notebooks" not in item.nodeid)
