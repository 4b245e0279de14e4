"""A widget that is worth reading without a kernel: live in a notebook, a static view elsewhere."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from bertlab.course.display import STYLE, Shown


class View:
    """Controls above a rendering that follows them.

    Where there is a kernel, the notebook shows the controls; in a page without one (the book, a
    notebook that was just opened) the static view of the starting values is shown instead.

    Args:
        controls: the controls by argument name; each has a `description` or a label.
        render: takes the controls' values by name and returns what to show.
    """

    def __init__(
        self, controls: Mapping[str, ipywidgets.ValueWidget], render: Callable[..., Shown]
    ) -> None:
        self.controls = dict(controls)
        self.render = render
        self._start = self._rendered()
        self._picture = ipywidgets.HTML(STYLE + self._start.html)
        for control in self.controls.values():
            control.observe(self._update, names="value")
        self.widget = ipywidgets.VBox([*self.controls.values(), self._picture])
        self.widget.add_class("bertlab-view")

    def _rendered(self) -> Shown:
        values = {name: control.value for name, control in self.controls.items()}
        try:
            return self.render(**values)
        except ValueError as error:  # what was typed cannot be shown: say why, keep the controls
            from bertlab.course.display import card

            return card("error", "This cannot be shown", [str(error)])

    def _update(self, change: Any) -> None:
        self._picture.value = STYLE + self._rendered().html

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        live = self.widget._repr_mimebundle_(**options) or {}
        return {**live, **self._start._repr_mimebundle_()}
