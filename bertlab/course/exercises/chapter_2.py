"""Chapter 2: from token ids to vectors, and texts longer than the model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertlab.course.exercise import Case, Exercise, Misconception
from bertlab.course.exercises.support import (
    bert_config,
    error_of,
    gradients,
    integers,
    normal,
    padding_mask,
    parameters_like,
    with_parameters,
)

# --- 2.1 layer normalization ---------------------------------------------------------------------


def their_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
    """Return PyTorch's layer normalization over the last axis, with BERT's eps."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _norm_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, x: Tensor, eps: float | None = None, **options: Any) -> Case:
        width = x.shape[-1]
        inputs = {
            "x": x,
            "weight": normal(rng, width, scale=0.3, mean=1.0),
            "bias": normal(rng, width, scale=0.3),
            "cotangent": normal(rng, *x.shape),
        }
        return Case(name, inputs if eps is None else {**inputs, "eps": eps}, **options)

    yield case("a batch of vectors", normal(rng, 2, 5, 32, scale=2.0, mean=0.5))
    yield case("a single vector", normal(rng, 24))
    yield case("vectors of low variance", normal(rng, 3, 4, 32, scale=1e-4))
    yield case(
        "vectors of low variance, with a larger eps", normal(rng, 3, 4, 32, scale=0.05), 1e-2
    )
    level = torch.full((1, 2, 32), 3.0)
    yield case("a vector whose units are all equal", torch.cat([level, normal(rng, 1, 2, 32)]))
    yield case("large numbers in float16", normal(rng, 3, 32, scale=1000.0), dtype="float16")
    yield case("numbers in bfloat16", normal(rng, 3, 32), dtype="bfloat16")


def _norm_probe(
    part: Any, x: Tensor, weight: Tensor, bias: Tensor, cotangent: Tensor, **more: float
) -> dict[str, Tensor]:
    given = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    output = part.layer_norm(*leaves.values(), **more)
    if x.dtype in (torch.float16, torch.bfloat16):
        return {"output": output}
    return {"output": output, **gradients(output, cotangent, leaves)}


def _norm_by(
    normalize: Callable[[Tensor, float], Tensor],
) -> Callable[..., Tensor]:
    """Return a layer normalization with another step before the gain and the bias."""

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
        return (normalize(x, eps) * weight + bias).to(x.dtype)

    return layer_norm


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _variance(x: Tensor, correction: int = 0) -> Tensor:
    return x.var(-1, correction=correction, keepdim=True)


def _over(x: Tensor, eps: float, axes: tuple[int, ...]) -> Tensor:
    """Normalize over other axes than the last; a vector alone has no other."""
    x, axes = _wide(x), axes if x.ndim > 1 else (-1,)
    variance = x.var(axes, correction=0, keepdim=True)
    return (x - x.mean(axes, keepdim=True)) / (variance + eps).sqrt()


def _in_half_precision(x: Tensor, eps: float) -> Tensor:
    centered = _centered(x)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()


NORM = Exercise(
    id="2.1",
    reference={"layer_norm": their_layer_norm},
    reference_name="torch.nn.functional.layer_norm",
    cases=_norm_cases,
    probe=_norm_probe,
    misconceptions=(
        Misconception(
            "the variance is divided by hidden - 1",
            "`x.var()` and `x.std()` divide by n - 1 unless you say otherwise: that is the right "
            "choice when you estimate a population's variance from a sample. Here the vector is "
            "no sample, it is all there is, and LayerNorm divides by n: `correction=0` (or "
            "`unbiased=False`). With 768 units the difference is less than 0.1%, so a rough look "
            "does not show it; but it enters at every LayerNorm of the model.",
            {
                "layer_norm": _norm_by(
                    lambda x, eps: _centered(_wide(x)) / (_variance(_wide(x), 1) + eps).sqrt()
                )
            },
        ),
        Misconception(
            "eps is PyTorch's 1e-5 where it is not given",
            "PyTorch's LayerNorm adds 1e-5 to the variance by default, BERT's adds 1e-12. With "
            "vectors of variance 1 both round to the same. With vectors of small variance, such as "
            "the sum of three freshly drawn tables (about 0.001), 1e-5 is no longer small, and "
            "every unit comes out too near to 0. The default of this function is BERT's.",
            {
                "layer_norm": lambda x, weight, bias, eps=1e-5: F.layer_norm(
                    x, x.shape[-1:], weight, bias, eps
                )
            },
        ),
        Misconception(
            "the eps that is given is ignored",
            "The function takes eps as an argument, and models differ in it: 1e-12 in BERT, 1e-5 "
            "in RoBERTa. Use the value you are given, not a number of your own.",
            {
                "layer_norm": lambda x, weight, bias, eps=1e-12: F.layer_norm(
                    x, x.shape[-1:], weight, bias, 1e-12
                )
            },
        ),
        Misconception(
            "eps is left out",
            "Where all units of a vector are equal the variance is 0, and 0 / 0 is NaN. One such "
            "vector is enough: attention carries the NaN into every other token, and the loss with "
            "it. eps is added to the variance so that the division stays finite.",
            {
                "layer_norm": _norm_by(
                    lambda x, eps: _centered(_wide(x)) / _variance(_wide(x)).sqrt()
                )
            },
        ),
        Misconception(
            "eps is added to the standard deviation",
            "eps belongs inside the root: sqrt(variance + eps). Outside it, 1e-12 is lost beside "
            "any standard deviation that float32 can hold, and a larger eps acts differently: for "
            "eps = 0.01, sqrt(v + 0.01) and sqrt(v) + 0.01 differ a lot when v is small.",
            {
                "layer_norm": _norm_by(
                    lambda x, eps: _centered(_wide(x)) / (_variance(_wide(x)).sqrt() + eps)
                )
            },
        ),
        Misconception(
            "the mean is not subtracted",
            "That is RMSNorm, or nearly: it divides by the root of the mean square and leaves the "
            "mean in place. Llama and T5 use it, since it is cheaper. BERT's LayerNorm first moves "
            "each vector to mean 0.",
            {
                "layer_norm": _norm_by(
                    lambda x, eps: (
                        _wide(x) / (_wide(x).square().mean(-1, keepdim=True) + eps).sqrt()
                    )
                )
            },
        ),
        Misconception(
            "the vector is divided by the variance, without the root",
            "Dividing by the standard deviation gives variance 1. Dividing by the variance gives "
            "variance 1 / variance: small vectors get larger than large ones.",
            {
                "layer_norm": _norm_by(
                    lambda x, eps: _centered(_wide(x)) / (_variance(_wide(x)) + eps)
                )
            },
        ),
        Misconception(
            "mean and variance are taken over the whole text",
            "LayerNorm looks at each token's vector by itself: over the last axis only. Taken over "
            "the last two axes, a token's numbers depend on its neighbors and on the padding, so "
            "the same sentence comes out differently in another batch.",
            {"layer_norm": _norm_by(lambda x, eps: _over(x, eps, (-2, -1)))},
        ),
        Misconception(
            "each unit is normalized over the tokens",
            "That is what BatchNorm does over a batch: one mean for each unit, over the vectors. "
            "LayerNorm takes one mean for each vector, over its units: the last axis, `dim=-1`.",
            {"layer_norm": _norm_by(lambda x, eps: _over(x, eps, (-2,)))},
        ),
        Misconception(
            "the gain and the bias are not used",
            "After the division each unit has a gain of its own (`weight`) and a shift of its own "
            "(`bias`). Freshly initialized they are 1 and 0, so leaving them out shows nothing "
            "until a trained checkpoint is loaded.",
            {
                "layer_norm": lambda x, weight, bias, eps=1e-12: F.layer_norm(
                    x, x.shape[-1:], eps=eps
                )
            },
        ),
        Misconception(
            "the bias is added before the gain multiplies",
            "Scale first, then shift: weight · normalized + bias. The other way round the gain "
            "multiplies the bias too, and the layer cannot shift a unit of small gain.",
            {
                "layer_norm": lambda x, weight, bias, eps=1e-12: F.layer_norm(
                    x, x.shape[-1:], weight, weight * bias, eps
                )
            },
        ),
        Misconception(
            "half-precision numbers are squared in half precision",
            "float16 ends at 65,504, and the square of 256 is already more. With numbers like "
            "those that some units of a trained BERT reach, the variance is infinite and the "
            "whole vector becomes 0. So half-precision input is widened to float32 for the mean "
            "and the variance, and only the result is narrowed again; PyTorch does the same.",
            {"layer_norm": _norm_by(_in_half_precision)},
        ),
    ),
    hints=(
        "Everything happens along the last axis, for each vector by itself. `keepdim=True` keeps "
        "that axis, with size 1, so that the mean can be subtracted and the result divided without "
        "reshaping.",
        "Subtract the mean; the variance is the mean of the squares of what is left. Add eps to "
        "the variance, then take the root, then divide. The gain and the bias come last.",
        "Do the arithmetic on `x.to(torch.promote_types(x.dtype, torch.float32))`, which widens "
        "half precision and leaves float32 and float64 alone, and return the result "
        "`.to(x.dtype)`. If you use `var`, pass `correction=0`.",
    ),
)

