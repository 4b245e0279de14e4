"""Chapter 5: laws of the heads, and checkpoints that go to Transformers and back."""

import json

import pytest
import torch
import torch.nn.functional as F

from bertlab.course.exercises import chapter_5 as right
from bertlab.course.exercises.support import integers, normal, padding_mask
from bertlab.course.grading.hidden import Config, Part

FIELDS = {**right.SIZES, "num_hidden_layers": 2}
WIDTH, PIECES = FIELDS["hidden_size"], FIELDS["vocab_size"]


def weights(rng, **fields):
    """Draw a model's parameters by this course's names, a tied one once."""
    state = right.in_our_names(right.drawn(rng, FIELDS | fields), FIELDS | fields)
    return {name: value for name, value in state.items() if name != "mlm_head.decoder.weight"}


def their_state(state):
    """The same by Hugging Face's names, as one may find them in a file."""
    tied = {"mlm_head.decoder.weight": state["bert.embeddings.word.weight"]}
    names = right.paired_names(FIELDS["num_hidden_layers"])
    return {theirs: (state | tied)[ours] for theirs, ours in names.items()}


def model_of(of, state, name="heads.BertForPreTraining", train=False, **fields):
    """Make a model in the sandbox, and give it its parameters."""
    if name == "encoder.BertModel":
        state = {n.removeprefix("bert."): x for n, x in state.items() if n.startswith("bert.")}
    if name == "heads.BertForMaskedLM":
        state = {n: x for n, x in state.items() if "pooler" not in n and "nsp" not in n}
    return of.make(name, Config(FIELDS | fields)).load(state, train)


def is_tied(model):
    """Whether a model's head has the table itself."""
    return model.part("mlm_head.decoder.weight").is_same(model.part("bert.embeddings.word.weight"))


def batch(rng, lengths, seq):
    """Draw ids and their mask."""
    mask = padding_mask(lengths, seq)
    return integers(rng, 1, PIECES, len(lengths), seq) * mask, mask


# --- 5.1 the MLM head ---


def head_state(rng):
    """Draw the head's parameters; the table is its decoder's weight."""
    state = {n: x for n, x in weights(rng).items() if n.startswith("mlm_head.")}
    own = {n.removeprefix("mlm_head."): x for n, x in state.items()}
    return own, normal(rng, PIECES, WIDTH)


def head_of(of, state, table, train=False, **fields):
    """Make a table and a head on it."""
    words = of.make("torch.nn.Embedding", PIECES, WIDTH)
    head = of.make("heads.MLMHead", Config(FIELDS | fields), words)
    return words, head.load(state | {"decoder.weight": table}, train)


@pytest.mark.exercise("5.1")
@pytest.mark.hint("Scores at some positions are the scores everywhere, cut out, text by text.")
def test_positions_are_cut_out(submission, rng):
    """Scores at some positions, at all and at none are cut out of those everywhere"""
    some = torch.from_numpy(rng.random((4, 9)) < 0.3)
    masks = some, torch.ones(4, 9).bool(), torch.zeros(4, 9).bool()

    def chosen(of, state, table, x):
        head = head_of(of, state, table)[1]
        return [head(x, mask) for mask in masks]

    def cut(state, table, x):
        everywhere = head_of(submission.truths.reference, state, table)[1](x)
        return [everywhere[mask] for mask in masks]

    submission.agrees(chosen, *head_state(rng), normal(rng, 4, 9, WIDTH), truth=cut)


@pytest.mark.exercise("5.1")
@pytest.mark.hint("The decoder's weight is the table itself: who changes one changes the other.")
def test_the_table_is_the_decoder(submission, rng):
    """A change of the table changes the scores, and both learn as one"""

    def moved(of, state, table, x, new):
        words, head = head_of(of, state, table)
        words.load({"weight": new})
        slopes = head.gradients(x)
        one = words.part("weight").is_same(head.part("decoder.weight"))
        return head(x), one, len(head.parameters()), slopes["decoder.weight"]

    tables = normal(rng, 2, 3, WIDTH), normal(rng, PIECES, WIDTH)
    submission.agrees(moved, *head_state(rng), *tables)


