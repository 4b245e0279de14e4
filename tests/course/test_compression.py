"""What was made smaller computes what it should, loads again, and is measured honestly."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from bertlab.course.exercises import chapter_8

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.0,
}
LABELS = 3


@pytest.fixture
def compression(complete):
    return complete.compression


def classifier(complete, **changes):
    """A classifier with every parameter drawn at random, in eval mode."""
    torch.manual_seed(0)
    bert = complete.encoder.BertModel(complete.config.BertConfig(**{**SIZES, **changes}))
    model = complete.fine_tuning.SequenceClassifier(bert, LABELS)
    for name, parameter in model.named_parameters():
        spread = 1.0 if "embeddings" in name else 2 * parameter.shape[-1] ** -0.5
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, spread)
    return model.eval()


@pytest.fixture
def model(complete):
    return classifier(complete)


@pytest.fixture
def batch():
    return drawn_batch(7, [9, 4, 6, 2, 9])


def drawn_batch(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 61, mask.shape, generator=generator) * mask
    labels = torch.randint(0, LABELS, (len(lengths),), generator=generator)
    types = (torch.arange(max(lengths)) > 2).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}


def texts(batch):
    return {name: x for name, x in batch.items() if name != "labels"}


def logits(model, batch):
    with torch.no_grad():
        return model(**texts(batch)).logits


# eight bits


@pytest.mark.parametrize("per_channel", [True, False])
def test_no_number_is_further_than_half_a_step_from_its_int8(compression, per_channel):
    weight = torch.randn(40, 300) * torch.logspace(-2, 1, 40)[:, None]
    int8, scale, zero_point = compression.quantize_int8(weight, per_channel)
    step = 0.5001 * scale
    assert ((int8.int() - zero_point) * scale - weight).abs().le(step).all()
    cut_off = ((weight / scale).trunc() + zero_point).clamp(-128, 127)
    assert not ((cut_off - zero_point) * scale - weight).abs().le(step).all()


@pytest.mark.parametrize("row", [[0.3, 0.9, 2.0], [-0.3, -0.9, -2.0], [-1.0, 3.0, 0.0], [0.0] * 3])
def test_zero_is_met_exactly(compression, row):
    int8, scale, zero_point = compression.quantize_int8(torch.tensor([row]))
    assert int8.dtype == torch.int8
    assert -128 <= int(zero_point) <= 127
    assert torch.isfinite(scale).all() and scale.gt(0).all()
    zero, *_ = compression.quantize_int8(torch.tensor([[*row, 0.0]]))
    assert int(zero[0, -1]) == int(zero_point)


def test_a_range_for_each_row_is_finer_than_one_for_all(compression):
    weight = torch.randn(8, 50) * torch.logspace(-3, 0, 8)[:, None]

    def error(per_channel):
        int8, scale, zero_point = compression.quantize_int8(weight, per_channel)
        return (((int8.int() - zero_point) * scale - weight) / weight.std(1, keepdim=True)).std()

    assert error(True) < 0.01 < error(False)


@pytest.mark.parametrize("quick", [True, False])
def test_the_product_of_int8_is_exact_whichever_way_it_is_made(compression, monkeypatch, quick):
    monkeypatch.setattr(compression, "has_quick_int8", lambda *shape: quick)
    first = torch.full((3, 3001), 127, dtype=torch.int8)
    second = torch.full((5, 3001), 127, dtype=torch.int8)
    second[:, 7], second[1] = 126, -127
    right = first.long() @ second.long().T
    assert torch.equal(compression.int8_matmul(first, second).long(), right)
    # Without cutting the sum into pieces, float32 would round it.
    assert not torch.equal((first.float() @ second.float().T).long(), right)


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(1, 8, 8), (8, 1, 8), (1, 1, 8), (4, 3, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("step", [0, 1, 8])
def test_a_row_s_step_in_memory_changes_no_product(
    compression, monkeypatch, rows, columns, k, step
):
    monkeypatch.setattr(compression, "has_quick_int8", lambda *shape: True)
    first, second = (
        torch.randint(-128, 128, (n, k), dtype=torch.int8).as_strided((n, k), (step, 1))
        if n == 1
        else torch.randint(-128, 128, (n, k), dtype=torch.int8)
        for n in (rows, columns)
    )
    right = first.long() @ second.long().T
    assert torch.equal(compression.int8_matmul(first, second).long(), right)


@pytest.mark.parametrize("cut", [2**31 - 1, 2**15 - 1])
def test_arithmetic_that_cuts_off_its_sums_is_never_used(compression, monkeypatch, cut):
    def product(first, second):
        return (first.float() @ second.float()).clamp(max=cut).int()

    monkeypatch.setattr(compression, "INT_MM", product)
    times = iter([1.0, 2.0])  # in int8, in float32
    monkeypatch.setattr(compression, "quickest", lambda *call: next(times))
    assert compression.has_quick_int8.__wrapped__("cpu", 7, 24) is (cut > 2**15)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_an_int8_layer_computes_what_its_int8_stand_for(compression, per_channel, bias):
    linear = nn.Linear(48, 20, bias)
    layer = compression.Int8Linear(linear, per_channel)
    x = torch.randn(2, 5, 48) * 3 + 1

    def restored(x):
        int8, scale, zero_point = compression.quantize_int8(x)
        return (int8.int() - zero_point) * scale

    weight = (layer.weight.int() - layer.zero_point) * layer.scale
    torch.testing.assert_close(layer(x), F.linear(restored(x), weight, linear.bias))
    assert not torch.allclose(layer(x), F.linear(x, weight, linear.bias), atol=1e-5)
    torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])


#: Run beside torchao, which stands apart: Transformers would import it where it is installed.
BY_TORCHAO = """
import sys
from safetensors.torch import load_file, save_file
sys.path.insert(0, sys.argv[1])
from torchao.quantization import quant_primitives as torchao
import torch
weight = load_file(sys.argv[2])["weight"]
ranges = {"rows": (1, weight.shape[1]), "all": tuple(weight.shape)}
made = {}
for name, block in ranges.items():
    kind = torchao.MappingType.ASYMMETRIC
    scale, zero = torchao.choose_qparams_affine(weight, kind, block, torch.int8, keepdim=True)
    int8 = torchao.quantize_affine(weight, block, scale, zero, torch.int8)
    made |= {f"{name} int8": int8, f"{name} scale": scale, f"{name} zero_point": zero.int()}