# --- 2.2 sinusoidal positions --------------------------------------------------------------------


def their_sinusoids(length: int, width: int) -> Tensor:
    """Return the table with which DistilBERT in Transformers can fill its positions.

    DistilBERT computes the angles in float64. Most people compute them in float32, which is off
    by 3e-5 at position 500 and no mistake; so that is what this does too, unless PyTorch's
    default type is float64: then it gives DistilBERT's, the truth.
    """
    if length < 1 or width < 1:
        raise ValueError(f"length {length} and width {width} must be at least 1")
    if torch.get_default_dtype() != torch.float64:
        return _sinusoids(length, width)
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

    table = torch.empty(length, width, dtype=torch.float32)
    create_sinusoidal_embeddings(n_pos=length, dim=width, out=table)
    return table


def _sinusoids(
    length: int,
    width: int,
    exponent: Callable[[Tensor, int], Tensor] = lambda unit, width: (unit - unit % 2) / width,
    cosines: Callable[[Tensor], Tensor] = lambda unit: unit % 2 == 1,
) -> Tensor:
    """Return a table by the formula, in PyTorch's default type, with parts to replace."""
    unit = torch.arange(width)
    position = torch.arange(length)[:, None].to(torch.get_default_dtype())
    angle = position / 10000 ** exponent(unit, width)
    return torch.where(cosines(unit), angle.cos(), angle.sin()).float()


def _checked(table: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    """Refuse sizes below 1, as the reference does."""

    def sinusoidal_positions(length: int, width: int) -> Tensor:
        if length < 1 or width < 1:
            raise ValueError("must be at least 1")
        return table(length, width)

    return sinusoidal_positions


def _sinusoid_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, length: int, width: int) -> Case:
        return Case(name, {"length": length, "width": width, "like": torch.ones(1)})

    yield case("a small table", 12, 8)
    yield case("as many positions as BERT has", 512, 32)
    yield case("a table of any size", int(rng.integers(20, 100)), 2 * int(rng.integers(10, 40)))
    yield case("an odd width", int(rng.integers(5, 30)), 2 * int(rng.integers(2, 12)) + 1)
    yield case("a single position", 1, 6)
    yield case("no positions", 0, 6)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _sinusoid_probe(part: Any, length: int, width: int, like: Tensor) -> Any:
    with _default_type(like.dtype):
        if length < 1:
            return error_of(lambda: part.sinusoidal_positions(length, width))
        table = part.sinusoidal_positions(length, width)
        return {"output": table, "it asks for a gradient": table.requires_grad}