@pytest.mark.exercise("5.1")
@pytest.mark.hint("The bias is added last: one number for each piece, wherever it stands.")
def test_the_bias_is_added_last(submission, rng):
    """What the bias adds is the bias, for every activation, and in bfloat16"""
    state, table = head_state(rng)
    x = normal(rng, 2, 5, WIDTH)
    for act, dtype in (("gelu", "bfloat16"), ("gelu_tanh", "float32"), ("relu", "float32")):
        submission.agrees(
            lambda of, state, table, x, act: [
                head_of(of, state | more, table, hidden_act=act)[1](x)
                for more in ({}, {"decoder.bias": 0 * state["decoder.bias"]})
            ],
            *(state, table, x, act),
            dtype=dtype,
        )


# --- 5.2 the pretraining model ---


def labelled(rng, mask):
    """Draw labels for some of the real tokens, one in each text at least."""
    chosen = (torch.from_numpy(rng.random(tuple(mask.shape))) < 0.4) & (mask == 1)
    chosen[:, 1] = True
    return torch.where(chosen, integers(rng, 0, PIECES, *mask.shape), -100)


@pytest.mark.exercise("5.2")
@pytest.mark.hint(
    "The loss is the mean over the labelled places of all texts, plus that over pairs."
)
def test_the_loss_by_hand(submission, rng):
    """The loss is what the scores and the labels make it: words, pairs, and both"""
    ids, mask = batch(rng, [9, 4, 12], 12)
    labels, pairs = labelled(rng, mask), torch.tensor([1, 0, 1])

    def losses(of, state):
        model = model_of(of, state)
        given = {"labels": labels}, {"next_sentence_label": pairs}
        return [model(ids, mask, **more)["loss"] for more in (*given, given[0] | given[1])]

    def by_hand(state):
        found = model_of(submission.truths.reference, state)(ids, mask)
        words = F.cross_entropy(found["prediction_logits"].flatten(0, 1), labels.flatten())
        both = F.cross_entropy(found["seq_relationship_logits"], pairs)
        return words, both, words + both

    submission.agrees(losses, weights(rng), truth=by_hand)


@pytest.mark.exercise("5.2")
@pytest.mark.hint(
    "Padding has no label, so more of it changes no loss, and the texts' order neither."
)
def test_padding_and_order_change_no_loss(submission, rng):
    """More padding and another order of the texts change no loss"""
    ids, mask = batch(rng, [9, 4, 6], 9)
    labels, pairs = labelled(rng, mask), torch.tensor([0, 1, 1])
    order, wide = torch.from_numpy(rng.permutation(3)), (0, 3)

    def twice(of, state):
        model = model_of(of, state)
        padded = F.pad(ids, wide, value=7), F.pad(mask, wide), F.pad(labels, wide, value=-100)
        rows = [[x[order] for x in given] for given in (padded, (ids, mask, labels))]
        return [model(i, m, None, y, pairs[order])["loss"] for i, m, y in rows]

    submission.agrees(twice, weights(rng))


@pytest.mark.exercise("5.2")
@pytest.mark.hint("Labels add a loss and change nothing else of what is returned.")
def test_labels_change_no_scores(submission, rng):
    """Labels change no scores; hidden states and attentions come when they are asked for"""
    ids, mask = batch(rng, [7, 5], 7)
    labels = labelled(rng, mask)

    def found(of, state):
        model = model_of(of, state)
        plain = model(ids, mask)
        full = model(ids, mask, None, labels, output_hidden_states=True, output_attentions=True)
        scores = [x["prediction_logits"][mask == 1] for x in (plain, full)]
        states = [x[mask == 1] for x in full["hidden_states"]]
        shares = [x.sum(-1) for x in full["attentions"]]
        nothing = [plain[name] is None for name in ("loss", "hidden_states", "attentions")]
        return scores, states, shares, nothing, full["seq_relationship_logits"]

    submission.agrees(found, weights(rng))


@pytest.mark.exercise("5.2")
@pytest.mark.hint("Words without a label, and pairs without one, teach nothing.")
def test_what_has_no_label_teaches_nothing(submission, rng):
    """One label teaches the parts that it takes, and leaves the others alone"""
    ids, mask = batch(rng, [6, 6], 6)
    labels = torch.full((2, 6), -100)
    labels[1, 2] = int(rng.integers(PIECES))

    def slopes(of, state):
        model, pairs = model_of(of, state), torch.tensor([1, 0])
        words = model.gradients(ids, mask, of="loss", labels=labels)
        texts = model.gradients(ids, mask, of="loss", next_sentence_label=pairs)
        for found in (words, texts):
            for name in [name for name in found if name.endswith("key.bias")]:
                del found[name]  # 0 but for rounding
        return words, texts

    submission.agrees(slopes, weights(rng))


