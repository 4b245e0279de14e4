"""The course around the package: exercises, checks, and the notebook's magics.

``%load_ext bertlab.course`` in a notebook gives ``%%fill``, ``%check``, ``%hint``, ``%pull``
and ``%status``. Students may read everything here; nothing here needs editing.
"""


def load_ipython_extension(shell) -> None:
    """Register the magics with a running IPython."""
    from bertlab.course.magics import register

    register(shell)