SINUSOIDS = Exercise(
    id="2.2",
    reference={"sinusoidal_positions": their_sinusoids},
    reference_name="create_sinusoidal_embeddings of Transformers' DistilBERT",
    cases=_sinusoid_cases,
    probe=_sinusoid_probe,
    misconceptions=(
        Misconception(
            "the sines and cosines stand in two halves",
            "The 2017 paper interleaves them: unit 0 is a sine, unit 1 the cosine of the same "
            "angle, unit 2 the next sine. Many later models put all sines first and all cosines "
            "after (`cat([sin, cos])`). Since a model may learn to read any order, both train "
            "equally well; but a checkpoint trained with one cannot be used with the other.",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: torch.cat(
                        [
                            _sinusoids(length, width)[:, 0::2],
                            _sinusoids(length, width)[:, 1::2],
                        ],
                        dim=1,
                    )
                )
            },
        ),
        Misconception(
            "sine and cosine have changed places",
            "Even units hold sines, odd units cosines. Position 0 is the quick test: it reads "
            "0, 1, 0, 1, ...",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: _sinusoids(
                        length, width, cosines=lambda unit: unit % 2 == 0
                    )
                )
            },
        ),
        Misconception(
            "every unit has a wavelength of its own",
            "A sine and the cosine beside it share their wavelength: units 2i and 2i + 1 have the "
            "same exponent 2i / width. That is what makes the table useful: the pair is a point "
            "on a circle, and going k positions on turns it by the same angle wherever you start. "
            "With the unit's own number in the exponent the pairs fall apart.",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: _sinusoids(
                        length, width, exponent=lambda unit, width: unit / width
                    )
                )
            },
        ),
        Misconception(
            "the exponent is i / width instead of 2i / width",
            "i counts pairs, from 0 to width / 2. With 2i / width the exponent runs over [0, 1), "
            "so the longest wavelength is near 2π · 10,000. With i / width it stops half way, "
            "near 2π · 100.",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: _sinusoids(
                        length, width, exponent=lambda unit, width: (unit // 2) / width
                    )
                )
            },
        ),
        Misconception(
            "the last pair reaches 10,000 exactly",
            "Google's tensor2tensor, where the Transformer came from, spreads the wavelengths "
            "over i / (width / 2 - 1), so that the last pair has exactly 2π · 10,000. The paper's "
            "formula is 2i / width, and the last pair stays a little below. Both are in use; this "
            "exercise asks for the paper's.",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: _sinusoids(
                        length,
                        width,
                        exponent=lambda unit, width: (unit // 2) / max(width // 2 - 1, 1),
                    )
                )
            },
        ),
        Misconception(
            "a table without rows is accepted",
            "A length or width below 1 is a mistake of the caller's. An empty table would go on "
            "and fail later, somewhere else; the contract asks for a ValueError here.",
            {"sinusoidal_positions": lambda length, width: _sinusoids(length, width)},
        ),
        Misconception(
            "positions count from 1",
            "The first position is 0, so the first row reads 0, 1, 0, 1, ...: sin 0 and cos 0.",
            {
                "sinusoidal_positions": _checked(
                    lambda length, width: _sinusoids(length + 1, width)[1:]
                )
            },
        ),
    ),
    hints=(
        "Make a column of positions, `[length, 1]`, and a row of divisors, `[width]` or one for "
        "each pair. Dividing one by the other broadcasts to `[length, width]`.",
        "The units of a pair share their exponent: `unit - unit % 2` is 0, 0, 2, 2, 4, 4, ... "
        "Then take the sine where the unit is even and the cosine where it is odd; `torch.where` "
        "chooses between two tensors, and works for an odd width too.",
        "angle = position / 10000 ** (pair / width), in float64 if you want it exact (at position "
        "500 an angle in float32 is already off by 3e-5), then torch.where(unit % 2 == 0, sin, "
        "cos) as float32. Refuse a length or width below 1 with a ValueError first.",
    ),
)

# --- 2.3 BERT's embeddings -----------------------------------------------------------------------


_FIELDS = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "pad_token_id",
)


@cache
def _their_config(*values: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(**dict(zip(_FIELDS, values, strict=True)))


class TheirBertEmbeddings(nn.Module):
    """Hugging Face's BertEmbeddings under this course's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.bert.modeling_bert import BertEmbeddings

        theirs = BertEmbeddings(_their_config(*(getattr(config, name) for name in _FIELDS)))
        self.word = theirs.word_embeddings
        self.position = theirs.position_embeddings
        self.token_type = theirs.token_type_embeddings
        self.norm = theirs.LayerNorm
        self.dropout = theirs.dropout

    # Under these names Hugging Face's forward looks for them.
    word_embeddings = property(lambda self: self.word)
    position_embeddings = property(lambda self: self.position)
    token_type_embeddings = property(lambda self: self.token_type)
    LayerNorm = property(lambda self: self.norm)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        from transformers.models.bert.modeling_bert import BertEmbeddings

        theirs: Any = BertEmbeddings.forward
        if position_ids is None:
            position_ids = self.positions(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        return theirs(self, input_ids, token_type_ids, position_ids)

    def positions(self, input_ids: Tensor) -> Tensor:
        length, limit = input_ids.shape[-1], self.position.num_embeddings
        if length > limit:
            raise ValueError(
                f"input_ids has {length} tokens, but this model has positions for {limit}"
            )
        return torch.arange(length, device=input_ids.device)


def _wrong(**methods: Any) -> dict[str, type]:
    """Return Hugging Face's embeddings with some methods replaced."""
    return {"BertEmbeddings": type("BertEmbeddings", (TheirBertEmbeddings,), methods)}


class _Frozen:
    """A table whose rows are looked up without a gradient."""

    def __init__(self, table: nn.Embedding) -> None:
        self.table = table

    def __call__(self, ids: Tensor) -> Tensor:
        return self.table(ids).detach()


def _eps_of_pytorch(self: Any, config: Any) -> None:
    TheirBertEmbeddings.__init__(self, config)
    self.norm.eps = 1e-5


def _no_padding_row(self: Any, config: Any) -> None:
    TheirBertEmbeddings.__init__(self, config)
    self.word.padding_idx = None


def _unchecked_positions(self: Any, input_ids: Tensor) -> Tensor:
    if input_ids.shape[-1] > self.position.num_embeddings:
        raise IndexError("index out of range in self")  # as a lookup on the CPU says it
    return torch.arange(input_ids.shape[-1], device=input_ids.device)


def _roberta_positions(self: Any, input_ids: Tensor) -> Tensor:
    self.positions(input_ids)  # refuses a text that is too long
    places = (input_ids != 0).cumsum(-1) * (input_ids != 0)
    if places.max() >= self.position.num_embeddings:
        raise IndexError("index out of range in self")  # as a lookup on the CPU says it
    return places


def _summed(self: Any, input_ids: Tensor, types: Any, positions: Any) -> Tensor:
    positions = self.positions(input_ids) if positions is None else positions
    types = torch.zeros_like(input_ids) if types is None else types
    return self.word(input_ids) + self.token_type(types) + self.position(positions)


def _embedding_cases(rng: np.random.Generator) -> Iterator[Case]:
    fields = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
    }
    module = TheirBertEmbeddings(bert_config(**fields))
    small = dict.fromkeys(("word.weight", "position.weight", "token_type.weight"), 1e-2)

    def case(name: str, input_ids: Tensor, **more: Any) -> Case:
        inputs = {
            "fields": fields,
            "state": parameters_like(module, rng, more.pop("scales", None)),
            "input_ids": input_ids,
            "cotangent": normal(rng, *input_ids.shape, 24),
        }
        return Case(name, {**inputs, **more})

    mask = padding_mask([10, int(rng.integers(3, 8)), 9], 10)
    ids = integers(rng, 1, 40, 3, 10) * mask
    types = (integers(rng, 0, 10, 3, 10).sort(dim=-1).values > 4).long() * mask
    yield case("pairs of texts, padding in one row", ids, token_type_ids=types)
    yield case("neither token types nor positions given", integers(rng, 1, 40, 2, 12))
    places = torch.from_numpy(np.stack([rng.permutation(16)[:10] for _ in range(3)]))
    yield case("positions given for each row", ids, token_type_ids=types, position_ids=places)
    packed = torch.cat([torch.arange(12), torch.arange(10)])
    yield case(
        "two texts in one row, longer than the table, positions starting anew",
        integers(rng, 1, 40, 2, 22),
        position_ids=packed,
    )
    yield case("tables with small numbers", ids, token_type_ids=types, scales=small)
    yield case("a text with one token too many", integers(rng, 1, 40, 1, 17), wants="error")
    dropped = {**fields, "hidden_dropout_prob": 0.3}
    yield case("training", integers(rng, 1, 40, 9, 14), wants="dropout", fields=dropped)