# --- 5.3 the names of a checkpoint ---


def fitted(of, state, given, name="heads.BertForPreTraining", **more):
    """Load a state dict into a model, and return model and report."""
    model = model_of(of, state, name)
    return model, of.call("weights.load_hf_state_dict", model, given, **more)


@pytest.mark.exercise("5.3")
@pytest.mark.hint("Every name leads to a parameter of its own; only what is tied has two.")
def test_every_name_once(submission, rng):
    """Every tensor of Transformers has its place, and every parameter a name"""
    config, transformers = (
        Config(FIELDS, num_hidden_layers=int(rng.integers(3, 12))),
        pytest.importorskip("transformers"),
    )
    with torch.device("meta"):
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**config))

    def places(of):
        names = of.call("weights.hf_name_map", config)
        shapes = {
            n: list(x.shape)
            for n, x in of.make("heads.BertForPreTraining", config).parameters().items()
        }
        tied = {"mlm_head.decoder.weight": shapes["bert.embeddings.word.weight"]}
        return (
            sorted(names),
            {n: (shapes | tied)[names[n]] for n in names},
            sorted(set(shapes) - set(names.values())),
        )

    shapes = {name: list(tensor.shape) for name, tensor in theirs.state_dict().items()}

    def placed(of):
        names, found, left = places(of)
        return names, found, [name for name in left if name != "bert.embeddings.word.weight"]

    submission.agrees(placed, truth=lambda: (sorted(shapes), shapes, []))


@pytest.mark.exercise("5.3")
@pytest.mark.hint("A model filled with a checkpoint gives the numbers of Transformers' model.")
def test_filled_it_gives_their_numbers(submission, rng):
    """Filled by today's names or those of 2018, with the prefix or without, it gives the same"""
    ids, mask = batch(rng, [8, 5], 8)
    fresh, numbers = weights(rng), weights(rng)

    def outputs(of, fresh, numbers):
        given = right.of_2018(their_state(numbers))
        model, _ = fitted(of, fresh, given)
        short = {
            n.removeprefix("bert."): x
            for n, x in their_state(numbers).items()
            if n.startswith("bert.")
        }
        bert, _ = fitted(of, fresh, short, "encoder.BertModel")
        return model(ids, mask)["prediction_logits"][mask == 1], bert(ids, mask)["pooler_output"]

    def theirs(fresh, numbers):
        model = model_of(submission.truths.reference, numbers)
        bert = model_of(submission.truths.reference, numbers, "encoder.BertModel")
        return model(ids, mask)["prediction_logits"][mask == 1], bert(ids, mask)["pooler_output"]

    submission.agrees(outputs, fresh, numbers, truth=theirs)


@pytest.mark.exercise("5.3")
@pytest.mark.hint("What is refused is named, and the model stays as it was, to the last number.")
def test_what_is_refused_changes_nothing(submission, rng):
    """A state dict that does not fit is refused by name, and changes nothing"""
    state, numbers = weights(rng), their_state(weights(rng))
    lost = str(rng.choice([n for n in numbers if n.startswith("bert.encoder") and "key" in n]))
    strange = "bert.encoder.layer.9.output.dense.bias"
    torn = numbers | {"cls.predictions.bias": numbers["cls.predictions.bias"] + 1}
    cut = numbers | {lost: numbers[lost][:3]}
    wrong = [
        {n: x for n, x in numbers.items() if n != lost},
        numbers | {strange: torch.ones(3)},
        cut,
        torn,
    ]
    ours = right.paired_names(2)[lost]
    for given, name in zip(wrong, (ours, strange, lost, "cls.predictions"), strict=True):
        model = model_of(submission, state)
        with submission.raises(ValueError, name):
            submission.call("weights.load_hf_state_dict", model, given)
        assert all(torch.equal(x, state[n]) for n, x in model.parameters().items())


@pytest.mark.exercise("5.3")
@pytest.mark.hint("With strict=False what fits is loaded, and the rest is listed by name, sorted.")
def test_what_fits_is_loaded_and_the_rest_listed(submission, rng):
    """With strict=False what fits is loaded, and the rest is listed"""
    state, numbers = weights(rng), their_state(weights(rng))
    names = [n for n in numbers if n.startswith("bert.encoder.layer.1")]
    lost, cut = (str(name) for name in rng.permutation(names)[:2])
    given = {n: x for n, x in numbers.items() if n != lost} | {
        cut: torch.ones(2, 3, 4),
        "x.y": torch.ones(1),
    }
    given["bert.embeddings.position_ids"] = torch.arange(12)[None]

    def loaded(of):
        model, report = fitted(of, state, given, strict=False)
        return report, model.parameters()

    submission.agrees(loaded)


