"""Impacts obey their laws, also for taggers and spans; the picture can be read without color."""

import re
from typing import Any

import pytest
import torch

TEXT = "Return the eigenvalues of a symmetric matrix, not the eigenvalues of that."


@pytest.fixture(scope="module")
def tokenizer(complete):
    from bertlab.course.reference import minilm_folder

    return complete.tokenizer.WordPieceTokenizer.from_pretrained(minilm_folder())


@pytest.fixture(scope="module")
def bert(complete):
    torch.manual_seed(0)
    config = complete.config.BertConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return complete.encoder.BertModel(config).eval()


def test_gradient_impacts_sum_to_the_slope_along_all_word_vectors(complete, tokenizer, bert):
    """Make all vectors longer by a thousandth: the logit moves by a thousandth of the sum."""
    given = complete.fine_tuning
    model = given.SequenceClassifier(bert, 3).double()
    ids = torch.tensor([tokenizer.encode(TEXT)])

    def logit(factor: float) -> float:
        hook = bert.embeddings.word.register_forward_hook(
            lambda module, inputs, output: torch.cat(
                [output[:, :1], factor * output[:, 1:-1], output[:, -1:]], dim=1
            )
        )
        with torch.no_grad():
            found = model.eval()(ids).logits[0, 1].item()
        hook.remove()
        return found

    slope = (logit(1 + 1e-4) - logit(1 - 1e-4)) / 2e-4
    total = sum(impact for _, impact in given.gradient_impact(model, tokenizer, TEXT, 1))
    bert.float()
    assert total == pytest.approx(slope, rel=1e-3)
    assert abs(slope) > 1e-3


def without(ids: torch.Tensor, place: int) -> torch.Tensor:
    return torch.cat([ids[:, :place], ids[:, place + 1 :]], dim=1)


@pytest.mark.parametrize("place", [0, 4, 12])
def test_a_taggers_decision_is_followed_when_tokens_before_it_go(complete, tokenizer, bert, place):
    given = complete.fine_tuning
    model = given.TokenClassifier(bert, 4).eval()
    ids = torch.tensor([tokenizer.encode(TEXT)])
    impacts = given.tag_impact(model, tokenizer, TEXT, place, 2)
    assert not model.training  # it was in eval mode before
    with torch.no_grad():
        whole = model(ids).logits[0, place + 1, 2]
        for other, (_, impact) in enumerate(impacts):
            if other == place:  # the decided token itself is masked
                masked = ids.clone()
                masked[0, place + 1] = tokenizer.mask_token_id
                rest = model(masked).logits[0, place + 1, 2]
            else:
                rest = model(without(ids, other + 1)).logits[0, place + 1 - (other < place), 2]
            assert impact == pytest.approx(float(whole - rest), abs=1e-5)
    assert len({round(impact, 6) for _, impact in impacts}) > 5


def test_gradient_impact_explains_taggers_and_spans_too(complete, tokenizer, bert):
    given = complete.fine_tuning
    tagger, spans = given.TokenClassifier(bert, 4), given.SpanClassifier(bert)
    question, passage = "what is returned ?", "the eigenvalues of a matrix"
    for method in (given.occlusion_impact, given.gradient_impact):
        of_a_tag = given.tag_impact(tagger, tokenizer, TEXT, 3, method=method)
        of_a_span = given.span_impact(spans, tokenizer, question, passage, method=method)
        assert len(of_a_tag) == len(tokenizer.encode(TEXT)) - 2
        assert len(of_a_span) == len(tokenizer.encode(question, passage)) - 3
        assert any(impact for _, impact in of_a_tag)
        assert any(impact for _, impact in of_a_span)


def test_a_spans_score_is_what_falls(complete, tokenizer, bert):
    given = complete.fine_tuning
    model = given.SpanClassifier(bert).eval()
    question, passage = "what is returned ?", "the eigenvalues of a matrix"
    best = given.answer(model, tokenizer, question, passage, 1)[0]
    impacts = given.span_impact(model, tokenizer, question, passage)
    read = tokenizer(question, passage)
    batch = {name: torch.tensor([read[name]]) for name in ("input_ids", "token_type_ids")}
    less = {name: without(x, 1) for name, x in batch.items()}
    examples, _ = given.span_examples(
        tokenizer, question, passage, (best.start, best.end) if best.text else None
    )
    first, last = (examples[0][f"{end}_positions"] for end in ("start", "end"))
    moved = [place - (place > 1) for place in (first, last)]
    with torch.no_grad():
        after: Any = model(**less)
    rest = after.start_logits[0, moved[0]] + after.end_logits[0, moved[1]]
    assert impacts[0][1] == pytest.approx(best.score - float(rest), abs=1e-5)


def test_a_place_that_is_not_there_is_refused(complete, tokenizer, bert):
    model = complete.fine_tuning.TokenClassifier(bert, 4)
    with pytest.raises(ValueError, match="place is 99"):
        complete.fine_tuning.tag_impact(model, tokenizer, TEXT, 99)


# the picture


IMPACTS = [("the", 0.01), ("eigen", 1.5), ("##values", 0.25), ("<b>", -0.75), ("mat", 0.0)]


def test_pieces_are_merged_and_nothing_is_lost(complete):
    merged = complete.fine_tuning.merge_pieces(IMPACTS)
    assert merged == [("the", 0.01), ("eigenvalues", 1.75), ("<b>", -0.75), ("mat", 0.0)]
    assert sum(x for _, x in merged) == pytest.approx(sum(x for _, x in IMPACTS))
    assert complete.fine_tuning.merge_pieces([("##s", 1.0)]) == [("##s", 1.0)]


def test_signs_can_be_read_without_color(complete):
    picture = complete.fine_tuning.ImpactPicture(IMPACTS, "numpy, 61%")
    page = picture._repr_html_()
    bare = re.sub(r"rgba?\([^)]*\)", "", page)  # all color is gone
    assert re.search(r"solid[^<]*>eigenvalues<sup[^>]*>\+1\.8", bare)
    assert re.search(r"dotted[^<]*>&lt;b&gt;<sup[^>]*>−0\.75", bare)
    assert "<span>the</span>" in bare  # too small to be marked
    assert "<b>numpy, 61%</b>" in page


def test_the_terminal_shows_the_same(complete):
    picture = complete.fine_tuning.ImpactPicture(IMPACTS, "numpy, 61%")
    first, second, *rest = str(picture).splitlines()
    assert first == "numpy, 61%"
    assert second == "the eigenvalues[+1.8] <b>[−0.75] mat"
    assert all(len(line) <= 100 for line in rest)


def test_stronger_words_are_darker(complete):
    picture = complete.fine_tuning.ImpactPicture([("a", 2.0), ("b", 1.0), ("c", 0.5)])
    shades = [float(x) for x in re.findall(r"rgba\([\d,]+,([\d.]+)\)", picture._repr_html_())]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == 3


def test_a_text_without_any_impact_is_shown_unmarked(complete):
    picture = complete.fine_tuning.ImpactPicture([("a", 0.0), ("b", 0.0)])
    assert "sup" not in picture._repr_html_()
    assert str(picture).startswith("a b")


def test_back_translation_stands_where_a_language_model_stands(complete):
    given = complete.fine_tuning
    model = given.BackTranslation(lambda text: text[::-1], lambda text: text.upper())
    assert given.augment("abc", model, None) == "CBA"
    with pytest.raises(FileNotFoundError, match="there-is-no-such-model"):
        given.translator("bertlab/there-is-no-such-model")