save_file(made, sys.argv[3])
"""


@pytest.mark.skipif(
    "BERTLAB_TORCHAO" not in os.environ,
    reason="BERTLAB_TORCHAO does not say in which folder a torchao stands: pip install --target",
)
def test_torchao_makes_the_same_int8(compression, tmp_path):
    weight = torch.randn(30, 64) + torch.linspace(-4, 4, 30)[:, None]
    save_file({"weight": weight}, tmp_path / "weight.safetensors")
    files = [str(tmp_path / f"{name}.safetensors") for name in ("weight", "made")]
    command = [sys.executable, "-c", BY_TORCHAO, os.environ["BERTLAB_TORCHAO"], *files]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    theirs = load_file(tmp_path / "made.safetensors")
    for name, per_channel in (("rows", True), ("all", False)):
        int8, scale, zero_point = compression.quantize_int8(weight, per_channel)
        torch.testing.assert_close(scale, theirs[f"{name} scale"])
        assert torch.equal(zero_point, theirs[f"{name} zero_point"])
        assert alike(int8, theirs[f"{name} int8"])
        cut_off = ((weight / scale).trunc() + zero_point).clamp(-128, 127)
        assert not alike(cut_off, theirs[f"{name} int8"])


def alike(first, second):
    """Whether int8 are the same, but for a tie, or nearly one."""
    differing = (first.int() - second.int()).abs()
    return differing.max() <= 1 and differing.float().mean() < 1e-3


def test_onnx_runtime_makes_the_same_int8(compression):
    torch.manual_seed(3)
    weight = torch.randn(2000, 33) * torch.logspace(-6, 6, 2000)[:, None] + torch.randn(2000, 1)
    for per_channel in (True, False):
        ours = compression.quantize_int8(weight, per_channel)
        theirs = chapter_8.Int8()(weight, per_channel)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
        symmetric = chapter_8._Symmetric()(weight, per_channel)
        assert not torch.equal(symmetric[0], ours[0])


def test_a_model_made_before_the_module_was_loaded_anew_is_known(
    complete, compression, batch, tmp_path
):
    """Each exercise of a notebook loads the module anew: a class of then is another object."""
    model = compression.quantize_model(classifier(complete, hidden_size=32))
    for part in model.modules():
        if type(part) in (compression.Int8Linear, compression.Int8Embedding):
            own = {
                n: x for n, x in vars(type(part)).items() if n not in ("__dict__", "__weakref__")
            }
            part.__class__ = type(type(part).__name__, (nn.Module,), own)
    assert not any(isinstance(part, compression.Int8Linear) for part in model.modules())
    compression.save_compressed(model, tmp_path / "int8.safetensors")
    back = compression.load_compressed(tmp_path / "int8.safetensors")
    assert torch.equal(logits(back, batch), logits(model, batch))
    with pytest.raises(ValueError, match=r"Int8\w+\) computes in PyTorch's own way"):
        compression.export_onnx(model, tmp_path / "int8.onnx")


def test_an_error_in_no_part_of_the_model_has_a_message_too(complete, compression):
    module = compression.exportable(classifier(complete))
    assert compression.why_not(module, RuntimeError("no way")).endswith(": it fails: no way")


def test_a_quantized_model_is_a_quarter_as_large_and_hardly_differs(complete, compression, batch):
    model = classifier(complete, hidden_size=96, num_attention_heads=4, vocab_size=400)
    small = compression.quantize_model(model)
    size = compression.size_on_disk_mb
    assert size(small) < 0.33 * size(model)  # scales, norms and names are the rest
    floats = compression.quantize_model(model, embeddings=False)
    assert size(floats) > 1.2 * size(small)
    full, made = logits(model, batch), logits(small, batch)
    assert 0 < (made - full).norm() < 0.1 * full.norm()
    assert all(isinstance(m, nn.Linear) is False for m in small.modules())


# a teacher


def test_the_squared_temperature_keeps_the_gradient_in_size(compression):
    student = torch.randn(64, 8, requires_grad=True)
    teacher, labels = torch.randn(64, 8), torch.randint(0, 8, (64,))

    def slope(temperature):
        loss = compression.distillation_loss(student, teacher, labels, temperature, alpha=1.0)
        return torch.autograd.grad(loss, student)[0].norm()

    assert 0.5 < slope(20.0) / slope(5.0) < 2
    assert slope(20.0) / 20**2 < 0.1 * slope(5.0) / 5**2  # without it


def test_a_pupil_comes_closer_to_its_teacher(complete, compression, model, batch):
    settings = complete.fine_tuning.FineTuningSettings(epochs=20, learning_rate=1e-2)
    student, truth = compression.student_of(model, 1), logits(model, batch)
    batch = {**batch, "labels": truth.argmax(dim=-1)}  # the best epoch is that of the teacher's way

    def distance():
        loss = compression.distillation_loss
        return loss(logits(student, batch), truth, batch["labels"], temperature=1.0, alpha=1.0)

    before, asked = distance(), []
    teacher = compression.TeacherLogits(model)
    model.register_forward_hook(lambda *_: asked.append(1))
    losses = compression.distil(student, teacher, [batch], [batch], settings, alpha=1.0)
    assert len(losses) == 20 and len(asked) == 1  # the teacher is asked once, not in every epoch
    assert distance() < 0.5 * before
    assert student.config.num_hidden_layers == len(student.bert.encoder.layers) == 1


def test_a_teacher_remembers_texts_and_not_places(compression, model, batch):
    teacher = compression.TeacherLogits(model)
    teacher(batch)
    shuffled = {name: x.flip(0) for name, x in batch.items()}
    torch.testing.assert_close(teacher(shuffled), logits(model, batch).flip(0))
    other = {**batch, "token_type_ids": 1 - batch["token_type_ids"]}
    torch.testing.assert_close(teacher(other), logits(model, other))


def test_layers_are_dropped_from_a_copy(complete, compression, batch):
    model = classifier(complete, num_hidden_layers=5)
    small = compression.drop_layers(model, [0, 3])
    assert len(model.bert.encoder.layers) == 5
    model.bert.encoder.layers = nn.ModuleList(model.bert.encoder.layers[i] for i in (0, 3))
    torch.testing.assert_close(logits(small, batch), logits(model, batch))
    assert compression.alternate_layers(6, 3) == [0, 2, 5]  # the head reads the last
    assert compression.alternate_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert compression.alternate_layers(6, 1) == [5]
    assert compression.alternate_layers(12, 12) == list(range(12))
    with pytest.raises(ValueError, match="keep"):
        compression.drop_layers(small, [2])


# heads


def test_importance_in_bfloat16_is_about_the_same(compression, model, batch):
    right = compression.head_importance(model, [batch])
    found = compression.head_importance(copy.deepcopy(model).bfloat16(), [batch])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, right, rtol=0.1, atol=0.02 * float(right.max()))


def test_importance_is_the_slope_of_the_loss_by_a_gate(complete, compression, model, batch):
    model = model.double()
    found = compression.head_importance(model, [batch])
    assert found.shape == (2, 4)

    def loss_of_each_text(layer, head, gate):
        turned = copy.deepcopy(model)
        weight = turned.bert.encoder.layers[layer].attention.output.weight
        with torch.no_grad():
            weight[:, 6 * head : 6 * head + 6] *= gate
        return F.cross_entropy(logits(turned, batch), batch["labels"], reduction="none")

    for layer, head in ((0, 1), (1, 3)):
        more, less = (loss_of_each_text(layer, head, gate) for gate in (1 + 1e-4, 1 - 1e-4))
        expected = ((more - less) / 2e-4).abs().mean().item()
        assert found[layer, head].item() == pytest.approx(expected, rel=1e-4)


def without(model, heads):
    """The model with heads' columns of `output` at 0."""
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        for layer, head in heads:
            weight = zeroed.bert.encoder.layers[layer].attention.output.weight
            weight[:, 6 * head : 6 * head + 6] = 0
    return zeroed


