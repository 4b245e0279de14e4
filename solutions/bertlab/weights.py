"""Checkpoints: reading what Transformers writes, writing what it reads, and using the result.

One explicit table says what every tensor is called there and here. Nothing loads partly in
silence: what is missing, left over or of the wrong shape is listed by name.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bertlab.config import BertConfig
from bertlab.encoder import initialize_parameter
from bertlab.tokenizer import WordPieceTokenizer, find_folder, read_json

Model = TypeVar("Model", bound=nn.Module)
logger = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What did not fit when a state dict was loaded; three empty lists when all did.

    Attributes:
        missing: the model's parameters for which there was no tensor, by the model's names.
        unexpected: tensors for which the model has no parameter, by the state dict's names.
        wrong_shape: tensors whose shape is not the parameter's, by the state dict's names.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True when everything fitted."""
        return not (self.missing or self.unexpected or self.wrong_shape)

    def __str__(self) -> str:
        return "; ".join(
            f"{kind.replace('_', ' ')}: {', '.join(names)}"
            for kind, names in vars(self).items()
            if names
        )


# --- exercise 5.3: the names of a checkpoint ---
def hf_name_map(config: BertConfig) -> dict[str, str]:
    """What every tensor of Hugging Face's `BertForPreTraining` is called in ours.

    Args:
        config: says how many layers there are.

    Returns:
        Hugging Face's name to ours, such as `"bert.embeddings.LayerNorm.weight"` to
        `"bert.embeddings.norm.weight"`; every name of `BertForPreTraining(config).state_dict()`.
        The decoder's bias has two names there, `cls.predictions.bias` and
        `cls.predictions.decoder.bias`.
    """
    ### BEGIN SOLUTION
    modules = {
        "bert.embeddings.LayerNorm": "bert.embeddings.norm",
        "bert.pooler.dense": "bert.pooler.dense",
        "cls.predictions.transform.dense": "mlm_head.transform",
        "cls.predictions.transform.LayerNorm": "mlm_head.norm",
        "cls.predictions.decoder": "mlm_head.decoder",
        "cls.seq_relationship": "nsp_head.classifier",
    }
    of_a_layer = {
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "feed_forward.up",
        "output.dense": "feed_forward.down",
        "output.LayerNorm": "feed_forward_norm",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in of_a_layer.items():
            modules[f"bert.encoder.layer.{layer}.{theirs}"] = f"bert.encoder.layers.{layer}.{ours}"
    names = {
        f"bert.embeddings.{table}_embeddings.weight": f"bert.embeddings.{table}.weight"
        for table in ("word", "position", "token_type")
    }
    for theirs, ours in modules.items():
        names |= {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    return names | {"cls.predictions.bias": "mlm_head.decoder.bias"}
    ### END SOLUTION


### BEGIN SOLUTION
def our_name(theirs: str, names: Mapping[str, str], parameters: Mapping[str, Tensor]) -> str:
    """The name in `parameters` for a Hugging Face name of any age; "" when there is none."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        theirs = theirs.replace(old, new)
    ours = names.get(theirs) or names.get(f"bert.{theirs}") or ""
    for name in (ours, ours.removeprefix("bert.")):  # a BertModel's own names have no prefix
        if name in parameters:
            return name
    is_of_the_map = theirs in names.values() or f"bert.{theirs}" in names.values()
    return theirs if theirs in parameters and not is_of_the_map else ""  # a task head


### END SOLUTION
def load_hf_state_dict(
    model: Any,
    state_dict: Mapping[str, Tensor],
    strict: bool = True,
    assign: bool = False,
) -> LoadReport:
    """Put a Hugging Face state dict into a model.

    Takes the names of today and those of 2018 (`gamma` and `beta` for a LayerNorm's `weight`
    and `bias`), with or without the prefix `bert.`. The `position_ids` and `token_type_ids`
    that older versions stored are no parameters and are ignored. The tensors of a task head have
    the same names here as there, such as `classifier.weight`.

    Args:
        model: a `BertModel`, or a model that has one as `bert`; changed in place.
        state_dict: names to tensors; values are converted to the parameter's dtype and device.
        strict: raise when anything does not fit.
        assign: where dtype and device agree, let the parameter share the tensor's memory
            instead of copying, as in PyTorch's `load_state_dict`.

    Returns:
        A `LoadReport` with sorted names. A tied parameter is one parameter with two names; it
        is missing only if neither was there, and is reported by its name in the embeddings.

    Raises:
        ValueError: `strict`, and something is missing, unexpected or of the wrong shape; the
            message names it. Or, strict or not, the two names of a tied parameter have
            different values. The model is then as it was.
    """
    ### BEGIN SOLUTION
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = hf_name_map(model.config)
    report = LoadReport()
    source: dict[nn.Parameter, str] = {}  # where each parameter's value comes from
    for theirs, tensor in state_dict.items():
        if theirs.endswith((".position_ids", ".token_type_ids")):
            continue
        parameter = parameters.get(our_name(theirs, names, parameters))
        if parameter is None:
            report.unexpected.append(theirs)
            continue
        if parameter.shape != tensor.shape:
            report.wrong_shape.append(theirs)
        elif parameter in source and not torch.equal(state_dict[source[parameter]], tensor):
            raise ValueError(
                f"{source[parameter]} and {theirs} are one tied parameter in this model, but "
                "their values differ in the state dict"
            )
        source[parameter] = theirs
    report.missing = [name for name, p in model.named_parameters() if p not in source]
    for listed in (report.missing, report.unexpected, report.wrong_shape):
        listed.sort()
    if strict and not report.complete:
        raise ValueError(f"the state dict does not fit {type(model).__name__}: {report}")
    with torch.no_grad():
        for parameter, theirs in source.items():
            if theirs in report.wrong_shape:
                continue
            if assign:
                parameter.data = state_dict[theirs].to(parameter)
            else:
                parameter.copy_(state_dict[theirs])
    return report
    ### END SOLUTION


# --- end of exercise 5.3 ---


# --- exercise 5.4: load and save a checkpoint ---
def from_pretrained(model_class: type[Model], name_or_path: str | Path) -> Model:
    """Load a checkpoint that Transformers or `save_pretrained` wrote.

    A whole part may differ: a head that the model lacks is left out, and a pooler or head that
    the checkpoint lacks is drawn at random; both are logged by name. Anything less than a whole
    part is an error.

    Args:
        model_class: `BertModel`, `BertForPreTraining` or `BertForMaskedLM`.
        name_or_path: a folder with `config.json` and safetensors (single or sharded), or a hub
            name that is already in the local cache.

    Returns:
        The model in eval mode, on the CPU, in float32 whatever the file's dtype.

    Raises:
        FileNotFoundError: there is no such folder, no such name in the cache, or files are
            missing in it.
        ValueError: the configuration is not one of BERT's; the weights are a pickle; a file is
            damaged; or tensors are missing, left over or of the wrong shape.

    In production: `transformers.AutoModel.from_pretrained`.
    """
    ### BEGIN SOLUTION
    folder = find_folder(name_or_path, ("config.json",))
    config = BertConfig.from_hf(read_config(folder))
    with WithoutInitialization():
        model = model_class(config)
    report = load_hf_state_dict(model, read_tensors(folder), strict=False, assign=True)
    require_whole_parts(report, model, folder)
    draw_missing(model, report)
    return model.eval()
    ### END SOLUTION


def save_pretrained(model: Any, path: str | Path) -> None:
    """Write a checkpoint that Transformers loads with equal outputs.

    Args:
        model: a `BertModel`, or a model that has one as `bert`.
        path: a folder, made if need be: `config.json` and `model.safetensors` are written, with
            Hugging Face's names; a tied parameter once. Each file is replaced whole or not at
            all.

    In production: `transformers.PreTrainedModel.save_pretrained`.
    """
    ### BEGIN SOLUTION
    names = {ours: theirs for theirs, ours in hf_name_map(model.config).items()}
    names |= {  # a BertModel's own names have no prefix
        ours.removeprefix("bert."): theirs.removeprefix("bert.") for ours, theirs in names.items()
    }
    tensors = {}
    for ours, parameter in model.named_parameters():  # each once, a tied one too
        name = names.get(ours, ours)  # a task head's stays as it is
        tensors[name] = parameter.detach().cpu().contiguous()
    config = model.config.to_hf() | {"architectures": [type(model).__name__]} | labels_of(model)
    folder = Path(path)
    os.makedirs(folder, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        save_file(tensors, file, metadata={"format": "pt"})  # the format Transformers asks for
    with replacing(folder / "config.json") as file:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ### END SOLUTION


### BEGIN SOLUTION
def labels_of(model: Any) -> dict[str, dict[str, Any]]:
    """What Transformers' config says about the classes of a task head; nothing without one."""
    if not isinstance(getattr(model, "classifier", None), torch.nn.Linear):
        return {}
    names = [f"LABEL_{label}" for label in range(model.classifier.out_features)]
    numbers = {name: label for label, name in enumerate(names)}
    return {"id2label": {str(label): name for name, label in numbers.items()}, "label2id": numbers}


### END SOLUTION
# --- end of exercise 5.4 ---


# --- exercise 5.5: resize the vocabulary ---
def resize_word_embeddings(model: Any, vocab_size: int) -> None:
    """Give a model room for more (or fewer) pieces, in place.

    Rows that stay keep their values; new rows are drawn from a normal distribution with the
    config's `initializer_range`, new biases are 0. The MLM head stays tied to the table.
    `model.config`, and that of its `bert`, have the new size.

    Args:
        model: a `BertModel`, or a model that has one as `bert` and may have an `mlm_head`.
        vocab_size: the new number of pieces.

    Raises:
        ValueError: `vocab_size` is less than 1, or leaves no row for `pad_token_id`. The model
            is then as it was.

    In production: `transformers.PreTrainedModel.resize_token_embeddings`.
    """
    ### BEGIN SOLUTION
    config = dataclasses.replace(model.config, vocab_size=vocab_size)
    bert = getattr(model, "bert", model)
    word = bert.embeddings.word
    word.weight = resized(word.weight, vocab_size, config.initializer_range)
    word.num_embeddings = vocab_size
    if hasattr(model, "mlm_head"):
        decoder = model.mlm_head.decoder
        decoder.weight = word.weight
        decoder.bias = resized(decoder.bias, vocab_size, 0.0)
        decoder.out_features = vocab_size
    model.config = bert.config = config
    ### END SOLUTION


### BEGIN SOLUTION
def resized(old: nn.Parameter, rows: int, spread: float) -> nn.Parameter:
    """`old` with another number of rows; new ones are drawn with this standard deviation."""
    kept = min(rows, len(old))
    new = old.detach().new_empty(rows, *old.shape[1:]).normal_(0, spread)
    new[:kept] = old.detach()[:kept]
    return nn.Parameter(new, requires_grad=old.requires_grad)


### END SOLUTION
# --- end of exercise 5.5 ---


# --- exercise 5.6: fill the mask ---
def fill_mask(
    model: nn.Module, tokenizer: WordPieceTokenizer, text: str, top_k: int = 5
) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
    """The pieces that a model finds likeliest where a text has a mask.

    Args:
        model: `BertForPreTraining` or `BertForMaskedLM`; read in eval mode, and left in the
            mode it was in.
        tokenizer: the model's.
        text: holds the tokenizer's mask token, `[MASK]`, once or more.
        top_k: how many pieces.

    Returns:
        `(piece, probability)` pairs, likeliest first; a list of such lists when there are
        several masks, from left to right.

    Raises:
        ValueError: `text` has no mask token.

    In production: `transformers.pipeline("fill-mask")`.
    """
    ### BEGIN SOLUTION
    ids = tokenizer(text)["input_ids"]
    if tokenizer.mask_token_id not in ids:
        raise ValueError(f"text has no {tokenizer.mask_token}: {text!r}; put one where to guess")
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model(input_ids)
    model.train(was_training)
    logits = output.logits if hasattr(output, "logits") else output.prediction_logits
    probabilities = logits[input_ids == tokenizer.mask_token_id].softmax(dim=-1)  # [masks, vocab]
    filled = []
    for values, pieces in zip(*probabilities.topk(top_k), strict=True):
        names = tokenizer.convert_ids_to_tokens(pieces.tolist())
        filled.append(list(zip(names, values.tolist(), strict=True)))
    return filled[0] if len(filled) == 1 else filled
    ### END SOLUTION


# --- end of exercise 5.6 ---


# --- given: files ---

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return read_json(folder / "config.json")
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its name; the file is mapped into memory, not copied.

    Raises:
        FileNotFoundError: there is no weight file, or a shard is missing.
        ValueError: the weights are a pickle, or a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return read_safetensors(folder / "model.safetensors")
    if index.exists():
        return read_shards(index)
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it "
            "is loaded. If you trust it, convert it once: transformers.BertForPreTraining."
            "from_pretrained(folder).save_pretrained(folder) writes model.safetensors"
        )
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor {index.name}")


def read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint in several files, which an index lists."""
    try:
        files = read_json(index)["weight_map"]
        shards = {file: index.parent / Path(file).name for file in set(files.values())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards ({error!r})") from error
    absent = sorted(file for file, path in shards.items() if not path.exists())
    if absent:
        raise FileNotFoundError(f"{index} lists files that are not there: {', '.join(absent)}")
    tensors = {file: read_safetensors(path) for file, path in shards.items()}
    lost = sorted(name for name, file in files.items() if name not in tensors[file])
    if lost:
        raise ValueError(f"{index} lists tensors that its files lack: {', '.join(lost)}")
    return {name: tensors[file][name] for name, file in files.items()}


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    try:
        with safe_open(file, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}): it is damaged or incomplete; "
            "copy or download it again"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when it is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# --- given: building a model whose weights come from a file ---


class WithoutInitialization(TorchFunctionMode):
    """While it is active, the functions of `torch.nn.init` do nothing: values come from a file."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def part_of(name: str) -> str:
    """The part of a model to which a tensor belongs: `embeddings`, `encoder`, `pooler`, a head."""
    return name.removeprefix("bert.").split(".")[0]


def require_whole_parts(report: LoadReport, model: nn.Module, folder: Path) -> None:
    """Log the parts that only the model or only the checkpoint has.

    Raises:
        ValueError: the difference is not a whole pooler or head.
    """
    core = ("embeddings", "encoder")
    loaded = {name for name, _ in model.named_parameters()} - set(report.missing)
    begun = {part_of(name) for name in loaded}
    partial = [name for name in report.missing if part_of(name) in (*core, *begun)]
    surplus = [name for name in report.unexpected if part_of(name) in core]
    wrong = LoadReport(partial, surplus, report.wrong_shape)
    if not wrong.complete:
        raise ValueError(f"{folder} does not fit {type(model).__name__}: {wrong}")
    if report.missing:
        logger.warning("drawn at random, the checkpoint has no %s", ", ".join(report.missing))
    if report.unexpected:
        logger.warning(
            "left out, %s has no place for %s", type(model).__name__, ", ".join(report.unexpected)
        )


def draw_missing(model: Any, report: LoadReport) -> None:
    """Give every parameter that the checkpoint did not have its initial value."""
    for prefix, part in model.named_modules():
        for name, parameter in part.named_parameters(prefix=prefix, recurse=False):
            if name in report.missing:
                kind = name.rpartition(".")[2]
                initialize_parameter(part, kind, parameter, model.config.initializer_range)
