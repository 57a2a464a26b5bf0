"""Files that people write: a byte order mark changes nothing, another encoding is refused."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from search_r1.data.qa.build import Contexts
from search_r1.data.qa.source_files import BadRows, read_questions
from search_r1.errors import OnlineError, SearchError
from search_r1.http.client import read_key
from search_r1.llm_agent.templates import load_template
from search_r1.rewards.judge import load_rubric
from search_r1.search.corpus import Corpus
from search_r1.search.online.deny_list import read_deny_file
from text_file import not_utf8, read_text
from verl.config import load_config
from verl.config.loading.run import load_stored_config
from verl.config.sections.schema import Config
from verl.errors import ConfigError, VerlError
from verl.tracking.tracker import settings_text

TEMPLATE = "---\ntags: {information: result}\nboxed: true\nsystem: Réponds.\n---\nÉcris: {question}\n"
RUBRIC = 'Été. {question} {targets} {answer} Reply {"score": 1}\n'
ROW = {"id": "é", "question": "Où est Oslo?", "golden_answers": ["Norvège"]}


def _questions(path: Path) -> Any:
    return list(read_questions(path, "test", BadRows()))


def _contexts(path: Path) -> Any:
    return Contexts(path, None, None, 1)._cache


def _config(path: Path) -> Any:
    return load_config("mine", config_dir=str(path.parent)).trainer.project_name


def _stored() -> str:
    return settings_text(asdict(load_config("ppo_trainer", ["trainer.project_name=été"])))


Door = tuple[str, Callable[[], str], Callable[[Path], Any]]
DOORS: dict[str, Door] = {
    "template": ("t.txt", lambda: TEMPLATE, lambda path: load_template(str(path))),
    "rubric": ("r.txt", lambda: RUBRIC, lambda path: load_rubric(str(path))),
    "deny list": ("deny.txt", lambda: "exämple.org # é\nb.org\n", lambda path: read_deny_file(str(path))),
    "jsonl": ("q.jsonl", lambda: json.dumps(ROW, ensure_ascii=False) + "\n", _questions),
    "json": ("q.json", lambda: json.dumps([ROW], ensure_ascii=False), _questions),
    "csv": ("q.csv", lambda: "question,answer\nOù est Oslo?,Norvège\n", _questions),
    "tsv": ("q.tsv", lambda: "question\tanswer\nOù est Oslo?\tNorvège\n", _questions),
    "corpus": ("c.jsonl", lambda: '{"id": "0", "contents": "\\"Été\\"\\nx"}\n', lambda path: list(Corpus(path))),
    "retrieval cache": ("c.json", lambda: '{"Où?": [{"id": "0", "contents": "x"}]}', _contexts),
    "settings": ("mine.yaml", lambda: "defaults: [ppo_trainer, _self_]\ntrainer:\n  project_name: été\n", _config),
    "stored settings": ("config.yaml", _stored, load_stored_config),
}


def _as_plain(value: Any) -> str:
    """A comparison without the path of the file, which is a template's name."""
    return repr(value) if isinstance(value, Config) else repr(value).replace("marked/", "plain/")


@pytest.mark.parametrize("door", DOORS)
def test_a_byte_order_mark_changes_nothing(door: str, tmp_path: Path) -> None:
    name, text, read = DOORS[door]
    found = []
    for folder, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_text(text(), encoding=encoding)
        found.append(_as_plain(read(path)))
    assert found[0] == found[1]
    assert "\\ufeff" not in found[1]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("door", DOORS)
def test_another_encoding_is_refused_with_file_and_place(door: str, encoding: str, tmp_path: Path) -> None:
    name, text, read = DOORS[door]
    path = tmp_path / name
    path.write_bytes(text().encode(encoding))
    with pytest.raises((VerlError, SearchError), match="UTF-8") as caught:
        read(path)
    said = str(caught.value)
    assert str(path) in said
    assert "iconv" in said
    assert encoding == "utf-16" or "line" in said


def test_a_key_may_have_a_mark_and_no_message_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("key-of-the-file\n", encoding="utf-8-sig")
    assert read_key("NONE", str(path)).reveal() == "key-of-the-file"
    path.write_bytes(b"secret-key-\xe9\n")
    with pytest.raises(OnlineError, match="UTF-8") as caught:
        read_key("NONE", str(path))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_place_of_a_byte_is_that_in_the_file(tmp_path: Path) -> None:
    """Also behind the first block, where a character is cut in two, and in a packed file."""
    text = "é" * ((1 << 19) - 1) + "x\nsecond: " + "é" * 9 + "\n"
    content = text.encode() + b"third: \xe9t\xe9"
    for name, stored in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        path = tmp_path / name
        path.write_bytes(stored)
        place = len(text.encode()) + len("third: ")
        assert f"{path}:3: not UTF-8: byte {place} of the file, on line 3" in not_utf8(path)


def test_text_with_nuls_is_utf16_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes("Question".encode("utf-16-le"))
    with pytest.raises(ConfigError, match="UTF-16"):
        read_text(path, ConfigError)


def test_a_mark_that_hides_a_package_from_hydra_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, {part: own}, _self_]\n")
    part = tmp_path / "part/own.yaml"
    part.parent.mkdir()
    part.write_text("# @package _global_\ntrainer:\n  total_epochs: 7\n")
    assert load_config("mine", config_dir=str(tmp_path)).trainer.total_epochs == 7
    part.write_bytes(codecs.BOM_UTF8 + part.read_bytes())
    with pytest.raises(ConfigError, match=r"own\.yaml: begins with a byte order mark"):
        load_config("mine", config_dir=str(tmp_path))