def _embedding_probe(
    part: Any,
    fields: dict[str, Any],
    state: dict[str, Tensor],
    input_ids: Tensor,
    cotangent: Tensor,
    wants: str = "numbers",
    **ids: Tensor,
) -> dict[str, Any]:
    module = with_parameters(part.BertEmbeddings(bert_config(**fields)), state)
    if wants == "error":
        sizes = input_ids.shape[-1], fields["max_position_embeddings"]
        full = error_of(lambda: module(input_ids[:, :-1]))
        return {
            **error_of(lambda: module(input_ids), *sizes),
            "error at full length": full["error"],
        }
    output = module(input_ids, **ids)
    if wants == "dropout":
        return _dropout_of(output, module.train()(input_ids))
    tables = {name: getattr(module, name).weight for name in ("word", "position", "token_type")}
    return {"output": output, **gradients(output, cotangent, tables)}


def _dropout_of(still: Tensor, training: Tensor) -> dict[str, str]:
    """Say what training does to the output, in numbers that no draw of the mask changes."""
    kept = (training != 0) & (still != 0)
    factor = (training / still)[kept].median() if kept.any() else torch.tensor(torch.nan)
    return {
        "the share of units that dropout zeroes": f"{(training == 0).cpu().double().mean():.1f}",
        "the factor on the other units": f"{factor:.2f}",
    }


def _with_forward(change: Callable[..., Tensor]) -> dict[str, type]:
    """Return embeddings whose forward is given, as a function of self and the three ids."""

    def forward(
        self: Any, input_ids: Tensor, token_type_ids: Any = None, position_ids: Any = None
    ) -> Tensor:
        return change(self, input_ids, token_type_ids, position_ids)

    return _wrong(forward=forward)


_right = TheirBertEmbeddings.forward

