"""What you can run on your own package: every exercise that you have begun, on another seed.

    make test           in a student's copy

An exercise that is still to do is skipped; it does not count as passed.
"""

import pytest

from bertlab.course import outline
from bertlab.course.package import Package
from bertlab.course.workspace import Workspace

SEED = 1


@pytest.fixture(scope="module")
def package():
    loaded = Package(Workspace())
    loaded.install()
    return loaded


@pytest.mark.parametrize("exercise_id", list(outline.entries()))
def test_the_part_agrees_with_the_reference(exercise_id, package):
    verdict = package.judge(exercise_id, seed=SEED)
    if verdict.status == "todo":
        pytest.skip("to do")
    assert verdict.status == "passed", f"{verdict.diagnosis}\n{verdict.frames}"