def test_a_pruned_model_is_one_whose_heads_are_silent(compression, model, batch):
    pruned = copy.deepcopy(model)
    compression.prune_heads(pruned, {0: [1], 1: [0, 2]})
    compression.prune_heads(pruned, {0: [1]})  # of 0, 2, 3 that are left: 2
    expected = logits(without(model, [(0, 1), (0, 2), (1, 0), (1, 2)]), batch)
    torch.testing.assert_close(logits(pruned, batch), expected)
    other = logits(without(model, [(0, 1), (0, 3), (1, 0), (1, 2)]), batch)
    assert not torch.allclose(logits(pruned, batch), other, atol=1e-3)
    with torch.no_grad():
        packed = pruned.bert.forward_packed(**texts(batch)).pooler_output
        padded = pruned.bert(**texts(batch)).pooler_output
    torch.testing.assert_close(packed, padded)
    assert compression.head_importance(pruned, [batch])[:, 2:].eq(0).all()
    gone = sum(x.numel() for x in model.parameters()) - sum(x.numel() for x in pruned.parameters())
    assert gone == 4 * (4 * 6 * 24 + 3 * 6)


@pytest.mark.parametrize("heads", [{0: [0], 2: [0]}, {0: [0], 1: [4]}, {0: [0], 1: [0, 1, 2, 3]}])
def test_a_refused_pruning_changes_nothing(compression, model, batch, heads):
    before = logits(model, batch)
    with pytest.raises(ValueError, match=r"layer|heads\[1\]"):
        compression.prune_heads(model, heads)
    assert torch.equal(logits(model, batch), before)
    assert [layer.attention.num_heads for layer in model.bert.encoder.layers] == [4, 4]