EMBEDDINGS = Exercise(
    id="2.3",
    reference={"BertEmbeddings": TheirBertEmbeddings},
    reference_name="transformers.models.bert.modeling_bert.BertEmbeddings",
    cases=_embedding_cases,
    probe=_embedding_probe,
    misconceptions=(
        Misconception(
            "the position vectors are left out",
            "Without them every token's vector is the same wherever it stands. Attention does not "
            "look at order either, so 'dog bites man' and 'man bites dog' become the same set of "
            "vectors, and no later layer can tell them apart.",
            _wrong(position_embeddings=property(lambda self: lambda ids: 0.0)),
        ),
        Misconception(
            "the token types are ignored",
            "In a pair of texts the second one has token type 1, and its tokens get the second row "
            "of the token type table. If every token gets row 0, single texts come out right and "
            "pairs wrong.",
            _with_forward(lambda self, ids, types, places: _right(self, ids, None, places)),
        ),
        Misconception(
            "the token type vectors are left out",
            "BERT adds three vectors, and the third says which text a token belongs to. In a "
            "single text it is the same for all tokens and easy to forget; but the model was "
            "trained with it, and in pairs it is the only sign of where the second text begins "
            "besides [SEP].",
            _wrong(token_type_embeddings=property(lambda self: lambda ids: 0.0)),
        ),
        Misconception(
            "a text without token types gets no token type vector",
            "When `token_type_ids` is None all tokens are of type 0, and type 0 has a vector, "
            "which is added like any other. BERT was trained with it: leaving it out shifts every "
            "token of every single text by the same vector.",
            _with_forward(
                lambda self, ids, types, places: (
                    _right(self, ids, types, places)
                    if types is not None
                    else self.dropout(
                        self.norm(
                            _summed(self, ids, types, places)
                            - self.token_type(torch.zeros_like(ids))
                        )
                    )
                )
            ),
        ),
        Misconception(
            "the position ids that are given are ignored",
            "`position_ids` is what a caller uses who knows better than 0, 1, 2, ...: with padding "
            "on the left, or with several texts packed into one row, positions start anew. Use "
            "them where they are given.",
            _with_forward(lambda self, ids, types, places: _right(self, ids, types)),
        ),
        Misconception(
            "positions begin at pad_token_id + 1",
            "That is how RoBERTa counts: real tokens from pad_token_id + 1 on, padding at "
            "pad_token_id. BERT counts from 0, padding included. The two models look alike and "
            "this is one of the few differences in their code.",
            _with_forward(
                lambda self, ids, types, places: _right(
                    self, ids, types, _roberta_positions(self, ids) if places is None else places
                )
            ),
        ),
        Misconception(
            "the position vectors get no gradient",
            "The position table is learned like the word table. If it is a buffer, is detached, or "
            "is looked up under `no_grad`, the output is right and the loss still falls; but the "
            "model never learns what order means, and stays at what word counts can tell it.",
            _wrong(position_embeddings=property(lambda self: _Frozen(self.position))),
        ),
        Misconception(
            "the row of [PAD] gets a gradient",
            "`nn.Embedding(..., padding_idx=config.pad_token_id)` keeps the gradient of that row "
            "at zero. Without it every padding token of every batch pulls at the row of [PAD], "
            "which is never a word.",
            _wrong(__init__=_no_padding_row),
        ),
        Misconception(
            "the norm has PyTorch's eps",
            "`nn.LayerNorm(hidden)` has eps 1e-5; BERT's config says `layer_norm_eps`, 1e-12. It "
            "shows where the summed vectors are small, and in every bit-for-bit comparison.",
            _wrong(__init__=_eps_of_pytorch),
        ),
        Misconception(
            "the sum is not normalized",
            "The sum goes through a LayerNorm before dropout. It is easy to miss, for in the "
            "paper's figure 2 it does not appear; the code has had it from the first day.",
            _with_forward(
                lambda self, ids, types, places: self.dropout(_summed(self, ids, types, places))
            ),
        ),
        Misconception(
            "the norm comes before the sum",
            "First all three vectors are added, then the sum is normalized. Normalizing the word "
            "vector alone makes the other two vectors too small beside it, and the sum is no "
            "longer of one size.",
            _with_forward(
                lambda self, ids, types, places: self.dropout(
                    _summed(self, ids, types, places) - self.word(ids) + self.norm(self.word(ids))
                )
            ),
        ),
        Misconception(
            "the word vectors are multiplied by the root of the width",
            "The Transformer of 2017 multiplies its word vectors by sqrt(hidden) before adding "
            "sinusoids, whose units are as large as 1. BERT learns all three tables and adds them "
            "as they are; the LayerNorm sees to the size.",
            _with_forward(
                lambda self, ids, types, places: self.dropout(
                    self.norm(
                        _summed(self, ids, types, places)
                        + (self.word.embedding_dim**0.5 - 1) * self.word(ids)
                    )
                )
            ),
        ),
        Misconception(
            "the length is not checked",
            "Then the lookup fails by itself: on the CPU with 'index out of range in self', on a "
            "GPU with a device-side assertion that names neither the text nor the limit and ends "
            "the session. Compare the length with the table first, and raise a ValueError that "
            "says both numbers.",
            _wrong(positions=_unchecked_positions),
        ),
        Misconception(
            "a text that is too long is cut",
            "A model that drops the end of a text without a word gives an answer about a text "
            "that nobody asked about. Raise a ValueError that names both numbers, so that the "
            "caller can cut the text into windows (exercise 2.4).",
            _with_forward(
                lambda self, ids, types, places: (
                    _right(self, ids[:, :16], types, places)
                    if places is None
                    else _right(self, ids, types, places)
                )
            ),
        ),
        Misconception(
            "dropout comes before the norm",
            "BERT drops units of the normalized vector. Dropped before the norm, the zeros are "
            "moved and scaled with the rest, so no unit is zero afterwards, and mean and variance "
            "are those of the damaged vector.",
            _with_forward(
                lambda self, ids, types, places: self.norm(
                    self.dropout(_summed(self, ids, types, places))
                )
            ),
        ),
        Misconception(
            "there is no dropout",
            "In training, `hidden_dropout_prob` of the units are zeroed after the norm and the "
            "rest is scaled up. Without it nothing changes in evaluation, so no comparison with a "
            "checkpoint shows it; a fine-tuned model overfits a little sooner.",
            _with_forward(
                lambda self, ids, types, places: self.norm(_summed(self, ids, types, places))
            ),
        ),
        Misconception(
            "dropout stays on in evaluation",
            "`F.dropout(x, p)` is on by default, whatever the module's mode. Use an `nn.Dropout`, "
            "or pass `training=self.training`. The sign: the same sentence gives another vector "
            "each time.",
            _with_forward(
                lambda self, ids, types, places: F.dropout(
                    self.norm(_summed(self, ids, types, places)), self.dropout.p
                )
            ),
        ),
    ),
    hints=(
        "In `__init__`: three `nn.Embedding`s of width hidden_size, an `nn.LayerNorm`, an "
        "`nn.Dropout`, each with the numbers of `config`. In `forward`: fill in what is None, look "
        "up three vectors for each token, add, normalize, drop.",
        "The word table takes `padding_idx=config.pad_token_id`, the norm "
        "`eps=config.layer_norm_eps`. Default positions are `torch.arange(seq)` on the device of "
        "`input_ids`; default token types are zeros like `input_ids`.",
        "Check the length only when `position_ids` is None: compare `input_ids.shape[-1]` with "
        "`self.position.num_embeddings` and raise a ValueError with both numbers in its message. "
        "Then dropout(norm(word + token_type + position)); a `[seq]` of positions broadcasts over "
        "the batch by itself.",
    ),
)

# --- 2.4 sliding windows -------------------------------------------------------------------------


def their_windows(input_ids: Any, max_length: int, stride: int) -> list[Any]:
    """Return the windows that the Rust tokenizer's truncation makes."""
    if len(input_ids) == 0:
        raise ValueError("input_ids has 0 tokens")
    if not 0 <= stride < max_length:
        raise ValueError(f"stride is {stride}, max_length {max_length}")
    return [input_ids[start:end] for start, end in _spans(len(input_ids), max_length, stride)]


def _spans(length: int, max_length: int, stride: int) -> list[tuple[int, int]]:
    """Return where each window begins and ends, from a text whose words are its positions."""
    from tokenizers import Tokenizer, models

    words = [str(index) for index in range(length)]
    vocab = {word: index for index, word in enumerate(words)}
    encoding = Tokenizer(models.WordLevel(vocab, unk_token="0")).encode(words, is_pretokenized=True)
    encoding.truncate(max_length, stride=stride)
    windows = [encoding.ids, *(window.ids for window in encoding.overflowing)]
    return [(window[0], window[-1] + 1) for window in windows]