# --- 5.4 load and save a checkpoint ---


def written(folder, state, **more):
    """Let Transformers write a checkpoint, and return its files."""
    with right.quiet():
        right.write_checkpoint(folder, FIELDS, their_state(state), **more)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def opened(of, files, name="heads.BertForPreTraining"):
    """Load a model from a folder with these files."""
    return of.make("weights.from_pretrained", Part(name), of.folder(files))


@pytest.mark.exercise("5.4")
@pytest.mark.hint("A model that was loaded gives the numbers of the one that was written.")
def test_a_checkpoint_of_transformers(submission, rng, tmp_path):
    """A checkpoint in shards gives its model's numbers, in evaluation, with the tie"""
    state, (ids, mask) = weights(rng), batch(rng, [8, 3], 8)
    files = written(tmp_path / "checkpoint", state, shard="9KB")

    def read(of, _):
        model, bert = opened(of, files), opened(of, files, "encoder.BertModel")
        scores = model(ids, mask)["prediction_logits"][mask == 1]
        return scores, bert(ids, mask)["pooler_output"], is_tied(model), model.get("training")

    def in_memory(state):
        of = submission.truths.reference
        scores = model_of(of, state)(ids, mask)["prediction_logits"][mask == 1]
        return (
            scores,
            model_of(of, state, "encoder.BertModel")(ids, mask)["pooler_output"],
            True,
            False,
        )

    submission.agrees(read, state, truth=in_memory)


@pytest.mark.exercise("5.4")
@pytest.mark.hint("What is saved is what was there, and saving again replaces it.")
def test_saved_and_loaded_again(submission, rng):
    """What is saved comes back number by number, and a second time replaces the first"""
    first, second = weights(rng), weights(rng)

    def back(of, name):
        folder = of.folder()
        for state in (first, second):
            of.call("weights.save_pretrained", model_of(of, state, name), folder)
        found = of.make("weights.from_pretrained", Part(name), folder)
        return found.parameters(), found.get("config.num_hidden_layers")

    name = str(rng.choice(["heads.BertForPreTraining", "encoder.BertModel"]))
    kept = model_of(submission.truths.reference, second, name).parameters()
    submission.agrees(back, name, truth=lambda _: (kept, 2))


