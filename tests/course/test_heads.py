"""The heads give Hugging Face's scores, losses and gradients, and the tie holds."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NAMES = ["BertForPreTraining", "BertForMaskedLM"]


def their_model(model_class="BertForPreTraining", **changes):
    """Hugging Face's model, every parameter drawn at random."""
    torch.manual_seed(0)
    theirs: Any = getattr(transformers, model_class)(
        transformers.BertConfig(**{**SIZES, **changes})
    )
    for name, parameter in theirs.named_parameters():
        mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.2)
    return theirs.eval()


def ours_of(complete, theirs):
    """Our model with the same parameters."""
    config = complete.config.BertConfig.from_hf(theirs.config)
    ours = getattr(complete.heads, type(theirs).__name__)(config)
    complete.weights.load_hf_state_dict(ours, theirs.state_dict())
    return ours.eval()


@pytest.fixture(scope="module", params=NAMES)
def both(complete, request):
    theirs = their_model(request.param)
    return ours_of(complete, theirs), theirs


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2])
    ids = torch.randint(1, 97, (3, 9)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids > 50).long() * mask}


@pytest.fixture
def labels(batch):
    chosen = (torch.arange(27).view(3, 9) % 4 == 1) & batch["attention_mask"].bool()
    return torch.where(chosen, batch["input_ids"].flip(0), -100)


FOLLOWS = torch.tensor([0, 1, 1])


def logits_of(output):
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


# the MLM head


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_scores_are_hugging_faces_for_every_activation(complete, batch, activation):
    theirs = their_model(hidden_act=activation)
    ours = ours_of(complete, theirs)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        mine, expected = ours(**batch), theirs(**batch)
    torch.testing.assert_close(mine.prediction_logits[real], expected.prediction_logits[real])
    torch.testing.assert_close(mine.seq_relationship_logits, expected.seq_relationship_logits)


def test_scores_at_positions_are_those_of_all_places_text_by_text(both):
    ours, _ = both
    states = torch.randn(3, 5, 48)
    positions = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]]).bool()
    with torch.no_grad():
        everywhere, chosen = ours.mlm_head(states), ours.mlm_head(states, positions)
        none = ours.mlm_head(states, torch.zeros_like(positions))
    torch.testing.assert_close(chosen, everywhere[positions])
    assert none.shape == (0, 97)


def test_a_score_is_a_dot_product_with_the_words_vector(both):
    ours, _ = both
    head, states = ours.mlm_head, torch.randn(4, 48)
    transformed = head.norm(F.gelu(head.transform(states)))
    vector = ours.bert.embeddings.word.weight[17]
    expected = transformed @ vector + head.decoder.bias[17]
    torch.testing.assert_close(head(states)[:, 17], expected)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: model.double(),
        lambda model: model.train().eval(),
        lambda model: (model.load_state_dict(model.state_dict()), model)[1],
    ],
)
def test_the_tie_survives(complete, change):
    model = complete.heads.BertForPreTraining(complete.config.BertConfig(**SIZES))
    model = change(model)
    assert model.mlm_head.decoder.weight is model.bert.embeddings.word.weight


def test_a_tied_parameter_is_counted_once_and_moves_as_one(complete, batch, labels):
    model = complete.heads.BertForPreTraining(complete.config.BertConfig(**SIZES))
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model(**batch, labels=labels).loss.backward()
    unseen = (set(range(97)) - set(batch["input_ids"].flatten().tolist())).pop()
    assert model.bert.embeddings.word.weight.grad[unseen].abs().max() > 0  # from the head alone


# the models


def test_losses_and_gradients_are_hugging_faces(both, batch, labels):
    ours, theirs = (copy.deepcopy(model).double() for model in both)
    more = {} if not hasattr(ours, "nsp_head") else {"next_sentence_label": FOLLOWS}
    mine, expected = ours(**batch, labels=labels, **more), theirs(**batch, labels=labels, **more)
    torch.testing.assert_close(mine.loss, expected.loss)
    mine.loss.backward()
    expected.loss.backward()
    found = {
        parameter.detach().sum().item(): parameter.grad
        for parameter in ours.parameters()
        if parameter.grad is not None
    }
    compared = 0
    for parameter in theirs.parameters():
        if parameter.grad is not None:
            mine = found[parameter.detach().sum().item()]
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-10)
            compared += 1
    assert compared == len(found) > 30


