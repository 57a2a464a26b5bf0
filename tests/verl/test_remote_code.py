"""A model whose tokenizer, config and network come as Python files in its folder: loaded where the setting says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_config import run_config
from transformers import AutoModelForCausalLM

from search_r1.llm_agent.agent import load_tokenizer as load_agent_tokenizer
from verl.config import Config
from verl.engine.model import CausalLm, CausalModel
from verl.engine.saving import save_model
from verl.engine.value_model import TokenClassifier
from verl.errors import ConfigError
from verl.pretrained import load_critic_tokenizer, load_policy_tokenizer, load_tokenizer
from verl.trainer.preflight.inputs import check_sources
from verl.trainer.preflight.models import models_of

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
    assert type(check_sources(config_of(own, True, *files)).tokenizer).__name__ == "OwnTokenizer"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        check_sources(config_of(own, False, *files))


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
