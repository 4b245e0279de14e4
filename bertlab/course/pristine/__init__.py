"""BERT, part by part: the package that you fill in as you work through the course."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertlab.config import BertConfig
    from bertlab.encoder import BertModel
    from bertlab.heads import BertForMaskedLM, BertForPreTraining
    from bertlab.tokenizer import WordPieceTokenizer
    from bertlab.weights import from_pretrained

__version__ = "0.1.0"
__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
    "WordPieceTokenizer",
    "from_pretrained",
]

_HOME = {
    "BertConfig": "config",
    "BertForMaskedLM": "heads",
    "BertForPreTraining": "heads",
    "BertModel": "encoder",
    "WordPieceTokenizer": "tokenizer",
    "from_pretrained": "weights",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: the tokenizer needs no PyTorch."""
    if name in _HOME:
        return getattr(import_module(f"bertlab.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
