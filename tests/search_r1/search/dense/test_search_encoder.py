"""Encoders: vectors worked out by hand, a model's files over the table, precision, packed layers, rules of families."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from search_encoders import MEAN_POOLING, WORDS, add_files, encoder, ids, save_bert, save_dpr, save_qwen3
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DPRContextEncoder,
    DPRQuestionEncoder,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

from search_r1.errors import EncoderError
from search_r1.search.dense.encoding.encoder import length_batches
from search_r1.search.dense.encoding.model import (
    PackedLinear,
    cpu_has_bfloat16,
    load_weights,
    pack_linear_layers,
    resolve_precision,
    weights_digest,
)
from search_r1.search.dense.encoding.specification import FAMILIES, EncoderSpec, ReadJson, resolve_spec

_CPU = torch.device("cpu")
_TEXTS = [" ".join(WORDS[i % 15 : i % 15 + 1 + i % 5]) for i in range(300)]


def local_json(folder: Path) -> ReadJson:
    """Reads the JSON files of a model folder, None where there is none."""
    return lambda name: json.loads((folder / name).read_text()) if (folder / name).is_file() else None


def _hidden(folder: Path, words: str) -> torch.Tensor:
    """Hidden states [L, D] of one text, ids looked up by hand, no padding."""
    with torch.no_grad():
        return AutoModel.from_pretrained(folder)(torch.tensor([[2, *ids(words), 3]])).last_hidden_state[0]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
def test_vectors_are_those_worked_out_by_hand(model_dir: Path, pooling: str) -> None:
    reduce = {
        "mean": lambda hidden_LD: hidden_LD.mean(0),
        "cls": lambda hidden_LD: hidden_LD[0],
        "max": lambda hidden_LD: hidden_LD.amax(0),
        "lasttoken": lambda hidden_LD: hidden_LD[-1],
    }[pooling]
    texts = ["river", "capital of the country tarsia"]  # different lengths: the first one is padded
    vectors = encoder(model_dir, pooling=pooling).encode_queries(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (2, 32)
    for text, vector in zip(texts, vectors, strict=True):
        expected = reduce(_hidden(model_dir, "query : " + text))
        np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=2e-6)


def test_passage_prefix_and_cut(model_dir: Path) -> None:
    loaded = encoder(model_dir)
    (vector,) = loaded.encode_passages(["anna velt paints the river"], max_tokens=7)
    expected = _hidden(model_dir, "passage : anna velt paints").mean(0)  # 7 tokens with [CLS] and [SEP]
    np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=2e-6)
    long = loaded.encode_passages(["river " * 500])  # longer than the model's 24 positions
    assert np.isfinite(long).all()
    assert loaded.encode_queries([]).shape == (0, 32)


def test_batches_are_bounded_by_their_padded_tokens() -> None:
    assert length_batches([5, 2, 9, 2, 3], max_tokens=9, overhead_tokens=2) == [[1, 3, 4], [0], [2]]
    assert length_batches([4, 4, 4, 40], max_tokens=8) == [[0], [1, 2], [3]]
    assert length_batches([1, 2, 1, 1], max_tokens=8, max_texts=2) == [[0], [2, 3], [1]]
    assert length_batches([], max_tokens=8) == []


def test_padding_is_weighed_against_one_more_batch() -> None:
    lengths = [10, 10, 11, 40]
    assert length_batches(lengths, 1000, overhead_tokens=0) == [[0, 1], [2], [3]]
    assert length_batches(lengths, 1000, overhead_tokens=5) == [[0, 1, 2], [3]]  # 73 + 2 x 5 < 71 + 3 x 5
    assert length_batches(lengths, 1000, overhead_tokens=100) == [[0, 1, 2, 3]]  # 160 + 100 < 73 + 2 x 100


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 12), st.integers(9, 40))
def test_no_other_batches_cost_less(lengths: list[int], overhead: int, limit: int) -> None:
    def cost(batches: list[list[int]]) -> int:
        return sum(len(batch) * max(lengths[i] for i in batch) + overhead for batch in batches)

    found = length_batches(lengths, limit, overhead)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(lengths)]
        batches = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(len(batch) * lengths[batch[-1]] <= limit for batch in batches):
            assert cost(found) <= cost(batches)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_vector_depends_on_its_batch_by_rounding_only(
    model_dir: Path, precision: str, tolerance: float, num_threads: int
) -> None:
    loaded = encoder(model_dir, precision=precision, num_threads=num_threads)
    together = loaded.encode_queries(_TEXTS)
    alone = np.concatenate([loaded.encode_queries([text]) for text in _TEXTS[:40]])
    np.testing.assert_allclose(together[:40], alone, atol=tolerance)
    np.testing.assert_allclose(loaded.encode_queries(_TEXTS[::-1])[::-1], together, atol=tolerance)


def test_bfloat16_is_close_to_float32(model_dir: Path) -> None:
    exact = encoder(model_dir).encode_queries(_TEXTS)
    rounded = encoder(model_dir, precision="bfloat16")
    assert rounded.precision == "bfloat16"
    vectors = rounded.encode_queries(_TEXTS)
    assert vectors.dtype == np.float32 and not np.array_equal(vectors, exact)
    assert (vectors * exact).sum(1).min() > 0.995
    assert rounded.fingerprint == encoder(model_dir).fingerprint


def test_precision_follows_the_hardware() -> None:
    assert resolve_precision("float32", _CPU) == torch.float32
    fast = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert resolve_precision("auto", _CPU) == resolve_precision("half", _CPU) == fast
    assert resolve_precision("half", torch.device("cuda")) == torch.float16
    with pytest.raises(EncoderError, match="float16 needs a GPU"):
        resolve_precision("float16", _CPU)
    with pytest.raises(EncoderError, match="'int8' is not one of"):
        resolve_precision("int8", _CPU)


def test_dpr_has_two_encoders_and_reads_titles_as_pairs(tmp_path: Path) -> None:
    passages = save_dpr(tmp_path / "passages", DPRContextEncoder, seed=1)
    questions = save_dpr(tmp_path / "questions", DPRQuestionEncoder, seed=2)
    (vector,) = encoder(passages, "dpr").encode_passages(['"morn"\nmorn is a city'])
    pair = torch.tensor([[2, *ids("morn"), 3, *ids("morn is a city"), 3]])
    with torch.no_grad():
        expected = DPRContextEncoder.from_pretrained(passages)(pair).pooler_output[0].numpy()
    np.testing.assert_allclose(vector, expected, atol=1e-5)
    assert abs(float(np.linalg.norm(vector)) - 1.0) > 0.1, "not normalised"

    (vector,) = encoder(questions, "dpr").encode_queries(["the river"])
    with torch.no_grad():
        found = DPRQuestionEncoder.from_pretrained(questions)(torch.tensor([[2, *ids("the river"), 3]]))
    np.testing.assert_allclose(vector, found.pooler_output[0].numpy(), atol=1e-5)
    with pytest.raises(EncoderError, match="DPRQuestionEncoder cannot encode passages"):
        encoder(questions, "dpr").encode_passages(["x"])
    with pytest.raises(EncoderError, match="DPRContextEncoder cannot encode queries"):
        encoder(passages, "dpr").encode_queries(["x"])


def test_qwen3_takes_the_last_token_after_an_end_token(tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path)
    loaded = encoder(folder, "qwen3")
    texts = ["river morn", "anna velt paints the capital of tarsia"]
    vectors = loaded.encode_passages(texts)
    model = Qwen3Model.from_pretrained(folder)
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([[*ids(text), 3]])).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=1e-5)
    cut = loaded.encode_passages(["river morn tarsia city"], max_tokens=3)  # the end token survives the cut
    np.testing.assert_allclose(cut, loaded.encode_passages(["river morn"]), atol=1e-5)
    assert loaded.encode_passages([""]).shape == (1, 32)


def test_a_checkpoint_that_lacks_weights_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """The library would fill them at random, with a warning nobody reads."""
    folder = save_dpr(tmp_path / "m", DPRContextEncoder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["DPRQuestionEncoder"]}))
    with pytest.raises(EncoderError, match="lacks .* weights of DPRQuestionEncoder"):
        load_weights(str(folder), "pooler")
    bare = Path(shutil.copytree(model_dir, tmp_path / "bare"))
    from safetensors.torch import load_file, save_file

    tensors = load_file(bare / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if not k.startswith("pooler")}, bare / "model.safetensors", {"format": "pt"}
    )
    load_weights(str(bare), "mean")
    with pytest.raises(EncoderError, match="lacks 2 weights"):
        load_weights(str(bare), "pooler")


def test_pytorch_files_are_read_when_there_is_nothing_else(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert weights_digest(load_weights(str(folder), "mean")) == weights_digest(model)


def test_remote_code_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    remote = {"model_type": "elsewhere", "auto_map": {"AutoConfig": "c.C", "AutoModel": "c.M"}}
    (folder / "config.json").write_text(json.dumps(config | remote))
    (folder / "c.py").write_text("raise SystemExit('ran')")
    with pytest.raises(EncoderError, match="cannot load"):
        encoder(folder)


def test_non_finite_weights_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[ids("river")[0]] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(EncoderError, match="NaN or Inf"):
        encoder(folder).encode_queries(["river"])


def test_the_models_own_files_win_over_the_table(tmp_path: Path) -> None:
    cls = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    add_files(tmp_path, cls, prompts={"query": "Q ", "document": "D "}, normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    assert resolve_spec("e5", local_json(tmp_path)) == EncoderSpec("cls", False, "Q ", "D ", 99, 99, 99)
    add_files(tmp_path, {"pooling_mode": "lasttoken"}, prompts={"query": "", "document": ""})
    spec = resolve_spec("E5", local_json(tmp_path))
    assert (spec.pooling, spec.normalize, spec.query_prefix) == ("lasttoken", True, "query: ")
    assert resolve_spec("bge", local_json(tmp_path), pooling="mean").pooling == "mean"


def test_the_path_decides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "e5-bge-dpr"
    folder.mkdir()
    assert resolve_spec("gte", local_json(folder)) == FAMILIES["gte"]
    with pytest.raises(EncoderError, match="'mine' is not a known encoder family"):
        resolve_spec("mine", local_json(folder))
    add_files(folder, MEAN_POOLING)
    assert resolve_spec("mine", local_json(folder)).query_prefix == ""


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "exactly one of"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        (MEAN_POOLING | {"include_prompt": False}, "include_prompt"),
    ],
)
def test_poolings_that_are_not_supported_are_errors(tmp_path: Path, pooling: dict, message: str) -> None:
    add_files(tmp_path, pooling)
    with pytest.raises(EncoderError, match=message):
        resolve_spec("e5", local_json(tmp_path))


def test_a_dense_layer_after_pooling_is_refused(tmp_path: Path) -> None:
    add_files(tmp_path, MEAN_POOLING)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(EncoderError, match="Dense"):
        resolve_spec("e5", local_json(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {"0": {}}, "modules.json: the whole file: Input should be a valid list"),
        ("modules.json", [{"path": ""}], r"modules.json: 0.type: Field required"),
        ("1_Pooling/config.json", ["mean"], "1_Pooling/config.json: the whole file"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "sentence_bert_config.json: max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "sentence_bert_config.json: max_seq_length"),
        ("config_sentence_transformers.json", ["query: "], "config_sentence_transformers.json: the whole file"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts.query: .*fetch the encoder's files"),
    ],
)
def test_a_file_of_another_shape_is_told(tmp_path: Path, name: str, content: object, message: str) -> None:
    add_files(tmp_path, MEAN_POOLING)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(EncoderError, match=message):
        resolve_spec("e5", local_json(tmp_path))


def test_tokens_that_are_numbered_from_behind_the_padding_on_are_as_many_as_there_are_positions(tmp_path: Path) -> None:
    """RoBERTa has positions that it never uses; a tokenizer without model_max_length knows nothing of it."""
    folder = save_bert(tmp_path)
    config = RobertaConfig(**json.loads((folder / "config.json").read_text()) | {"pad_token_id": 3})
    RobertaModel(config).save_pretrained(folder)
    found = encoder(folder)
    assert found.longest == config.max_position_embeddings - 3 - 1
    assert found.encode_passages(["river " * 100]).shape == (1, 32)
    with pytest.raises(EncoderError, match="at most 20 tokens"):
        found.encode_passages(["river"], max_tokens=24)


def test_an_encoder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="nowhere"):
        encoder(tmp_path / "nowhere")


def test_a_model_without_the_files_of_its_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """The library would make a tokenizer to which every word is unknown, and the index would be worthless."""
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(EncoderError, match="no vocabulary.*tokenizer.json"):
        encoder(folder)


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors", _POINTER, "the weights of .* are damaged, or not whole"),
        ("pytorch_model.bin", _POINTER, "something else than tensors"),
        ("pytorch_model.bin", "", "EOFError"),
        ("tokenizer.json", "[]", "cannot load the model"),
        ("modules.json", "[{", "modules.json cannot be read"),
    ],
)
def test_a_damaged_file_of_a_model_is_told(model_dir: Path, tmp_path: Path, file: str, text: str, message: str) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    if file == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(text)
    with pytest.raises(EncoderError, match=message):
        encoder(folder)


def test_weights_that_cannot_be_read_are_not_missing(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(EncoderError, match=r"m/model.safetensors cannot be read"):
        encoder(folder)


def test_weights_of_another_size_than_the_config_says_are_told(model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(EncoderError, match="cannot load the model"):
        encoder(folder)


# --- packed linear layers


needs_bf16 = pytest.mark.skipif(not cpu_has_bfloat16(), reason="this CPU has no bfloat16, so encoders run in float32")


@needs_bf16
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (3, 7, 48), (2, 200, 48)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@torch.inference_mode()
def test_values_are_those_of_the_definition(shape: tuple[int, ...], bias: bool, activation: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(shape, dtype=torch.bfloat16)
    expected = inputs.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    if activation == "gelu":
        expected = expected * 0.5 * (1 + torch.erf(expected / 2**0.5))
    found = PackedLinear(linear, activation)(inputs)  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    # one rounding to bfloat16 and the float32 sums before it; the GELU by tanh would differ by 4e-4
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


@needs_bf16
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@torch.inference_mode()
def test_a_packed_bert_computes_the_same(activation: str) -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2,
        hidden_act=activation, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = BertModel(config).eval()
    packed = BertModel(config).eval()
    packed.load_state_dict(plain.state_dict())
    packed.bfloat16()
    assert not pack_linear_layers(plain)  # of float32
    assert pack_linear_layers(packed)
    assert not [module for module in packed.modules() if type(module) is torch.nn.Linear]
    ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    found = packed(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    expected = plain(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=0, atol=0.04)  # of values of size 1