# adapters and LoRA


def test_adapters_train_under_three_percent_of_minilm(complete, compression):
    config = complete.config.BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536
    )
    with complete.weights.WithoutInitialization():
        model = complete.fine_tuning.SequenceClassifier(complete.encoder.BertModel(config), 8)
    assert compression.trained_share(model) == 1
    lora = compression.trained_share(compression.add_lora(copy.deepcopy(model)))
    assert 0 < lora < 0.03
    assert 0 < compression.trained_share(compression.add_adapters(model)) < 0.03


@pytest.mark.parametrize("make", ["add_adapters", "add_lora"])
def test_training_moves_the_small_parts_and_the_head_alone(
    complete, compression, model, batch, make
):
    before = logits(model, batch)
    model = getattr(compression, make)(model)
    torch.testing.assert_close(logits(model, batch), before)
    kept = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    settings = complete.fine_tuning.FineTuningSettings(epochs=1, learning_rate=1e-2)
    complete.fine_tuning.fine_tune(model, [batch] * 3, [batch], settings)
    assert kept
    assert all(torch.equal(model.get_parameter(name), value) for name, value in kept.items())
    assert (logits(model, batch) - before).abs().max() > 0.01


def test_merged_lora_computes_the_same_and_is_plain(compression, model, batch):
    compression.add_lora(model, rank=2, alpha=8, parts=("query", "value", "output"))
    for layer in model.modules():
        if isinstance(layer, compression.LoRALinear):
            nn.init.normal_(layer.lora_b)
    trained = logits(model, batch)
    compression.merge_lora(model)
    torch.testing.assert_close(logits(model, batch), trained, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, compression.LoRALinear) for m in model.modules())
    compression.prune_heads(model, {0: [1]})  # plain layers can be pruned again