def test_the_loss_is_the_sum_of_what_is_given(complete, batch, labels):
    theirs = their_model()
    ours = ours_of(complete, theirs)
    with torch.no_grad():
        words = ours(**batch, labels=labels).loss
        pairs = ours(**batch, next_sentence_label=FOLLOWS).loss
        both = ours(**batch, labels=labels, next_sentence_label=FOLLOWS).loss
        expected = theirs(**batch, labels=labels, next_sentence_label=FOLLOWS).loss
        assert ours(**batch).loss is None
    torch.testing.assert_close(words + pairs, both)
    torch.testing.assert_close(both, expected)


def test_a_training_step_pays_for_labelled_places_only(both, batch, labels):
    ours, _ = both
    rows = []
    hook = ours.mlm_head.decoder.register_forward_hook(
        lambda module, inputs, output: rows.append(output.shape[:-1].numel())
    )
    try:
        output = ours(**batch, labels=labels)
        assert rows == [int((labels != -100).sum())]
        logits = logits_of(output)  # whoever reads the scores pays for them
        assert logits.shape == (3, 9, 97)
        assert logits is logits_of(output)
        assert logits.requires_grad
    finally:
        hook.remove()


def test_scores_read_later_are_those_of_the_call(both, batch, labels):
    ours, _ = both
    with torch.no_grad():
        output, plain = ours(**batch, labels=labels), ours(**batch)
    torch.testing.assert_close(logits_of(output), logits_of(plain))
    assert not logits_of(output).requires_grad


def test_hidden_states_and_attentions_come_when_asked_for(both, batch):
    ours, _ = both
    with torch.no_grad():
        output = ours(**batch, output_hidden_states=True, output_attentions=True)
        plain = ours(**batch)
    assert (len(output.hidden_states), len(output.attentions)) == (3, 2)
    assert plain.hidden_states is plain.attentions is None


def test_a_masked_language_model_has_no_pooler(complete):
    model = complete.heads.BertForMaskedLM(complete.config.BertConfig(**SIZES))
    assert not any("pooler" in name or "nsp" in name for name, _ in model.named_parameters())


def test_a_fresh_model_guesses_evenly(complete):
    torch.manual_seed(0)
    model = complete.heads.BertForPreTraining(complete.config.BertConfig.mini(num_hidden_layers=1))
    ids = torch.randint(1000, 30_000, (4, 32))
    with torch.no_grad():
        loss = model.eval()(ids, labels=ids).loss
    assert abs(loss.item() - torch.tensor(30_522.0).log().item()) < 0.5  # 45 with N(0, 1) words
    assert (model.mlm_head.decoder.bias == 0).all()
    assert (model.mlm_head.norm.weight == 1).all()


# the stand-ins


@pytest.mark.parametrize("train", [False, True])
def test_the_stand_in_is_hugging_faces_model(complete, batch, labels, train):
    from bertlab.course.exercises import chapter_5

    theirs = their_model()
    ours = chapter_5.BertForPreTraining(complete.config.BertConfig.from_hf(theirs.config))
    complete.weights.load_hf_state_dict(ours, theirs.state_dict())
    ours = copy.deepcopy(ours).double().train(train)
    theirs.double().train(train)
    mine = ours(**batch, labels=labels, next_sentence_label=FOLLOWS)
    expected = theirs(**batch, labels=labels, next_sentence_label=FOLLOWS)
    torch.testing.assert_close(mine.loss, expected.loss)
    mine.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(
        ours.bert.embeddings.word.weight.grad,
        theirs.bert.embeddings.word_embeddings.weight.grad,
    )
    assert ours.mlm_head.decoder.weight is ours.bert.embeddings.word.weight


# other right ways to write it


def test_a_head_written_in_another_way_passes(complete):
    """A bias that is the head's and the decoder's, the activation as a module, index by nonzero."""
    from types import SimpleNamespace

    from bertlab.course import exercise, judging

    class AnotherHead(torch.nn.Module):
        def __init__(self, config, word_embeddings):
            super().__init__()
            self.transform = torch.nn.Linear(config.hidden_size, config.hidden_size)
            self.act = torch.nn.ReLU() if config.hidden_act == "relu" else torch.nn.GELU()
            self.norm = torch.nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
            self.bias = torch.nn.Parameter(torch.zeros(config.vocab_size))
            self.decoder = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.decoder.weight = word_embeddings.weight
            self.decoder.bias = self.bias

        def forward(self, hidden_states, positions=None):
            if positions is not None:
                texts, places = positions.nonzero(as_tuple=True)
                hidden_states = hidden_states[texts, places]
            x = self.norm(self.act(self.transform(hidden_states)))
            return x @ self.decoder.weight.T + self.bias

    verdict = judging.judge(exercise.load("5.1"), SimpleNamespace(MLMHead=AnotherHead))
    assert verdict.status == "passed", verdict.diagnosis
