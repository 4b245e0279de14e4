"""The clinic: broken models to diagnose. Each chapter's last exercise mends one.

A patient is described in its chapter, with its symptom. You write the cure: a short function
that takes what is broken and returns it mended.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # chapter 1 does not need PyTorch
    from collections.abc import Iterable, Mapping

    from torch import Tensor


# --- exercise 1.6: clinic: a model that has forgotten names ---
def mend_tokenizer(vocab: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with which a tokenizer fits its vocabulary.

    The patient: a model whose tokenizer turns most names into ``[UNK]``, because its
    ``tokenizer_config.json`` came from another model. The vocabulary is right; the settings are
    not. Decide from the vocabulary's own pieces whether the text was lowercased, and whether
    accents were stripped, when the vocabulary was made. Import what you need inside the function.

    Args:
        vocab: the pieces, in order; special tokens stand in brackets, as in ``[CLS]``.
        settings: what the configuration says: ``do_lower_case`` and ``strip_accents`` (which
            may be None: as ``do_lower_case``), and others that are none of your business.

    Returns:
        A new dict: ``do_lower_case`` True exactly when lower-casing would change no piece (special
        tokens aside), ``strip_accents`` True exactly when no piece holds a letter with an accent
        (a character that NFD takes apart into a letter and combining marks); all other settings
        as they were.

    Source: Devlin et al. 2019, the released models come cased and uncased.
    """
    raise NotImplementedError("exercise 1.6")
# --- end of exercise 1.6 ---


# --- exercise 2.6: clinic: a model that cannot read order ---
def mend_positions(input_ids: "Tensor", attention_mask: "Tensor") -> "Tensor":
    """Return the position ids that a batch padded on the left needs.

    The patient: a BERT that reads "dog bites man" well alone and badly in a batch. The batches
    come from a library that puts padding on the left, and the model numbers positions from the
    left edge, so the first real token of a short text stands at position 7 instead of 0. Import
    what you need inside the function.

    Args:
        input_ids: ``[batch, seq]``.
        attention_mask: ``[batch, seq]``, 1 for a real token and 0 for padding, on either side.

    Returns:
        ``[batch, seq]`` of int64 on the device of `input_ids`: 0 at each text's first real token,
        then 1, 2, ...; 0 at padding.
    """
    raise NotImplementedError("exercise 2.6")
# --- end of exercise 2.6 ---


# --- exercise 3.6: clinic: attention that looks everywhere ---
def mend_mask(padding: "Tensor") -> "Tensor":
    """Return BERT's attention mask for a mask that follows PyTorch's convention.

    The patient: in a text without padding, every token attends to all others exactly equally; in
    a text with padding, to the padding alone. The batches come with ``key_padding_mask`` as
    PyTorch's ``nn.MultiheadAttention`` takes it, and it was handed on as BERT's
    ``attention_mask`` without a change. Import what you need inside the function.

    Args:
        padding: ``[batch, seq]``; boolean, where True is **padding**; or floating-point, to be
            added to the scores, where 0 is a real token and minus infinity is padding. PyTorch
            takes both.

    Returns:
        ``[batch, seq]`` of int64: 1 for a real token, 0 for padding.

    Source: the documentation of ``torch.nn.MultiheadAttention``, argument ``key_padding_mask``.
    """
    raise NotImplementedError("exercise 3.6")
# --- end of exercise 3.6 ---


# --- exercise 4.6: clinic: an encoder whose vectors never stop growing ---
def mend_residual(
    layer: Any, hidden_states: "Tensor", attention_mask: "Tensor | None" = None
) -> "Tensor":
    """Return what a BERT layer should have returned, computed with the parts of a broken one.

    The patient: an encoder whose parts are all right, weights included, and whose vectors are
    larger after every layer, so that the scores of the last layers are useless. Its forward pass
    normalizes what each half returns, and then adds the residual::

        x = x + norm(dropout(attention(x)))
        x = x + norm(feed_forward(x))

    Args:
        layer: has `attention`, `attention_norm`, `feed_forward` (with a dropout of its own),
            `feed_forward_norm` and `dropout`, as exercise 4.4's layer has.
        hidden_states: ``[batch, seq, hidden]``.
        attention_mask: ``[batch, seq]``, 1 for a real token and 0 for padding.

    Returns:
        ``[batch, seq, hidden]``: the output of a Post-LN layer with these parts.

    Source: Vaswani et al. 2017, section 3.1: "LayerNorm(x + Sublayer(x))".
    """
    raise NotImplementedError("exercise 4.6")
