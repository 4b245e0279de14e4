"""How long a chapter's experiments are: whole, or cut short where a test only wants them to run."""

import os


def in_full() -> bool:
    """Say whether experiments are whole: always, but where a test sets BERTLAB_SHORT to 1.

    What you see in a chapter is always the whole experiment. The tests run each chapter a second
    time as a student gets it, to see that nothing stops it; there the numbers do not matter.
    """
    return os.environ.get("BERTLAB_SHORT") != "1"


def shortened(count: int) -> int:
    """Return a number of steps or of examples: `count`, or a twentieth of it in a test.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}, but must be at least 1")
    if in_full():
        return count
    return min(count, max(2, count // 20))
