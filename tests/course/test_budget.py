"""Experiments are cut short where a test asks for it, and nowhere else."""

import pytest

from bertlab.course.budget import in_full, shortened


@pytest.mark.parametrize(("count", "short"), [(400, 20), (15, 2), (2, 2), (1, 1)])
def test_a_twentieth_where_it_is_asked_for(monkeypatch, count, short):
    monkeypatch.delenv("BERTLAB_SHORT", raising=False)
    assert in_full()
    assert shortened(count) == count
    monkeypatch.setenv("BERTLAB_SHORT", "1")
    assert not in_full()
    assert shortened(count) == short


def test_nothing_is_not_a_number_of_steps():
    with pytest.raises(ValueError, match="count is 0"):
        shortened(0)