# --- end of exercise 4.6 ---


# --- exercise 5.7: clinic: a head that does not follow its embeddings ---
def mend_tie(model: Any) -> None:
    """Mend, in place, a model whose MLM head lost its tie to the word embeddings.

    The patient: somebody added words to the vocabulary by giving `bert.embeddings` a new, larger
    `word` table. Since then the head scores only the old words, further training moves the table
    and leaves the scores where they were, and a saved copy predicts something else.

    Args:
        model: has `config`, `bert` and `mlm_head` as exercise 5.2's model has. The table
            `bert.embeddings.word` is right, and so are the first rows of the head's bias.

    Afterwards the head's decoder has the table's own parameter as its weight, a bias with one
    number for each row of the table (the old ones kept, 0 for the new), and both `config` and
    `bert.config` the table's `vocab_size`.

    Source: Press and Wolf 2017; the clinic's case is a common mistake with
    `resize_token_embeddings` done by hand.
    """
    raise NotImplementedError("exercise 5.7")
# --- end of exercise 5.7 ---


# --- exercise 6.7: clinic: frequent words only, and memory without end ---
def mend_labels(batch: "Mapping[str, Tensor]", chosen: "Tensor") -> "dict[str, Tensor]":
    """Return a batch from which a masked language model learns to guess.

    The patient: an MLM whose loss fell to almost nothing within minutes. Asked for a hidden word,
    it says "the" or a comma, whatever the sentence. Its batches have in `labels` what stood there,
    at every place of every text, padding included. Import what you need inside the function.

    Args:
        batch: what the model is called with: ``input_ids``, ``attention_mask`` and ``labels``, each
            ``[batch, seq]``, and perhaps others. Not changed.
        chosen: boolean ``[batch, seq]``, True where exercise 6.1's function chose a token: what
            became ``[MASK]``, what became another piece, and what was left as it is.

    Returns:
        A new dict with labels as exercise 6.1 makes them, and all else as it was.
    """
    raise NotImplementedError("exercise 6.7")


def mend_evaluation(model: Any, batches: "Iterable[Mapping[str, Tensor]]") -> float:
    """Return the mean loss of batches, however many there are.

    The patient: an evaluation that is killed for lack of memory, sooner the more batches it is
    given::

        total, count = 0, 0
        for batch in batches:
            total = total + model(**batch).loss
            count = count + 1
        return total / count

    Import what you need inside the function.

    Args:
        model: called as ``model(**batch)``, it returns an object with ``loss``; its mode and its
            gradients are left as they are.
        batches: one or more, perhaps made one by one as they are asked for.

    Returns:
        The same mean as a float, with no more memory than two batches need.
    """
    raise NotImplementedError("exercise 6.7")
# --- end of exercise 6.7 ---


# --- exercise 7.8: clinic: three trainings that went wrong ---
def mend_frozen(model: Any, optimizer: Any) -> None:
    """Let a model be trained as a whole, in place.

    The first patient: a classifier of sentences such as "dog bites man". Its training loss falls,
    because the head learns how frequent each class is, but its accuracy stays that of guessing.
    Somebody froze the positions (`requires_grad` is False), so that it cannot learn to read order;
    and the optimizer was built from the parameters that were left, so that thawing them is only
    half of the cure.

    Args:
        model: any module, some of whose parameters are frozen.
        optimizer: a ``torch.optim.Optimizer`` that has some of its parameters.

    Afterwards every parameter of `model` has a gradient and is in `optimizer` once. Those that it
    had stay in their groups, with what it remembers of them. The new ones are in one group more,
    with the settings of the first.
    """
    raise NotImplementedError("exercise 7.8")


