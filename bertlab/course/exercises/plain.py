"""What exercise files share and needs no PyTorch: calling a part, catching its errors."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any


def bert_config(**fields: Any) -> Any:
    """Return a `bertlab.config.BertConfig`.

    Imported here and not above: an exercise file is loaded while the package is being imported,
    to put stand-ins in, so it must not import the package itself.
    """
    from bertlab.config import BertConfig

    return BertConfig(**fields)


def pair(value: Any, names: str) -> tuple[Any, Any]:
    """Return a pair that a student's part should have returned.

    Raises:
        TypeError: it returned something else.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"should return the pair {names}, returned {type(value).__name__}")
    return value


def error_of(
    call: Callable[[], Any], *mentions: Any, kind: type[Exception] | None = None
) -> dict[str, Any]:
    """Call, and return which error came, and of each of `mentions` whether its message has it.

    Args:
        kind: an error whose subclasses count as it; without it the type must be the very one.
    """
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        name = kind if kind is not None and isinstance(error, kind) else type(error)
        return {"error": name.__name__, **_mentioned(mentions, str(error))}
    return {"error": "none", **_mentioned(mentions, "")}


def _mentioned(words: Iterable[Any], message: str) -> dict[str, bool]:
    return {f"its message must mention '{word}'": str(word) in message for word in words}


def written(name: str, *args: Any, **options: Any) -> str:
    """Return a call as one would write it, cut where it is long: ``"normalize('É')"``."""
    parts = [_short(value) for value in args]
    parts += [f"{key}={_short(value)}" for key, value in options.items()]
    return f"{name}({', '.join(parts)})"


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def results(calls: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Make each call, and return what it gave under its label; like labels are numbered."""
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for label, call in calls:
        seen[label] += 1
        found[label if seen[label] == 1 else f"{label} #{seen[label]}"] = call()
    return found