# files


def compressed(compression, model, kind):
    if kind == "int8":
        return compression.quantize_model(model)
    if kind == "int8, one range a matrix, float tables":
        return compression.quantize_model(model, per_channel=False, embeddings=False)
    if kind == "bfloat16":
        return compression.in_bfloat16(model)
    if kind == "layers":
        return compression.drop_layers(model, [1])
    if kind == "adapters":
        return compression.add_adapters(model, 3)
    if kind == "merged":
        return compression.merge_lora(compression.add_lora(model))
    compression.prune_heads(model, {0: [1, 2], 1: [0]})
    return model if kind == "pruned" else compression.quantize_model(model)


KINDS = [
    "int8",
    "int8, one range a matrix, float tables",
    "bfloat16",
    "layers",
    "adapters",
    "merged",
    "pruned",
    "pruned and int8",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads_equal(compression, model, batch, tmp_path, kind):
    made = compressed(compression, model, kind)
    compression.save_compressed(made, tmp_path / "small.safetensors")
    loaded = compression.load_compressed(tmp_path / "small.safetensors")
    assert torch.equal(logits(loaded, batch), logits(made, batch))
    assert not loaded.training
    assert [p.name for p in tmp_path.iterdir()] == ["small.safetensors"]


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "TokenClassifier"])
def test_other_models_are_saved_too_and_a_tie_stays_a_tie(complete, compression, tmp_path, name):
    config = complete.config.BertConfig(**SIZES)
    bert = complete.encoder.BertModel(config)
    made = {
        "BertModel": lambda: bert,
        "BertForMaskedLM": lambda: complete.heads.BertForMaskedLM(config),
        "TokenClassifier": lambda: complete.fine_tuning.TokenClassifier(bert, 5),
    }[name]()
    compression.prune_heads(made, {0: [1]})
    compression.save_compressed(made, tmp_path / "model")
    loaded = compression.load_compressed(tmp_path / "model")
    assert {n: x.shape for n, x in loaded.named_parameters()} == {
        n: x.shape for n, x in made.named_parameters()
    }
    if name == "BertForMaskedLM":
        assert loaded.mlm_head.decoder.weight is loaded.bert.embeddings.word.weight