def mend_schedule(settings: dict[str, Any], num_examples: int) -> dict[str, Any]:
    """Return the settings of a run that converges in the time that it has.

    The second patient: after three epochs its loss has hardly moved. Its settings are those of a
    pretraining: a warm-up of ten thousand steps, of which the run never reaches the end, so that
    the learning rate stays near 0; or no warm-up and a learning rate so high that the first steps
    undo the pretraining. Import what you need inside the function.

    Args:
        settings: ``epochs``, ``batch_size``, ``accumulation_steps`` (batches whose gradients are
            added up for one step), ``learning_rate``, ``warmup_steps``, ``total_steps``, and others
            that are none of your business.
        num_examples: how many texts the run trains on in an epoch.

    Returns:
        A new dict. ``total_steps`` is how many steps of the optimizer the run really has; in each
        epoch the last batch, and the last step, may be a smaller one. ``warmup_steps`` is a tenth
        of them, rounded up. ``learning_rate`` is as it was if it is from 2e-5 to 5e-5, and
        otherwise the nearer of these two. All other settings are as they were.

    Source: Devlin et al. 2019, appendix A.3.
    """
    raise NotImplementedError("exercise 7.8")


def mend_vocabulary(model: Any, tokenizers: dict[str, Any], texts: list[str]) -> str:
    """Return which of several tokenizers is the model's.

    The third patient: a checkpoint that was copied without its tokenizer, and got another of the
    same size. Nothing fails; every id has a row, only the wrong one, and whatever is trained on
    top learns half of what it could. No file says which tokenizer is right, but the model knows:
    with its own, it guesses hidden pieces best. Import what you need inside the function.

    Args:
        model: a masked language model in eval mode: `model(input_ids, labels=labels)`, both
            ``[1, seq]``, has the mean `loss` over the labelled places (-100: no label). Its
            `config` has a `vocab_size`, the number of its rows.
        tokenizers: by name; each has `encode(text)`, `mask_token_id` and `vocab_size`.
        texts: of the language that the model was trained on.

    Returns:
        The name of the tokenizer with which the model's mean loss at hidden pieces is lowest:
        hide every piece but ``[CLS]`` and ``[SEP]``, one at a time. A tokenizer with more pieces
        than the model has rows is not the model's.
    """
    raise NotImplementedError("exercise 7.8")
# --- end of exercise 7.8 ---


# --- exercise 8.8: clinic: a checkpoint and a vocabulary that drifted apart ---
def mend_checkpoint(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Return the tensors of a checkpoint that loads again.

    The first patient: a masked language model to which words were added. The tie of its head to
    its table was lost when the table was resized, and what was saved holds two different tensors
    where there should be one: the table, trained since and right, and the head's decoder, which
    stayed behind with the old number of rows. `load_hf_state_dict` refuses it. You have no model
    here, only the file. Import what you need inside the function.

    Args:
        tensors: by Hugging Face's names. The table is ``bert.embeddings.word_embeddings.weight``,
            ``[vocab_size, hidden]``; the head has ``cls.predictions.decoder.weight`` and its bias
            under one or both of the names ``cls.predictions.bias`` and
            ``cls.predictions.decoder.bias``. Not changed.

    Returns:
        A new dict with the same names. The decoder's weight is the table; each bias has one number
        for each row of it: the old ones, and 0 for new rows; and all else is as it was.
    """
    raise NotImplementedError("exercise 8.8")


def mend_special_tokens(vocab: list[str], unknown: int, table: "Tensor") -> list[str]:
    """Return the vocabulary with which a deployed tokenizer means what its model means.

    The second patient: a service whose answers to texts with rare characters are odd, while every
    test passes. Somebody wrote its vocabulary anew and put ``[PAD]`` and ``[UNK]`` in each other's
    row. A model hides padding whatever its id, so nothing fails; but an unknown word now looks up
    the row of ``[PAD]``, which never learned anything. That row can be told by its numbers: it
    never had a gradient, so it is all 0, as on the first day.

    Args:
        vocab: the pieces, in the order of their ids; holds ``[PAD]`` and ``[UNK]`` once each.
        unknown: the id under which the model learned ``[UNK]``.
        table: the model's word embeddings, ``[vocab_size, hidden]``.

    Returns:
        A new list: if the row of `table` at which `vocab` has ``[UNK]`` is all 0 and it is not
        `unknown`, the two pieces in each other's place; otherwise the same pieces.
    """
    raise NotImplementedError("exercise 8.8")
# --- end of exercise 8.8 ---