def _window_cases(rng: np.random.Generator) -> Iterator[Case]:
    def text(length: int) -> list[int]:
        return [int(id) for id in rng.integers(1000, 30000, length)]

    def case(name: str, ids: Any, max_length: int, stride: int, **more: Any) -> Case:
        inputs = {"input_ids": ids, "max_length": max_length, "stride": stride}
        return Case(name, {**inputs, **more})

    size = int(rng.integers(10, 20))
    stride = int(rng.integers(2, size // 2))
    yield case("a text of 1,000 tokens, windows of 510", text(1000), 510, 128)
    yield case("windows that fit exactly", text(size + 3 * (size - stride)), size, stride)
    for new in (1, size - stride - 1):
        length = size + 2 * (size - stride) + new
        yield case(
            f"a last window with {'one new token' if new == 1 else 'nearly all new'}",
            text(length),
            size,
            stride,
        )
    yield case("an overlap of more than half a window", text(41), 10, int(rng.integers(6, 10)))
    yield case("no overlap", text(int(rng.integers(31, 39))), 10, 0)
    yield case("a text that fits into one window", text(7), 10, 4)
    yield case("a tensor", torch.tensor(text(35)), 12, 4)
    yield case("a stride as long as the window", text(9), 4, 4, refused=True)
    yield case("a text without tokens", [], 4, 1, refused=True)


def _window_probe(
    part: Any, input_ids: Any, max_length: int, stride: int, refused: bool = False
) -> Any:
    if refused:
        return error_of(lambda: part.sliding_windows(input_ids, max_length, stride))
    return part.sliding_windows(input_ids, max_length, stride)


def _from_starts(starts: Callable[[int, int, int], Sequence[int]]) -> dict[str, Any]:
    """Return windows of full length from the starts that a function of the sizes gives."""

    def sliding_windows(input_ids: Any, max_length: int, stride: int) -> list[Any]:
        their_windows(input_ids, max_length, stride)  # refuses what the reference refuses
        return [
            input_ids[start : start + max_length]
            for start in starts(len(input_ids), max_length, stride)
        ]

    return {"sliding_windows": sliding_windows}


def _unchecked_windows(input_ids: Any, max_length: int, stride: int) -> list[Any]:
    step = max(max_length - stride, 1)
    return [
        input_ids[start : start + max_length]
        for start in range(0, max(len(input_ids) - stride, 1), step)
    ]


def _dropped_rest(input_ids: Any, max_length: int, stride: int) -> list[Any]:
    windows = their_windows(input_ids, max_length, stride)
    return [window for window in windows if len(window) == max_length] or windows


WINDOWS = Exercise(
    id="2.4",
    reference={"sliding_windows": their_windows},
    reference_name="the truncation of the Rust tokenizers, with a stride",
    cases=_window_cases,
    probe=_window_probe,
    misconceptions=(
        Misconception(
            "stride is taken for the step from one window to the next",
            "In convolutions, and in run_squad.py of 2018, `stride` is how far the window moves. "
            "In Transformers and in the Rust tokenizers it is how many tokens two neighbors "
            "*share*. The step is then max_length - stride. The two agree only where the stride "
            "is half the window.",
            _from_starts(
                lambda length, size, stride: range(
                    0, max(length - size + max(stride, 1), 1), max(stride, 1)
                )
            ),
        ),
        Misconception(
            "the last window lies inside the one before it",
            "A window that starts within the last `stride` tokens holds nothing that the one "
            "before it does not hold. It costs a forward pass and adds nothing. Stop at the first "
            "window that reaches the end of the text.",
            _from_starts(lambda length, size, stride: range(0, length, size - stride)),
        ),
        Misconception(
            "the last window is moved back so that it is full",
            "That is a fair choice, and some libraries make it; but then the last overlap is "
            "longer than `stride`, and whoever puts the windows back together has to know. The "
            "Rust tokenizers, and the contract here, let the last window be shorter.",
            _from_starts(
                lambda length, size, stride: [
                    min(start, max(length - size, 0))
                    for start in range(0, max(length - stride, 1), size - stride)
                ]
            ),
        ),
        Misconception(
            "the shorter window at the end is dropped",
            "The end of the text would be read by nobody. `range` over full windows only is the "
            "usual cause. The last window may be shorter; it may not be missing.",
            {"sliding_windows": _dropped_rest},
        ),
        Misconception(
            "the windows do not overlap",
            "Cut without an overlap, the tokens beside a cut never see the text on its other side, "
            "in any window. `stride` tokens are read twice so that each token has surroundings "
            "in one window at least.",
            {
                "sliding_windows": lambda ids, size, stride: their_windows(
                    ids, size, 0 * stride if 0 <= stride < size else stride
                )
            },
        ),
        Misconception(
            "neighbors share one token more than stride",
            "Each window starts max_length - stride after the one before. With one less (a window "
            "that ends at index max_length - 1 counted as if it ended there exclusively) the "
            "overlap is stride + 1.",
            _from_starts(
                lambda length, size, stride: range(
                    0, max(length - stride - 1, 1), max(size - stride - 1, 1)
                )
            ),
        ),
        Misconception(
            "a stride or a text that makes no sense is accepted",
            "With stride = max_length the windows would never advance: a loop without an end, or a "
            "window at every token. And a text without tokens has no window. Say so with a "
            "ValueError, before the work begins.",
            {"sliding_windows": _unchecked_windows},
        ),
    ),
    hints=(
        "`stride` is the overlap. How far apart do two windows start, if each is max_length long "
        "and they share stride tokens?",
        "The starts are 0, step, 2 · step, ... with step = max_length - stride. A start is worth "
        "a window only if there is something new in it: if the window before has not reached the "
        "end. A slice that goes past the end is cut by Python itself.",
        "Start k is worth a window if k · step + stride < length, or if k = 0. So the starts are "
        "range(0, max(length - stride, 1), step). Refuse an empty text, and any stride that is not "
        "in [0, max_length), first.",
    ),
)

# --- 2.5 stitch the windows ----------------------------------------------------------------------


def stitched_by_definition(vectors: Sequence[Tensor] | Tensor, length: int, stride: int) -> Tensor:
    """Return each token's vector from the window in which it stands deepest, token by token.

    No library has this function, so this is a direct reading of its definition: slow, and plain.
    """
    spans = _spans_of(vectors, length, stride)
    chosen = []
    for token in range(length):
        best = max(
            range(len(spans)), key=lambda index: _depth(token, spans[index], length)
        )  # the first of equals
        chosen.append(vectors[best][token - spans[best][0]])
    return torch.stack(chosen)


def _depth(token: int, span: tuple[int, int], length: int) -> float:
    """Return a token's distance to the nearest cut of a window; -1 outside the window."""
    start, end = span
    if not start <= token < end:
        return -1
    left = token - start if start > 0 else float("inf")
    right = end - 1 - token if end < length else float("inf")
    return min(left, right)


def _spans_of(
    vectors: Sequence[Tensor] | Tensor, length: int, stride: int
) -> list[tuple[int, int]]:
    """Return where the windows lie in the text.

    Raises:
        ValueError: they are not the windows of a text of this length.
    """
    given = [len(window) for window in vectors]
    if not given or length < 1:
        raise ValueError("there is no window, or no token")
    overlap = stride if given[0] < length else 0
    if not 0 <= overlap < given[0]:
        raise ValueError(f"stride is {stride}")
    spans = _spans(length, given[0], overlap)
    sizes = [end - start for start, end in spans]
    if given not in (sizes, [*sizes[:-1], given[0]]):
        raise ValueError(f"windows of {given} tokens; the text makes windows of {sizes}")
    return spans


def _stitch_cases(rng: np.random.Generator) -> Iterator[Case]:
    width = 6

    def case(
        name: str, length: int, size: int, stride: int, padded: bool = False, **more: Any
    ) -> Case:
        spans = _spans(length, size, stride if size < length else 0)
        sizes = [size if padded else end - start for start, end in spans]
        vectors: Any = [normal(rng, count, width) for count in sizes]
        if padded:
            vectors = torch.stack(vectors)
        return Case(name, {"vectors": vectors, "length": length, "stride": stride, **more})

    yield case("an even overlap", 29, 12, 4)
    yield case("an odd overlap", 33, 12, 5)
    yield case("an overlap of more than half a window", int(rng.integers(40, 50)), 10, 7)
    yield case("no overlap", 23, 10, 0)
    yield case("all windows in one tensor, the last padded", 30, 12, 4, padded=True)
    yield case("a text that fits into one window", 7, 7, 3)
    yield case(
        "any sizes",
        int(rng.integers(30, 60)),
        2 * int(rng.integers(6, 10)),
        int(rng.integers(1, 6)),
    )
    yield case("windows of another text", 29, 12, 4, length_said=60)


def _stitch_probe(
    part: Any, vectors: Any, length: int, stride: int, length_said: int | None = None
) -> dict[str, Any]:
    if length_said is not None:
        return error_of(lambda: part.stitch_windows(vectors, length_said, stride))
    if isinstance(vectors, Tensor):
        leaves = {"vectors": vectors.detach().clone().requires_grad_()}
        output = part.stitch_windows(leaves["vectors"], length, stride)
    else:
        copies = [window.detach().clone().requires_grad_() for window in vectors]
        leaves = {f"window {index}": window for index, window in enumerate(copies)}
        output = part.stitch_windows(copies, length, stride)
    return {"output": output, **gradients(output, torch.ones_like(output), leaves)}


def _laid(keep_earlier: bool) -> dict[str, Any]:
    """Return a stitching that lays the windows down in order, one over the other."""

    def stitch_windows(vectors: Any, length: int, stride: int) -> Tensor:
        rows: dict[int, Tensor] = {}
        for window, (start, end) in zip(vectors, _spans_of(vectors, length, stride), strict=True):
            for token in range(start, end):
                if not (keep_earlier and token in rows):
                    rows[token] = window[token - start]
        return torch.stack([rows[token] for token in range(length)])

    return {"stitch_windows": stitch_windows}


def _later_middle(vectors: Any, length: int, stride: int) -> Tensor:
    spans = _spans_of(vectors, length, stride)
    order = range(len(spans))[::-1]  # the last of equals
    best = [
        max(order, key=lambda index: _depth(token, spans[index], length)) for token in range(length)
    ]
    return torch.stack([vectors[w][token - spans[w][0]] for token, w in enumerate(best)])


def _mean_of_windows(vectors: Any, length: int, stride: int) -> Tensor:
    spans = _spans_of(vectors, length, stride)
    return torch.stack(
        [
            torch.stack(
                [
                    window[token - start]
                    for window, (start, end) in zip(vectors, spans, strict=True)
                    if start <= token < end
                ]
            ).mean(0)
            for token in range(length)
        ]
    )


def _end_to_end(vectors: Any, length: int, stride: int) -> Tensor:
    spans = _spans_of(vectors, length, stride)
    sizes = [end - start for start, end in spans]
    return torch.cat([window[:size] for window, size in zip(vectors, sizes, strict=True)])


def _padding_kept(vectors: Any, length: int, stride: int) -> Tensor:
    start, end = _spans_of(vectors, length, stride)[-1]
    padding = vectors[-1][end - start :]
    return torch.cat([stitched_by_definition(vectors, length, stride), padding])


def _unchecked_stitch(vectors: Any, length: int, stride: int) -> Tensor:
    try:
        return stitched_by_definition(vectors, length, stride)
    except ValueError:
        return torch.cat(list(vectors))


STITCH = Exercise(
    id="2.5",
    reference={"stitch_windows": stitched_by_definition},
    reference_name="the definition of depth, applied token by token (no library has this function)",
    cases=_stitch_cases,
    probe=_stitch_probe,
    misconceptions=(
        Misconception(
            "the earlier window always wins",
            "The last tokens of a window see nothing of what follows: they stand right at the cut. "
            "The next window holds the same tokens with text on both sides. Half of the overlap is "
            "deeper in each, so the seam belongs in its middle.",
            _laid(keep_earlier=True),
        ),
        Misconception(
            "the later window always wins",
            "Writing window after window into one tensor gives each overlap to the later window. "
            "But the first tokens of that window see nothing of what came before; the earlier "
            "window knew them better. The seam belongs in the middle of the overlap.",
            _laid(keep_earlier=False),
        ),
        Misconception(
            "the windows' vectors are averaged",
            "An average mixes a vector that saw the token's surroundings with one that did not. "
            "It is a reasonable idea, used for scores in some libraries; but the mean of two "
            "vectors need not be a vector the model would ever give, and the contract asks for "
            "one window's.",
            {"stitch_windows": _mean_of_windows},
        ),
        Misconception(
            "the token in the middle of an odd overlap goes to the later window",
            "It stands equally deep in both. So that everybody gets the same result, the rule says "
            "the earlier window; `//` on the wrong side of the cut gives it to the later one.",
            {"stitch_windows": _later_middle},
        ),
        Misconception(
            "the windows are laid end to end",
            "Neighbors share `stride` tokens, so laid end to end each overlap is there twice and "
            "the result is longer than the text.",
            {"stitch_windows": _end_to_end},
        ),
        Misconception(
            "the padding of the last window is kept",
            "When all windows come as one tensor the last one is padded to full length. The text "
            "ends at `length`; what lies behind it is no token.",
            {"stitch_windows": _padding_kept},
        ),
        Misconception(
            "windows that are not of this text are stitched all the same",
            "If number or sizes of the windows are not those that `length` tokens make with this "
            "stride, one of the three is wrong, and the vectors would end up at the wrong tokens "
            "without anyone noticing. Compare with what `sliding_windows` makes, and raise a "
            "ValueError.",
            {"stitch_windows": _unchecked_stitch},
        ),
    ),
    hints=(
        "Draw two windows with an overlap of 4 tokens. How deep does each of the four stand in the "
        "first window, and how deep in the second? Where do the two change places?",
        "The first half of an overlap is deeper in the earlier window, the second half in the "
        "later. So of each window you keep one slice: without the first half of the overlap on "
        "its left (unless it is the first window) and without the second half of the one on its "
        "right (unless it is the last). Then concatenate.",
        "Left cut: (stride + 1) // 2 tokens, right cut: stride // 2 tokens; that gives an odd "
        "middle token to the earlier window. Sizes come from sliding_windows(list(range(length)), "
        "len(vectors[0]), stride), which also tells you how much of a padded last window is text. "
        "A text that fits into the first window has no overlap.",
    ),
)

# --- 2.6 clinic: a model that cannot read order --------------------------------------------------


def their_positions(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return RoBERTa's position ids, which count real tokens, moved down to BERT's 0."""
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    counted = RobertaEmbeddings.create_position_ids_from_input_ids(attention_mask, padding_idx=0)
    return (counted - 1).clamp(min=0)


def _position_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, lengths: Sequence[int], seq: int, left: bool, pad: int = 0) -> Case:
        mask = padding_mask(lengths, seq)
        mask = mask.flip(-1) if left else mask
        ids = integers(rng, 5, 90, len(lengths), seq)
        return Case(name, {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask})

    some = [int(length) for length in rng.integers(2, 10, 3)]
    yield case("padding on the left", [10, *some], 11, left=True)
    yield case("padding on the right", [10, *some], 11, left=False)
    yield case("no padding", [8, 8], 8, left=True)
    yield case("a vocabulary whose [PAD] is 1", [9, *some], 10, left=True, pad=1)
    yield case("a row of nothing but padding", [6, 0], 7, left=True)


def _position_probe(part: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return part.mend_positions(input_ids, attention_mask)


POSITIONS = Exercise(
    id="2.6",
    reference={"mend_positions": their_positions},
    reference_name="create_position_ids_from_input_ids of Transformers' RoBERTa, from 0",
    cases=_position_cases,
    probe=_position_probe,
    misconceptions=(
        Misconception(
            "positions still count from the left edge",
            "These are the positions the patient already uses: 0, 1, 2, ... over the whole row. "
            "With padding on the left the first real token then stands wherever the padding ends.",
            {
                "mend_positions": lambda input_ids, attention_mask: torch.arange(
                    input_ids.shape[-1], device=input_ids.device
                ).repeat(len(input_ids), 1)
            },
        ),
        Misconception(
            "the first real token is at position 1",
            "A running sum of the mask gives 1 at the first real token. BERT's first position is "
            "0, so subtract 1. (RoBERTa does begin later, at pad_token_id + 1.)",
            {
                "mend_positions": lambda input_ids, attention_mask: (
                    attention_mask.cumsum(-1) * attention_mask
                )
            },
        ),
        Misconception(
            "padding is not set to 0",
            "The running sum is 0 at padding on the left, and minus 1 that is -1: the lookup "
            "fails, or takes a row that is not there. On the right the sum simply stays at its "
            "last value. Multiply by the mask.",
            {"mend_positions": lambda input_ids, attention_mask: attention_mask.cumsum(-1) - 1},
        ),
        Misconception(
            "padding on the right goes on with the last position",
            "`clamp(min=0)` mends the -1 at padding on the left, but on the right the running sum "
            "stays at its last value. The contract asks for 0 at padding on either side: "
            "multiply by the mask.",
            {
                "mend_positions": lambda input_ids, attention_mask: (
                    attention_mask.cumsum(-1) - 1
                ).clamp(min=0)
            },
        ),
        Misconception(
            "padding is always taken to be on the left",
            "Shifting every row by its amount of padding mends batches padded on the left and "
            "breaks those padded on the right, which were well. A running sum of the mask needs "
            "no assumption.",
            {
                "mend_positions": lambda input_ids, attention_mask: (
                    (
                        torch.arange(input_ids.shape[-1], device=input_ids.device)
                        - (1 - attention_mask).sum(-1, keepdim=True)
                    ).clamp(min=0)
                    * attention_mask
                )
            },
        ),
        Misconception(
            "padding is recognized by the id 0",
            "[PAD] is 0 in BERT's vocabulary, 1 in RoBERTa's, and whatever a tokenizer was trained "
            "with elsewhere. The attention mask says which tokens are real; go by that.",
            {
                "mend_positions": lambda input_ids, attention_mask: their_positions(
                    input_ids, (input_ids != 0).long()
                )
            },
        ),
    ),
    hints=(
        "Which tensor tells you which tokens are real? What do you get when you count, from left "
        "to right, how many real tokens there have been so far?",
        "`cumsum` along the last axis counts them: the first real token gets 1, and the count "
        "stands still at padding. BERT wants 0 for the first, and 0 at padding.",
        "Take the running sum of the mask, minus 1, times the mask.",
    ),
)

EXERCISES = [NORM, SINUSOIDS, EMBEDDINGS, WINDOWS, STITCH, POSITIONS]