def test_a_foreign_or_damaged_file_is_named(compression, model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        compression.load_compressed(tmp_path / "nowhere")
    save_file({"x": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="foreign is no model of save_compressed"):
        compression.load_compressed(tmp_path / "foreign")
    compression.save_compressed(model, tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for name, damaged in (("cut", data[: len(data) // 2]), ("noise", b"\x93noise" * 99)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            compression.load_compressed(tmp_path / name)


def test_a_plan_that_does_not_fit_its_tensors_is_refused(compression, model, tmp_path):
    plan = compression.plan_of(model)
    tensors = {n: x.contiguous() for n, x in model.state_dict().items()}
    for name, change in (("heads", {"heads": [4, 1]}), ("class", {"class": "Elsewhere"})):
        text = compression.json.dumps({**plan, **change})
        metadata = {"kind": compression.COMPRESSED, "plan": text}
        save_file(tensors, tmp_path / name, metadata)
        with pytest.raises(ValueError, match=f"{name} (describes|does)"):
            compression.load_compressed(tmp_path / name)


def test_what_a_file_cannot_describe_is_not_saved_and_the_old_file_stays(
    compression, model, tmp_path, monkeypatch
):
    path = tmp_path / "model"
    compression.save_compressed(model, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="merge"):
        compression.save_compressed(compression.add_lora(copy.deepcopy(model)), path)

    def full_disk(tensors, file, *rest):
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(compression, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        compression.save_compressed(model, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# prepared models


def packs(compression, monkeypatch):
    """Let every layer be packed, whatever is faster here."""
    monkeypatch.setattr(compression, "quickest_linear", lambda linear, precision: "oneDNN")


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"
)


@needs_onednn
def test_a_prepared_model_gives_the_same_numbers_and_leaves_the_model_alone(
    complete, compression, model, batch, monkeypatch
):
    packs(compression, monkeypatch)
    before = copy.deepcopy(model)
    prepared = compression.prepare_for_inference(model)
    packed = [m for m in prepared.modules() if isinstance(m, compression.PackedLinear)]
    assert len(packed) == 2 * 6 + 2 and set(prepared.picked.values()) == {"oneDNN"}
    torch.testing.assert_close(logits(prepared, batch), logits(before, batch), rtol=1e-4, atol=1e-5)
    assert repr(model) == repr(before)
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert not any(p.requires_grad for p in prepared.parameters())


@needs_onednn
def test_a_prepared_model_can_be_saved(complete, compression, model, batch, tmp_path, monkeypatch):
    packs(compression, monkeypatch)
    prepared = compression.prepare_for_inference(model)
    compression.save_compressed(prepared, tmp_path / "model")
    loaded = compression.load_compressed(tmp_path / "model")
    assert torch.equal(logits(loaded, batch), logits(model, batch))


@needs_onednn
def test_a_prepared_model_can_be_copied(compression, model, batch, monkeypatch):
    packs(compression, monkeypatch)
    prepared = compression.prepare_for_inference(model)
    assert torch.equal(logits(copy.deepcopy(prepared), batch), logits(prepared, batch))


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_stays_what_it_was_when_the_layer_is_trained(compression, bias):
    linear, x = nn.Linear(40, 24, bias), torch.randn(3, 40)
    packed = compression.PackedLinear(linear, compression.ONEDNN)
    before = packed(x)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.add_(1)
    assert torch.equal(packed(x), before)


def test_a_prepared_model_reads_no_padding(compression, model, batch):
    prepared = compression.prepare_for_inference(model)
    rows = []
    norm = prepared.bert.encoder.layers[0].attention_norm
    norm.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    logits(prepared, batch)
    assert rows == [int(batch["attention_mask"].sum())]
    plain = model.bert.encoder.layers[0].attention_norm
    plain.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    logits(model, batch)
    assert rows[1:] == [batch["attention_mask"].numel()]


def test_prediction_and_evaluation_take_a_prepared_model(complete, compression, model, batch):
    evaluate = complete.fine_tuning.evaluate
    prepared = compression.prepare_for_inference(model)
    for _ in range(2):  # the second time nothing of the first must be left
        mine, expected = evaluate(prepared, [batch]), evaluate(model, [batch])
        assert mine.loss == pytest.approx(expected.loss, rel=1e-5)
    assert type(prepared.bert).__mro__[1] is compression.SkipsPadding


def test_what_cannot_be_prepared_is_refused(compression, model):
    with pytest.raises(ValueError, match=r"training.*model.eval\(\)"):
        compression.prepare_for_inference(model.train())
    prepared = compression.prepare_for_inference(model.eval())
    with pytest.raises(ValueError, match="prepared already"):
        compression.prepare_for_inference(prepared)
    with pytest.raises(ValueError, match="train the model this one was made from"):
        prepared.train()
    with pytest.raises(ValueError, match="precision is 'int4'"):
        compression.prepare_for_inference(model, "int4")


def test_without_units_for_bfloat16_the_numbers_are_still_right(compression, model, batch):
    prepared = compression.prepare_for_inference(model, "bf16")
    full = logits(model, batch)
    assert (logits(prepared, batch) - full).norm() < 0.03 * full.norm()


@pytest.mark.parametrize(
    ("times", "picked"),
    [((1.0, 0.5), "oneDNN"), ((1.0, 0.95), "as it is"), ((2.0, 0.5), "as it is")],
)
@needs_onednn
def test_another_way_is_picked_only_if_it_is_faster(compression, monkeypatch, times, picked):
    measured = {nn.Linear: (1.0, 1.0), compression.PackedLinear: times}
    monkeypatch.setattr(compression, "times_of", lambda layer: measured[type(layer)])
    assert compression.quickest_linear(nn.Linear(8, 8), "float32") == picked


# measuring


def test_texts_for_a_latency_are_trimmed_and_come_again(compression, batch):
    one = compression.first_texts([drawn_batch(1, [3, 9]), batch], 1)
    assert one["input_ids"].shape == (1, 3) and "labels" not in one
    many = compression.first_texts([batch], 32)
    assert many["input_ids"].shape == (32, 9)
    assert torch.equal(many["input_ids"][5], batch["input_ids"][0])


def test_a_comparison_has_sizes_and_errors(compression, model, batch):
    models = {"float": model, "int8": compression.quantize_model(model)}
    rows = compression.compare(models, [batch])
    assert [row.name for row in rows] == ["float", "int8"]
    assert rows[1].size_mb < rows[0].size_mb
    right = (logits(model, batch).argmax(-1) == batch["labels"]).double().mean().item()
    assert rows[0].accuracy == right
    assert rows[0].accuracy_error == pytest.approx((right * (1 - right) / 5) ** 0.5)
    assert all(row.latency_1_p95_ms >= row.latency_1_ms > 0 for row in rows)
    header, cells = compression.comparison_cells(rows)
    assert all(len(line) == len(header) for line in cells)


def test_what_a_row_leaves_out_is_left_out_of_the_table(compression):
    header, [cells] = compression.comparison_cells([compression.Row("one", 2, 3, 4, 0.5)])
    assert cells == ["one", "2.0", "", "3.0", "4.0", "", "50.0%"]
    assert len(header) == len(cells)


def test_a_picture_has_a_disc_for_each_model(compression, model, batch):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    rows = compression.compare({"one": model, "two": model}, [batch])
    compression.plot_comparison(rows, axes)
    assert {text.get_text() for text in axes.texts} == {"one", "two"}
    assert axes.get_xscale() == "log"
