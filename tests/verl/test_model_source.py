"""What a model is called and whose code runs: a folder, or a name on the hub, which is asked once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from run_config import run_config
from transformers import AutoModelForCausalLM

from search_r1.llm_agent.agent import load_tokenizer as load_agent_tokenizer
from search_r1.llm_agent.model_source import find_model
from verl.config import Config
from verl.engine.files.saving import save_model
from verl.engine.model import CausalLm, CausalModel, TokenClassifier
from verl.errors import ConfigError
from verl.pretrained import load_critic_tokenizer, load_policy_tokenizer, load_tokenizer
from verl.trainer.start_checks.inputs import check_parts
from verl.trainer.start_checks.models import models_of


class Hub(ThreadingHTTPServer):
    """Knows the model `known/model`; `down`: it breaks every connection off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.down = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing to print: connections are broken off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "model" in self.path:  # the library has questions of its own, too
            self.server.asked.append(self.path)
        if self.server.down:
            raise ConnectionAbortedError
        known = self.path.endswith("/models/known/model")
        body = b'{"id": "known/model", "siblings": []}' if known else b"{}"
        self.send_response(200 if known else 404)
        for name, value in {"Content-Type": "application/json", "X-Error-Code": "RepoNotFound"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.shutdown()
    hub.server_close()


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_taken_as_it_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in(tmp_path / "known" / "model")
    assert find_model("known/model") == "known/model" and find_model(f"{tmp_path}/known/model/")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/known/model") == str(tmp_path / "known" / "model")
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./typo", "~/typo", "a/b/c", "runs/typo", "typo/", "C:\\models", "actor/global step"]
)
def test_what_can_only_be_a_path_is_an_error_that_asks_nobody(hub: Hub, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        find_model(name)
    assert name in str(caught.value) and not hub.asked


def test_a_mistyped_path_says_how_far_it_is_right(hub: Hub, tmp_path: Path) -> None:
    model_in(tmp_path / "runs" / "mine" / "actor" / "global_step_3")
    with pytest.raises(ConfigError, match=rf"\(there is {tmp_path}/runs/mine/actor\)"):
        find_model(str(tmp_path / "runs/mine/actor/global_step_4"))
    with pytest.raises(ConfigError, match=r"no config.json\); .*actor/global_step_3 does"):
        find_model(str(tmp_path / "runs/mine"))
    with pytest.raises(ConfigError, match="this is a file"):
        find_model(str(tmp_path / "runs/mine/actor/global_step_3/config.json"))


def test_a_name_that_the_hub_knows_and_one_that_it_does_not(hub: Hub) -> None:
    assert find_model("known/model") == "known/model"
    with pytest.raises(ConfigError, match="no such folder, and the hub has no such model"):
        find_model("known/modle")
    assert len(hub.asked) == 2


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_is_down_is_asked_once(hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    hub.down = True
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=r"the hub cannot be asked \(.") as caught:
        find_model("known/model")
    assert len(hub.asked) == (0 if offline else 1) and "\n" not in str(caught.value)


def test_a_copy_in_the_cache_serves_where_the_hub_is_down(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.down = True
    repository = tmp_path / "cache" / "models--known--model"
    copy = model_in(repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    assert find_model("known/model") == str(copy)
    assert "taking the copy of known/model in the cache" in caplog.text and len(hub.asked) == 1


CODE = {
    "configuration_own.py": """
from transformers import Qwen2Config

class OwnConfig(Qwen2Config):
    model_type = "own"
""",
    "modeling_own.py": """
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2Model, Qwen2PreTrainedModel
from .configuration_own import OwnConfig

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

class OwnForTokenClassification(Qwen2PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
""",
    "tokenization_own.py": """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    "AutoModelForTokenClassification": "modeling_own.OwnForTokenClassification",
}


@pytest.fixture
def own(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' model, as if nobody else had its classes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "own"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, code in CODE.items():
        (folder / name).write_text(code)
    _update(folder / "config.json", model_type="own", auto_map=AUTO_MAP, architectures=["OwnForCausalLM"])
    names = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    _update(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=names)
    return folder


def _update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def config_of(own: Path, trust: bool, *overrides: str) -> Config:
    role = "actor_rollout_ref.model"
    paths = (f"{role}.path={own}", f"critic.model.path={own}", f"critic.model.tokenizer_path={own}")
    return run_config([*paths, f"{role}.trust_remote_code={trust}", *overrides])


LOADERS: dict[str, Callable[[Config], Any]] = {
    "policy's tokenizer": load_policy_tokenizer,
    "critic's tokenizer": load_critic_tokenizer,
    "agent's tokenizer": load_agent_tokenizer,
    "policy": lambda config: CausalLm(
        config.actor_rollout_ref.model.path,
        torch.device("cpu"),
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
    ).whole(),
    "critic": lambda config: TokenClassifier(
        config.critic.model.path, torch.device("cpu"), trust_remote_code=config.critic.model.trust_remote_code
    ).whole(),
    "shapes of policy, anchor and critic": models_of,
}


@pytest.mark.parametrize("what", LOADERS)
def test_code_runs_only_where_it_is_trusted(what: str, own: Path) -> None:
    anchor = f"actor_rollout_ref.ref.path={own}"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LOADERS[what](config_of(own, False, anchor))
    loaded = LOADERS[what](config_of(own, True, anchor))
    named = loaded[0] if isinstance(loaded, tuple) else loaded
    assert type(named).__name__ in {"OwnTokenizer", "OwnForCausalLM", "OwnForTokenClassification", "Models"}


def test_the_critic_has_a_setting_of_its_own(own: Path) -> None:
    assert config_of(own, True).critic.model.trust_remote_code
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_critic_tokenizer(config_of(own, True, "critic.model.trust_remote_code=false"))


def test_a_saved_model_has_its_code_with_it(own: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(own), True, "model.path")
    model = CausalLm(str(own), torch.device("cpu"), trust_remote_code=True).whole()
    save_model(CausalModel(model, None), tmp_path / "saved", tokenizer)
    for file in own.iterdir():
        file.unlink()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert type(load_tokenizer(str(tmp_path / "saved"), True, "model.path")).__name__ == "OwnTokenizer"


def test_preflight_loads_with_the_setting(own: Path, prompt_rows: Path) -> None:
    files = (f"data.train_files={prompt_rows}", f"data.val_files={prompt_rows}")
    files += ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert type(check_parts(config_of(own, True, *files)).tokenizer).__name__ == "OwnTokenizer"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        check_parts(config_of(own, False, *files))


@pytest.fixture
def prompt_rows(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "data_source": "nq", "prompt": [{"role": "user", "content": "Who?"}],
        "reward_model": {"ground_truth": {"target": ["x"]}},
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"
