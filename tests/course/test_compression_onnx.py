"""A model exported to ONNX is the model, at every shape; and what cannot be exported says so."""

from unittest import mock

import onnx
import pytest
import torch
from torch import nn

from bertlab.course.exercises.chapter_8 import Stubborn, quick_exporter

from .test_compression import SIZES, classifier, drawn_batch, logits, needs_onednn, packs, texts

SHAPES = [(1, 1), (1, 2), (1, 16), (2, 1), (2, 7), (3, 7), (2, 5), (8, 16), (5, 3), (32, 11)]


@pytest.fixture(scope="module")
def exported(complete, tmp_path_factory):
    """A classifier, and its file by the exporter that students use."""
    model = classifier(complete, num_hidden_layers=1)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    complete.compression.export_onnx(model, path)
    return model, path


def of_shape(size, seq):
    """A batch of this shape; texts become shorter from row to row."""
    return drawn_batch(size + seq, [seq - row % seq for row in range(size)])


@pytest.mark.parametrize(("size", "seq"), SHAPES)
def test_onnx_runtime_agrees_at_every_shape(complete, exported, size, seq):
    model, path = exported
    batch = of_shape(size, seq)
    run = complete.compression.OnnxModel(path, threads=1)
    torch.testing.assert_close(
        run(**texts(batch)).logits, logits(model, batch), rtol=1e-4, atol=1e-5
    )
    if seq > 2 and size > 1:  # the mask reaches the file: without it the numbers differ
        unmasked = run(batch["input_ids"], None, batch["token_type_ids"]).logits
        assert not torch.allclose(unmasked, logits(model, batch), atol=1e-3)


def test_the_file_is_what_it_says(exported):
    _, path = exported
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [given.name for given in model.graph.input] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    for given in model.graph.input:
        axes = given.type.tensor_type.shape.dim
        assert [axis.WhichOneof("value") for axis in axes] == ["dim_param", "dim_param"]
    assert next(o.version for o in model.opset_import if o.domain == "") == 20
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".data"] == []


def test_the_file_tells_nothing_of_the_machine_that_made_it(exported):
    """The exporter notes the lines of source behind each node, with their paths."""
    _, path = exported
    assert b".py" not in path.read_bytes()


def test_the_model_is_as_it_was(exported):
    model, _ = exported
    assert not model.training
    assert "forward" not in vars(model.bert)


def test_an_int8_file_is_smaller_and_near(complete, exported, tmp_path):
    compression = complete.compression
    model, path = exported
    compression.quantize_onnx(path, tmp_path / "int8.onnx")
    batch = of_shape(8, 16)
    full, made = logits(model, batch), compression.OnnxModel(tmp_path / "int8.onnx")(**texts(batch))
    assert 0 < (made.logits - full).norm() < 0.2 * full.norm()
    stored = {t.data_type for t in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in stored
    assert [p.name for p in tmp_path.iterdir()] == ["int8.onnx"]


def test_what_cannot_be_exported_says_which_part(complete, tmp_path):
    model = classifier(complete)
    model.bert.encoder.layers[1].feed_forward.down = Stubborn(
        SIZES["intermediate_size"], SIZES["hidden_size"]
    )
    path = tmp_path / "model.onnx"
    path.write_text("before")
    with (
        quick_exporter(),
        pytest.raises(
            ValueError, match=r"encoder\.layers\.1\.feed_forward\.down \(Stubborn\).*fing"
        ),
    ):
        complete.compression.export_onnx(model, path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_int8_of_pytorch_is_refused_with_the_way_on(complete, tmp_path):
    small = complete.compression.quantize_model(classifier(complete))
    with pytest.raises(ValueError, match=r"embeddings\.word \(Int8Embedding\).*quantize_onnx"):
        complete.compression.export_onnx(small, tmp_path / "model.onnx")


@needs_onednn
def test_a_prepared_model_is_refused_with_the_way_on(complete, tmp_path, monkeypatch):
    packs(complete.compression, monkeypatch)
    prepared = complete.compression.prepare_for_inference(classifier(complete))
    with pytest.raises(ValueError, match=r"\(PackedLinear\).*prepared from"):
        complete.compression.export_onnx(prepared, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["SpanClassifier", "BertModel", "pruned"])
def test_other_models_are_exported_with_their_own_outputs(complete, tmp_path, name):
    model = classifier(complete, num_hidden_layers=1)
    if name == "SpanClassifier":
        model = complete.fine_tuning.SpanClassifier(model.bert).eval()
    if name == "BertModel":
        model = model.bert
    if name == "pruned":
        complete.compression.prune_heads(model, {0: [2]})
    with quick_exporter():
        complete.compression.export_onnx(model, tmp_path / "model.onnx")
    batch = of_shape(4, 9)
    made = complete.compression.OnnxModel(tmp_path / "model.onnx")(**texts(batch))
    with torch.no_grad():
        expected = complete.compression.tensors_of(model(**texts(batch)))
    assert set(vars(made)) == set(expected)
    real = batch["attention_mask"].bool()
    for key, value in expected.items():
        mine = getattr(made, key)
        if value.shape[:2] == real.shape:
            mine, value = mine[real], value[real]
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)


def test_a_file_that_is_not_there_is_named(complete, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        complete.compression.OnnxModel(tmp_path / "nowhere.onnx")


def test_dropout_is_in_no_file(complete, tmp_path):
    model = classifier(complete, num_hidden_layers=1).train()
    with quick_exporter():
        complete.compression.export_onnx(model, tmp_path / "model.onnx")
        assert model.training
        in_training = tmp_path / "training.onnx"
        with mock.patch.object(complete.compression, "eval_mode", mock.MagicMock()):
            complete.compression.export_onnx(model, in_training)
    kinds = [
        {node.op_type for node in onnx.load(path).graph.node}
        for path in (tmp_path / "model.onnx", in_training)
    ]
    assert "Dropout" not in kinds[0] and "Dropout" in kinds[1]
    assert isinstance(model, nn.Module)