def write_what_is_known(folder, files, fields):
    """Write weights and a config whose fields are these; what else it says, nobody here obeys."""
    assert {"config.json", "model.safetensors"} <= set(files), f"there are {sorted(files)}"
    try:
        config = json.loads(files["config.json"])
        found = {name: config[name] for name in [*fields, "model_type"]}
    except (ValueError, TypeError, KeyError) as error:
        raise AssertionError(f"config.json cannot be read: {error!r}") from None
    assert found == {**fields, "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(found))
    (folder / "model.safetensors").write_bytes(files["model.safetensors"])


@pytest.mark.exercise("5.4")
@pytest.mark.hint("Transformers reads what you save: all tensors by its names, and a config.")
def test_saved_for_transformers(submission, rng, tmp_path):
    """Transformers reads what is saved, with nothing missing and nothing left over"""
    state, folder = weights(rng, hidden_act="relu"), submission.folder()
    submission.call(
        "weights.save_pretrained", model_of(submission, state, hidden_act="relu"), folder
    )
    write_what_is_known(tmp_path, folder.files(), FIELDS | {"hidden_act": "relu"})
    try:
        model, report = right.read_by_transformers("BertForPreTraining", tmp_path)
    except Exception as error:
        raise AssertionError(f"Transformers cannot read it: {error}") from None
    assert not report["missing_keys"] and not report["unexpected_keys"]
    found, names = model.state_dict(), right.paired_names(2)
    assert all(torch.equal(found[n], state[ours]) for n, ours in names.items() if ours in state)


@pytest.mark.exercise("5.4")
@pytest.mark.hint(
    "What is not there is a FileNotFoundError; what is there and wrong, a ValueError."
)
def test_folders_that_cannot_be_read(submission, rng, tmp_path):
    """Folders that are empty, without the weights, of another model, or with a damaged file"""
    files = written(tmp_path / "checkpoint", weights(rng))
    other = json.dumps({**json.loads(files["config.json"]), "model_type": "roberta"}).encode()
    for there in ({}, {"config.json": files["config.json"]}):
        with submission.raises(FileNotFoundError):
            opened(submission, there)
    for spoilt in ({"config.json": other}, {"model.safetensors": files["model.safetensors"][:500]}):
        with submission.raises(ValueError):
            opened(submission, files | spoilt)


# --- 5.5 resize the vocabulary ---


def resized(of, model, size):
    """Resize a model's vocabulary and return it."""
    of.call("weights.resize_word_embeddings", model, size)
    return model


@pytest.mark.exercise("5.5")
@pytest.mark.hint(
    "Rows that stay keep their numbers: grown and cut back, the model is the old one."
)
def test_grown_and_cut_back(submission, rng):
    """Grown and cut back to its old size, a model gives its old numbers"""
    ids, mask = batch(rng, [9, 6], 9)

    def again(of, state):
        model = resized(of, model_of(of, state), PIECES + 40)
        sizes = [model.get("config.vocab_size"), len(model.parameters()["mlm_head.decoder.bias"])]
        resized(of, model, PIECES)
        sizes += [model.get("config.vocab_size"), model.get("bert.config.vocab_size")]
        return model(ids, mask)["prediction_logits"][mask == 1], is_tied(model), sizes

    submission.agrees(again, weights(rng))


@pytest.mark.exercise("5.5")
@pytest.mark.hint("A resized model learns and scores its new pieces, in table and head as one.")
def test_the_new_pieces_are_learned(submission, rng):
    """A resized model takes its new pieces in, scores them, and learns them"""
    labels = integers(rng, PIECES, PIECES + 5, 2, 6)

    def learns(of, state):
        model = resized(of, model_of(of, state), PIECES + 5)
        slopes = model.gradients(labels, of="loss", labels=labels)
        shapes = {name: list(value.shape) for name, value in model.parameters().items()}
        scores = model(labels)["prediction_logits"]
        moved = (slopes["bert.embeddings.word.weight"] != 0).any(-1)[PIECES:]
        return (
            list(scores.shape),
            shapes,
            moved[labels.unique() - PIECES],
            bool(scores.isfinite().all()),
        )

    submission.agrees(learns, weights(rng))


@pytest.mark.exercise("5.5")
@pytest.mark.hint("A size that leaves no row for [PAD] makes no model; it is refused beforehand.")
def test_sizes_that_are_refused(submission, rng):
    """Sizes that leave no row, or none for [PAD], are refused, and nothing is changed"""
    state = weights(rng)
    model = model_of(submission, state, pad_token_id=9)
    for size in (0, -3, 9):
        with submission.raises(ValueError):
            resized(submission, model, size)
    submission.agrees(
        lambda of: {**model.parameters(), "sizes": model.get("config.vocab_size")},
        truth=lambda: {**state, "sizes": PIECES},
    )


# --- 5.6 fill the mask ---


def fill(of, state, text, top_k, train=False, name="heads.BertForPreTraining", **fields):
    """Fill the masks of a text; return what comes back, and the model."""
    fields = {"vocab_size": len(right._VOCABULARY), **fields}
    model = model_of(of, state, name, train, **fields)
    words = of.make("tokenizer.WordPieceTokenizer", right._VOCABULARY)
    return of.call("weights.fill_mask", model, words, text, top_k), model


def filled(of, *given, **more):
    """Fill the masks of a text; return the pieces, their probabilities, and the mode afterwards."""
    found, model = fill(of, *given, **more)
    rows = [found] if isinstance(found[0], tuple) else found
    chances = torch.tensor([[chance for _, chance in row] for row in rows])
    return [[piece for piece, _ in row] for row in rows], chances, model.get("training")


def sentence(rng, masks):
    """Draw a text with some masks in it."""
    text = [str(word) for word in rng.choice(right._WORDS, 7)]
    for place in rng.permutation(7)[:masks]:
        text[place] = "[MASK]"
    return " ".join(text)


def small(rng, **fields):
    """Draw the parameters of a model with the small vocabulary."""
    return weights(rng, vocab_size=len(right._VOCABULARY), **fields)


@pytest.mark.exercise("5.6")
@pytest.mark.hint("Over the whole vocabulary the probabilities add up to 1, the likeliest first.")
def test_probabilities_add_up(submission, rng):
    """Over all pieces the probabilities add up to 1, each piece is there once, likeliest first"""
    text, size = sentence(rng, 2), len(right._VOCABULARY)

    def all_pieces(of, state):
        pieces, chances, _ = filled(of, state, text, size)
        falls = bool((chances[:, :-1] >= chances[:, 1:]).all())
        return [sorted(row) for row in pieces], chances.sum(-1), falls

    right_pieces = [sorted(right._VOCABULARY)] * 2
    submission.agrees(all_pieces, small(rng), truth=lambda _: (right_pieces, torch.ones(2), True))


@pytest.mark.exercise("5.6")
@pytest.mark.hint("Fewer pieces are the first of more; each mask is filled by itself.")
def test_fewer_are_the_first_of_more(submission, rng):
    """The best piece is the first of five, with a mask at either end of the text"""
    texts = ["[MASK] array is", "the sum of [MASK]", "[MASK]", "[MASK][MASK] [MASK] ."]
    for text in texts:
        submission.agrees(
            lambda of, state, text: [filled(of, state, text, k) for k in (1, 5)], small(rng), text
        )


@pytest.mark.exercise("5.6")
@pytest.mark.hint("The model is read in evaluation and given back in the mode in which it came.")
def test_the_mode_comes_back(submission, rng):
    """With dropout the answer is that of evaluation, and the model's mode comes back"""
    fields, text = (
        {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5},
        sentence(rng, 1),
    )
    for train in (True, False):
        for name in ("heads.BertForPreTraining", "heads.BertForMaskedLM"):
            submission.agrees(
                lambda of, state, train, name: filled(of, state, text, 4, train, name, **fields),
                *(small(rng), train, name),
            )


@pytest.mark.exercise("5.6")
@pytest.mark.hint("A text without the tokenizer's mask token has nothing to fill.")
def test_texts_without_a_mask(submission, rng):
    """Texts without a mask are refused"""
    state = small(rng)
    for text in ("the sum of", "", "[mask] is", "the MASK is"):
        with submission.raises(ValueError):
            fill(submission, state, text, 3)


# --- 5.7 clinic ---


def patient(of, state, table, train=False):
    """Make a model whose table was replaced by another one."""
    model = model_of(of, state, train=train)
    words = of.make("torch.nn.Embedding", *table.shape).load({"weight": table})
    model.put("bert.embeddings.word", words)
    of.call("clinic.mend_tie", model)
    return model


@pytest.mark.exercise("5.7")
@pytest.mark.hint("Table and head are one parameter again, so a training step moves both at once.")
def test_table_and_head_learn_as_one(submission, rng):
    """Table and head are one again: one change moves both, and both teach it"""
    new, ids = normal(rng, PIECES + 4, WIDTH), integers(rng, 1, PIECES + 4, 2, 8)

    def moved(of, state, table):
        model = patient(of, state, table)
        slopes = model.gradients(ids, of="loss", labels=ids)
        scores = model(ids)["prediction_logits"]
        return is_tied(model), slopes["bert.embeddings.word.weight"], scores

    submission.agrees(moved, weights(rng), new)


@pytest.mark.exercise("5.7")
@pytest.mark.hint("A healthy model stays as it is: mending twice does what mending once does.")
def test_mending_twice(submission, rng):
    """Mending twice does what mending once does, with more words and with fewer"""
    for rows in (PIECES + 6, PIECES, PIECES - 6):

        def twice(of, state, table):
            model = patient(of, state, table)
            of.call("clinic.mend_tie", model)
            sizes = model.get("config.vocab_size"), model.get("bert.config.vocab_size")
            return model.parameters(), sizes

        submission.agrees(twice, weights(rng), normal(rng, rows, WIDTH))


@pytest.mark.exercise("5.7")
@pytest.mark.hint("What is mended can be saved, and what is saved can be loaded.")
def test_a_mended_model_can_be_saved(submission, rng):
    """A mended model can be saved, and comes back the same"""

    def back(of, state, table):
        model, folder = patient(of, state, table), of.folder()
        of.call("weights.save_pretrained", model, folder)
        again = of.make("weights.from_pretrained", Part("heads.BertForPreTraining"), folder)
        return again.parameters()

    submission.agrees(back, weights(rng), normal(rng, PIECES + 3, WIDTH))
