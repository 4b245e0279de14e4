"""For every exercise: the reference's outputs on inputs that nobody has seen."""

import pytest


@pytest.mark.weight(3)
@pytest.mark.hint("Run the notebook's check again; it draws other inputs of the same kinds.")
def test_agrees_with_the_reference(submission, exercise_id):
    """Agrees with the reference on inputs drawn for grading"""
    submission.judge()
