"""The shell scripts: they parse, check their input before anything starts, and pass arguments through."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from documented_commands import Checkout, Command, all_commands

from search_r1.http.client import is_loopback
from verl.config import Config, check_supported, load_config, load_config_from_argv
from verl.config.rules.rewards import with_format_reward
from verl.engine.files.loading import policy_shape
from verl.planning.dry_run.device import sampled_at_once
from verl.planning.dry_run.place import located, parse_gpus
from verl.planning.dry_run.run import dry_run as dry_run_of
from verl.trainer.dry_run import main as dry_run
from verl.trainer.plan import parse as parse_plan
from verl.trainer.preflight import main as preflight

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = re.compile(
    r"(?:--(?:output|output_dir|save_path|save_dir|local_dir|details)[ =]|default_local_dir[=:] ?|run_dir:-"
    r"|\"--(?:output|folder|save_dir)\",(?: type=Path,)? default=(?:Path\()?)\"?([a-z]\w*[/.][\w./${}-]*)"
)
"""A path that a command of ours writes to, as scripts, configs and pages name it."""
SHAPES = ROOT / "tests/verl/trainer/shapes"  # config.json of published models
LAUNCHERS = [*ROOT.glob("example/**/*.sh"), *ROOT.glob("search_r1/**/*.sh")]
SCRIPTS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/**/*.sh"), *LAUNCHERS, ROOT / ".ci" / "run"])
ON_SEVERAL_NODES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("example/multinode/*.sh"))
TRAINERS = ["train_grpo.sh", "train_grpo_ema_pg.sh", "train_ppo.sh", *ON_SEVERAL_NODES]
SETTINGS = {
    "DATA_DIR", "TRAIN_DATA_DIR", "TEST_DATA_DIR", "BASE_MODEL", "EXPERIMENT_NAME", "WAND_PROJECT", "WANDB_PROJECT",
    "N_GPUS", "N_NODES", "TRAINER", "RAY_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RUNTIME_ENV",
}  # fmt: skip


def run(script: str, *arguments: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    command = ["bash", str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("scripts"))


def started(checkout: Checkout, script: str, *arguments: str, **settings: str) -> list[str]:
    """The arguments that the script starts its trainer with."""
    return checkout.rehearse(Command(script, ("bash", script, *arguments), settings))[-1].arguments


Composed = Callable[..., Config]


@pytest.fixture(scope="module")
def composed(checkout: Checkout) -> Composed:
    """The configuration that a script asks for, with further arguments and with settings."""

    def compose(script: str, *arguments: str, **settings: str) -> Config:
        given = started(checkout, script, *arguments, "--cfg", "job", **settings)  # for which no file need be there
        assert given[-2:] == ["--cfg", "job"]
        return load_config_from_argv(given[:-2])

    return compose


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A folder with train.parquet and test.parquet."""
    row = {"data_source": "nq", "prompt": [{"role": "user", "content": "Who?"}], "ability": "fact-reasoning"}
    row |= {"reward_model": {"style": "rule", "ground_truth": {"target": ["x"]}}, "extra_info": {"index": 0}}
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_parses_and_stops_at_the_first_error(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, timeout=30).returncode == 0
    sourced = path.name.endswith("_common.sh")
    assert sourced or "set -euo pipefail" in path.read_text()


def test_ci_runs_the_command_of_the_readme() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "bash scripts/test.sh"
    assert "bash scripts/test.sh" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("script", TRAINERS)
def test_missing_prompt_file_is_named_before_anything_starts(script: str, tmp_path: Path) -> None:
    result = run(script, DATA_DIR=str(tmp_path / "nowhere"))
    assert result.returncode == 2
    assert f"{tmp_path}/nowhere/train.parquet does not exist" in result.stderr
    assert "DATA_DIR" in result.stderr


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("BASE_MODEL", "./no_such_model", "no config.json"),
        ("N_GPUS", "many", "N_GPUS=many is not a number"),
        ("EXPERIMENT_NAME", "a/b", "letters, digits"),
        ("TRAINER", "main_ppo", "TRAINER=main_ppo is not"),
        ("TEST_DATA_DIR", "/no/such/folder", "/no/such/folder/test.parquet does not exist"),
    ],
)
def test_unusable_setting_is_named(setting: str, value: str, message: str, prompts: Path) -> None:
    result = run("train_grpo.sh", **{"DATA_DIR": str(prompts), setting: value})
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("script", TRAINERS)
def test_what_a_script_asks_for_is_there_and_later_arguments_win(script: str, composed: Composed) -> None:
    """Without data and without a model."""
    config = composed(script, "trainer.total_training_steps=20", "+trainer.val_before_train=false", N_GPUS="4")
    assert (config.trainer.total_training_steps, config.trainer.val_before_train) == (20, False)
    assert (config.trainer.n_gpus_per_node, config.data.train_batch_size) == (4, 512)
    assert list(config.trainer.logger) == ["console", "wandb"], "the log has a line of each step"
    assert config.trainer.nnodes == (4 if script in ON_SEVERAL_NODES else 1)
    check_supported(composed(script))


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
@pytest.mark.parametrize("script", ["train_grpo.sh", "scripts/nq_hotpotqa/evaluate.sh"])
def test_hydras_names_of_the_run_folder_work_with_the_scripts(script: str, key: str, composed: Composed) -> None:
    trainer = composed(script, f"{key}=/runs/mine").trainer
    assert (trainer.default_local_dir, trainer.experiment_name) == ("/runs/mine", "mine")


def test_evaluate_validates_greedily_and_trains_nothing(prompts: Path, composed: Composed) -> None:
    (prompts / "train.parquet").unlink()
    script = "scripts/nq_hotpotqa/evaluate.sh"
    config = composed(script, "max_turns=2", DATA_DIR=str(prompts), BASE_MODEL="org/model")
    assert config.trainer.val_only is True and config.max_turns == 2
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False
    assert config.actor_rollout_ref.model.path == "org/model"
    assert config.data.val_files == f"{prompts}/test.parquet" and config.data.val_data_num is None
    missing = run(script, DATA_DIR="/no/such/folder")
    assert missing.returncode == 2 and "/no/such/folder/test.parquet does not exist" in missing.stderr


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/model", "model"),
        ("/runs/first/actor/global_step_20/", "first-global_step_20"),
        ("/runs/first/global_step_3", "first-global_step_3"),
    ],
)
def test_each_model_is_evaluated_in_a_folder_of_its_own(model: str, name: str, composed: Composed) -> None:
    """And a comma in the data's folder separates nothing."""
    for arguments, settings in (((f"actor_rollout_ref.model.path={model}",), {}), ((), {"BASE_MODEL": model})):
        config = composed("scripts/nq_hotpotqa/evaluate.sh", *arguments, DATA_DIR="/d/a,b", **settings)
        assert config.trainer.default_local_dir == f"verl_checkpoints/evaluate-nq_hotpotqa-{name}"
        assert config.data.train_files == config.data.val_files == "/d/a,b/test.parquet"


@pytest.mark.parametrize("name", ["a,b=(c)", "d'\u00e9 #1 & {x}", "2024_01_01", "[y]"])
def test_names_and_folders_are_taken_as_they_are_written(name: str) -> None:
    printed = run("train_grpo.sh", "--cfg", "job", DATA_DIR=f"/d/{name}", BASE_MODEL=f"/m/{name}", WAND_PROJECT=name)
    assert printed.returncode == 0, printed.stderr
    tree = yaml.safe_load(printed.stdout)
    assert tree["data"]["train_files"] == f"/d/{name}/train.parquet"
    assert (tree["actor_rollout_ref"]["model"]["path"], tree["trainer"]["project_name"]) == (f"/m/{name}", name)


def test_settings_reach_the_configuration(prompts: Path) -> None:
    """As the trainer itself prints it."""
    settings = {"BASE_MODEL": "org/model", "EXPERIMENT_NAME": "mine", "WANDB_PROJECT": "ours"}
    printed = run("train_grpo.sh", "--cfg", "job", DATA_DIR=str(prompts), **settings)
    assert printed.returncode == 0, printed.stderr
    tree = yaml.safe_load(printed.stdout)
    assert tree["data"]["train_files"] == f"{prompts}/train.parquet"
    assert tree["data"]["val_files"] == f"{prompts}/test.parquet"
    assert tree["actor_rollout_ref"]["model"]["path"] == "org/model"
    assert tree["trainer"]["project_name"] == "ours"
    assert tree["trainer"]["default_local_dir"] == "verl_checkpoints/mine"


def test_the_entry_point_is_a_setting(prompts: Path, checkout: Checkout) -> None:
    settings = {"DATA_DIR": str(prompts), "BASE_MODEL": "org/model", "TRAINER": "verl.trainer.main_ppo_format"}
    [call] = checkout.rehearse(Command("", ("bash", "train_grpo.sh", "max_turns=3"), settings))
    assert call.words[1:3] == ("-m", "verl.trainer.main_ppo_format")
    assert with_format_reward(load_config_from_argv(call.arguments)).max_turns == 3


def test_a_train_script_can_ask_whether_its_settings_fit(
    prompts: Path, tiny_model_dir: Path, checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run that it starts says yes; preflight says no, which is the script's exit status."""
    settings = {"DATA_DIR": str(prompts), "BASE_MODEL": str(tiny_model_dir), "EXPERIMENT_NAME": "asked"}
    given = ("train_ppo.sh", "reward_model.retrieval_score=0.1", "--gpus")
    assert dry_run(started(checkout, *given, "8x80", TRAINER="verl.trainer.dry_run", **settings)) == 0
    fits = capsys.readouterr().out
    refused = run(*given, "8x1", "--estimate_only", cwd=prompts, TRAINER="verl.trainer.preflight", **settings)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    for printed, level in ((fits, "ok"), (refused.stdout, "FAIL")):
        verdict = next(line for line in printed.splitlines() if "fit" in line)
        assert verdict.split()[0] == level and "critic's update" in printed
    for folder in (prompts, checkout.folder):
        assert not (folder / "asked.log").exists(), "the log of a training run stays as it is"


@pytest.mark.parametrize("script", ["train_grpo.sh", *ON_SEVERAL_NODES])
def test_the_planner_is_told_which_settings_are_the_user_s(script: str, prompts: Path, checkout: Checkout) -> None:
    """A script's own may change, those of a script that sources another one too; the trainer gets no mark."""
    settings = {"DATA_DIR": str(prompts), "BASE_MODEL": str(SHAPES / "Qwen2.5-7B")}
    own = ("max_turns=3", "--gpus", "4x8x80")
    words = started(checkout, script, *own, TRAINER="verl.trainer.plan", **settings)
    parsed, changeable, kept = parse_plan(words)
    assert parsed.gpus == "4x8x80" and kept == ["max_turns=3"] and words.count("--") == 1
    share = [word for word in changeable if word.startswith("actor_rollout_ref.rollout.gpu_memory_utilization=")]
    assert len(share) == (2 if script in ON_SEVERAL_NODES else 1), "of the common settings, and of the script's own"
    trained = started(checkout, script, *own[:1], "--cfg", "job", **settings)
    assert "--" not in trained and trained[-3:] == ["max_turns=3", "--cfg", "job"]


@pytest.mark.parametrize(
    ("script", "model", "at_once", "share"),
    [
        ("train_grpo.sh", "Qwen2.5-3B", 242, 320),
        ("train_grpo.sh", "Qwen2.5-7B", 121, 320),
        ("example/multinode/train_grpo_multinode_32b.sh", "Qwen2.5-32B", 59, 160),
        ("example/multinode/train_grpo_ema_pg_multinode_32b.sh", "Qwen2.5-32B", 59, 160),
        ("example/multinode/train_ppo_multinode_32b.sh", "Qwen2.5-32B", 32, 32),
        ("example/multinode/train_grpo_multinode_72b.sh", "Qwen2.5-72B", 84, 320),
    ],
)
def test_no_script_starves_the_sampler(script: str, model: str, at_once: int, share: int, composed: Composed) -> None:
    """By the arithmetic on docs/preflight.md; whether it fits is the dry run's to say."""
    place = parse_gpus("4x8x80" if script in ON_SEVERAL_NODES else "8x80")
    config = located(composed(script, f"actor_rollout_ref.model.path={SHAPES / model}"), place)
    found = sampled_at_once(config, policy_shape(config), place)
    assert (found.number, found.share) == (at_once, share) and not found.starves


@pytest.mark.parametrize("script", ON_SEVERAL_NODES)
def test_a_script_for_several_nodes_asks_for_a_cluster(script: str, prompts: Path, composed: Composed) -> None:
    assert composed(script, N_NODES="2").trainer.nnodes == 2
    result = run(script, DATA_DIR=str(prompts))
    assert result.returncode == 2 and "RAY_DASHBOARD_ADDRESS=http://HEAD:8265" in result.stderr
    assert "N_NODES=few is not a number" in run(script, DATA_DIR=str(prompts), N_NODES="few").stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ON_SEVERAL_NODES)
def test_a_script_for_several_nodes_fits_the_cluster_that_it_is_for(
    script: str, prompts: Path, checkout: Checkout, composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own model's shape: on 4 x 8 GPUs of 80 GB with room, and on 4 x 8 of 40 GB not."""
    [name] = re.findall(r"BASE_MODEL_DEFAULT=Qwen/(\S+)", (ROOT / script).read_text())
    settings = {"DATA_DIR": str(prompts), "BASE_MODEL": str(SHAPES / name), "TRAINER": "verl.trainer.preflight"}
    assert preflight(started(checkout, script, "--estimate_only", "--gpus", "4x8x80", **settings)) == 0
    printed = capsys.readouterr().out
    verdict = next(line for line in printed.splitlines() if "fit" in line)
    assert verdict.split()[0] == "ok" and re.search(r"o[fn] 4 x 8 GPUs", printed), printed
    small = composed(script, BASE_MODEL=settings["BASE_MODEL"])
    assert dry_run_of(small, parse_gpus("4x8x40"), advise=False).level == "FAIL"  # advice: several dry runs more


@pytest.fixture
def submitted(prompts: Path, tmp_path: Path) -> Callable[..., tuple[list[str], str]]:
    """What `ray` is called with by a script in the folder of the prompts, behind two variables; and what is printed."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    noted = tmp_path / "noted"
    ray = tmp_path / ".venv/bin/ray"
    seen = '"${RAY_ADDRESS-none}" "${RAY_RUNTIME_ENV_IGNORE_GITIGNORE-none}"'
    ray.write_text(f"#!/bin/bash\nprintf '%s\\n' {seen} \"$@\" > {noted}\n")
    ray.chmod(0o755)
    names = ("DATA_DIR", "BASE_MODEL", "EXPERIMENT_NAME")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {f"{name}_DEFAULT": "x" for name in names} | {"EXPERIMENT_NAME": "mine"}
    environment |= {"RAY_DASHBOARD_ADDRESS": "http://head:8265", "RAY_ADDRESS": "other:6379"}

    def submit(**variables: str) -> tuple[list[str], str]:
        command = f"source {shlex.quote(f'{ROOT}/scripts/train_common.sh')}; ROOT={tmp_path}; train a=1 -- b=2"
        given = environment | variables
        done = subprocess.run(["bash", "-ec", command], cwd=prompts, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return noted.read_text().splitlines(), done.stdout + done.stderr

    return submit


@pytest.mark.parametrize("nodes", ["4", ""])
def test_a_run_is_submitted_to_the_cluster_with_its_folder(
    nodes: str, prompts: Path, tmp_path: Path, submitted: Callable[..., tuple[list[str], str]]
) -> None:
    """The job starts in the caller's folder, with this checkout, whether or not the script is for several nodes."""
    words, printed = submitted(N_NODES_DEFAULT=nodes)
    assert words[0] == "none", "Ray would prefer RAY_ADDRESS"
    assert words[2:5] == ["job", "submit", "--address=http://head:8265"]
    assert words[5].startswith("--submission-id=mine-")
    entry = words[words.index("--") + 1 :]
    assert entry[:3] == ["env", "-C", str(prompts)] and f"PYTHONPATH={ROOT}:{prompts}" in entry[3]
    assert entry[-4:] == ["-m", "verl.trainer.main_ppo", "a=1", "b=2"]
    job = words[5].removeprefix("--submission-id=")
    follow = f"env -u RAY_ADDRESS {tmp_path}/.venv/bin/ray job logs --address=http://head:8265 --follow {job}"
    assert follow in printed


@pytest.mark.parametrize("runtime_env", ["", "own.yaml"])
def test_a_submitted_run_has_the_variables_for_libraries(
    runtime_env: str, submitted: Callable[..., tuple[list[str], str]]
) -> None:
    """Of where it is submitted, which its driver passes on to its workers; secrets stay there."""
    given = {"NCCL_IB_HCA": "mlx5_0, mlx5_1", "FI_PROVIDER": "efa", "VERL_WORKER_LOGS": "1", "WANDB_ENTITY": "it's us"}
    kept = {"HF_TOKEN": "hidden", "WANDB_API_KEY": "hidden", "VLLM_HOST_IP": "10.0.0.9", "OTHER": "hidden"}
    words, printed = submitted(**given, **kept, RUNTIME_ENV=runtime_env)
    entry = words[words.index("--") + 1 :]
    variables = entry[: next(place for place, word in enumerate(entry) if "python" in Path(word).name)]
    assert entry[0] == "env" and {f"{name}={value}" for name, value in given.items()} <= set(variables)
    assert not any(word.startswith(tuple(f"{name}=" for name in kept)) for word in words)
    assert "hidden" not in printed + "".join(words)
    assert words[1] == ("1" if runtime_env else "none"), "a user's modules, which git ignores, go along"


def test_what_a_user_adds_to_the_clone_goes_with_a_job(tmp_path: Path) -> None:
    """And neither data nor what our commands write."""
    left_out = yaml.safe_load((ROOT / "verl/trainer/runtime_env.yaml").read_text())["excludes"]
    subprocess.run(["git", "init", "-q", tmp_path], timeout=60, check=True)
    (tmp_path / ".gitignore").write_text("\n".join(left_out))
    large = "data models runs checkpoints my_runs/checkpoints results indexes verl_checkpoints .venv-2 .ruff_cache"
    paths = {*(f"{folder}/a" for folder in large.split()), ".venv", "nq.log", "corpus.jsonl", "verl/__pycache__/a"}
    goes = {"mine/reward.py", "my_env.py", "search_r1/data/model.py", "verl/run/folder.py", "configs/tinywiki.yaml"}
    assert ignored(*paths, *goes, root=tmp_path) == paths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "say head, or the address"), (("here",), "neither head nor an address"), (("head",), "there is no token")],
)
def test_a_node_of_a_cluster_that_cannot_start_says_why(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run("scripts/cluster/ray_node.sh", *arguments, HOME=str(tmp_path), RAY_AUTH_TOKEN="")
    assert result.returncode == 2 and message in result.stderr


def test_ray_is_started_by_a_path_without_a_space_whatever_the_folder_is_called(tmp_path: Path) -> None:
    """It starts a part of the head by a line of bash that does not quote the interpreter's path."""
    folder = tmp_path / "a folder"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts" / "cluster").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/cluster/ray_node.sh", folder / "scripts/cluster")
    for name in ("python", "ray"):
        program = folder / ".venv" / "bin" / name
        program.write_text(
            '#!/bin/sh\necho "$0" "$@"\n[ "$(readlink -f "$0")" = "$PWD/.venv/bin/python" ] && echo same\n'
        )
        program.chmod(0o755)
    done = run(str(folder / "scripts/cluster/ray_node.sh"), "10.0.0.1:6379", RAY_AUTH_TOKEN="x" * 32)
    called, same = done.stdout.splitlines()
    assert re.fullmatch(
        r"/proc/\d+/cwd/.venv/bin/python .venv/bin/ray start --block .* --address=10.0.0.1:6379", called
    )
    assert same == "same"


def test_ema_pg_settings(composed: Composed) -> None:
    config = composed("train_grpo_ema_pg.sh")
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    assert actor.kl_loss_type == "full_reverse"
    assert list(actor.optim.betas) == [0.9, 0.95]
    assert (algorithm.ref_policy_ema_tau, algorithm.ref_policy_ema_update_period) == (0.9, 10)
    assert (actor.kl_topk_tokens, actor.use_kl_iw, actor.kl_topk_gradient) == (32, True, "corrected")
    assert actor.clip_ratio_high == 0.28
    assert config.max_turns == 4


def test_ppo_settings(composed: Composed) -> None:
    config = composed("train_ppo.sh", BASE_MODEL="org/model")
    assert (config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward) == ("gae", True)
    assert config.critic.model.path == config.actor_rollout_ref.model.path == "org/model"


def test_ppo_without_a_model_names_the_critic_and_logs_it(prompts: Path) -> None:
    settings = {"DATA_DIR": ".", "EXPERIMENT_NAME": "mine", "BASE_MODEL": "org/model", "HF_HUB_OFFLINE": "1"}
    result = run("train_ppo.sh", cwd=prompts, **settings)
    assert result.returncode == 2, "the exit status is the trainer's, not tee's"
    assert "error: algorithm.adv_estimator=gae needs a critic, and critic.model.path=org/model is" in result.stdout
    assert "critic.model.path=org/model" in (prompts / "mine.log").read_text()
    assert "Traceback" not in result.stdout


def test_paths_and_modules_are_those_of_the_callers_folder(prompts: Path) -> None:
    """Except `verl`, which is this checkout's whatever else has that name there."""
    (prompts / "mine").mkdir()
    for package in ("verl", "my_rewards"):
        (prompts / "mine" / f"{package}.py").write_text("raise SystemExit('mine: ' + __name__)")
    arguments = (
        "train_grpo.sh",
        "reward.function=my_rewards.Score",
        "trainer.default_local_dir=run",
        "trainer.logger=[]",
    )
    settings = {
        "DATA_DIR": "..",
        "EXPERIMENT_NAME": "mine",
        "BASE_MODEL": str(ROOT / "tests/verl/trainer/shapes/Llama-3.2-3B"),
    }
    result = run(*arguments, cwd=prompts / "mine", **settings)
    assert "mine: my_rewards" in result.stdout, "the data folder was found, and the module"
    assert (prompts / "mine" / "mine.log").is_file()


def test_unknown_option_of_setup_is_an_error() -> None:
    result = run("scripts/setup.sh", "--fast")
    assert result.returncode == 1
    assert "unknown option '--fast'" in result.stderr


FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  *sysconfig*) echo "$INCLUDE" ;;
  "-m venv "*) mkdir -p "$3/bin" && for name in python ruff lint-imports; do cp "$0" "$3/bin/$name"; done ;;
  *"import vllm"*) [ -z "$VLLM_ERROR" ] || { printf 'Traceback\\n%s\\n' "$VLLM_ERROR" >&2; exit 1; } ;;
  *is_available*) echo "$CUDA" ;;
  -V) echo Python 3.12.3 ;;
  "-m pytest "*--last-failed*) exit "$AGAIN" ;;
  "-m pytest "*"${FAILING:-none}"*) exit 1 ;;
  *"-r .venv/.pins/part.${UNINSTALLABLE:-none}"*) echo "ERROR: No matching distribution"; exit 1 ;;
esac
"""
"""In place of an interpreter with packages: notes how it is called."""


@pytest.fixture
def gpu_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on a machine with GPUs, where driver, interpreter and installation are stand-ins."""
    clone, tools = tmp_path / "clone", tmp_path / "tools"
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", clone)
    (clone / "retrieval_launch.sh").write_text("sleep 60")
    tools.mkdir()
    smi = '#!/bin/sh\n[ -z "$NO_DEVICE" ] || exit 9\necho $DRIVER\necho $DRIVER\n'
    df = "#!/bin/sh\necho Filesystem\necho disk 0 0 $((FREE_GB * 1048576)) 0% /\n"
    for name, text in {"nvidia-smi": smi, "python": FAKE_PYTHON, "df": df}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    values = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "CC": "sh",
        "DRIVER": "580.65.06",
        "FREE_GB": "100",
    }
    values |= {"INCLUDE": str(tmp_path / "include"), "CUDA": "True", "CALLS": str(tmp_path / "calls"), "VLLM_ERROR": ""}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return clone


def in_clone(clone: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(clone / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def calls(clone: Path) -> list[str]:
    return (clone.parent / "calls").read_text().splitlines()


def pins(*locks: str) -> set[str]:
    lines = [line for lock in locks for line in (ROOT / "requirements" / lock).read_text().splitlines()]
    return {line.lower() for line in lines if not line.startswith("#")}


def installed_pins(clone: Path) -> set[str]:
    """What pip was asked to install from lists; no pin twice, as two pips may not install the same package at once."""
    lists = [call.split(" -r ")[1] for call in calls(clone) if " -r " in call]
    found = [pin for name in lists for pin in (clone / name).read_text().lower().splitlines()]
    assert len(found) == len(set(found))
    return set(found)


def test_a_gpu_machine_gets_the_gpu_lock_and_nothing_else(gpu_clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = in_clone(gpu_clone, "setup.sh", "--gpu")
    assert done.returncode == 0, done.stderr
    assert installed_pins(gpu_clone) == pins("gpu.lock", "dev.lock")
    assert all("--no-deps" in call for call in calls(gpu_clone) if "-m pip install" in call)
    assert "up to date" in in_clone(gpu_clone, "setup.sh", "--gpu").stdout
    monkeypatch.setenv("DRIVER", "570.1")
    assert "CUDA 13 needs 580" in in_clone(gpu_clone, "setup.sh", "--gpu").stderr, "the machine has changed"
    refused = in_clone(gpu_clone, "setup.sh")
    assert refused.returncode == 1 and "was made for gpu, this asks for cpu" in refused.stderr


def test_a_package_that_cannot_be_installed_ends_the_set_up(gpu_clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNINSTALLABLE", "ab")  # one of those that are installed beside each other
    failed = in_clone(gpu_clone, "setup.sh", "--gpu")
    assert failed.returncode == 1
    assert "ERROR: No matching distribution" in failed.stderr and "run this again to resume" in failed.stderr
    monkeypatch.delenv("UNINSTALLABLE")
    assert "done in" in in_clone(gpu_clone, "setup.sh", "--gpu").stdout, "it had counted as installed"


def test_an_image_is_built_without_a_gpu(gpu_clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_DEVICE", "1")
    monkeypatch.setenv("CUDA", "False")
    done = in_clone(gpu_clone, "setup.sh", "--image", "--gpu")
    assert done.returncode == 0, done.stderr
    assert installed_pins(gpu_clone) == pins("gpu.lock", "dev.lock")
    shutil.rmtree(gpu_clone / ".venv")
    monkeypatch.setenv("INCLUDE", "/nowhere")
    assert "Python.h is missing" in in_clone(gpu_clone, "setup.sh", "--image", "--gpu").stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DRIVER", "570.133.20", "driver is 570.133.20, CUDA 13 needs 580 or newer; install a newer driver"),
        (
            "DRIVER",
            "550.54",
            "the NVIDIA driver is 550.54, CUDA 13 needs 580 or newer; install a newer driver and restart the",
        ),
        (
            "DRIVER",
            "550.54",
            "(there is no lock for CUDA 12, which older drivers run: requirements/gpu.lock is for CUDA 13",
        ),
        ("DRIVER", "", "names no driver version"),
        ("NO_DEVICE", "1", "finds no GPU; see what it says, and in a container"),
        ("FREE_GB", "22", "/clone has 22 GB free, the installation needs 25 GB; free some, or clone elsewhere"),
        ("CC", "/nowhere/cc", "no C compiler, which Triton needs"),
        ("INCLUDE", "/nowhere", "/nowhere/Python.h is missing, which Triton needs"),
        ("VLLM_ERROR", "ImportError: libcudart.so.13", "vllm does not import (ImportError: libcudart.so.13); remove"),
        ("CUDA", "False", "torch sees no GPU although nvidia-smi does; look at CUDA_VISIBLE_DEVICES ('not set')"),
    ],
)
def test_what_a_gpu_machine_lacks_is_said_in_one_line(
    gpu_clone: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    for _ in range(2):  # nothing counts as installed after a failure
        failed = in_clone(gpu_clone, "setup.sh", "--gpu")
        assert failed.returncode == 1
        assert message in failed.stderr and len(failed.stderr.splitlines()) == 1, failed.stderr
    if name not in ("VLLM_ERROR", "CUDA"):
        assert not (gpu_clone / ".venv").exists(), "it is said before anything is installed"


def test_the_tests_run_in_a_gpu_environment(gpu_clone: Path) -> None:
    done = in_clone(gpu_clone, "test.sh", "--gpu", "tests/verl/algorithms")
    assert done.returncode == 0, done.stderr
    last = calls(gpu_clone)[-1]
    assert last.startswith("-m pytest") and last.endswith("tests/verl/algorithms") and "--gpu" not in last


def pytest_calls(clone: Path) -> list[str]:
    return [call.removeprefix("-m pytest ") for call in calls(clone) if call.startswith("-m pytest")]


def test_all_tests_run_with_more_random_examples(gpu_clone: Path) -> None:
    assert in_clone(gpu_clone, "test.sh", "--gpu", "--all", "-x").returncode == 0
    [call] = pytest_calls(gpu_clone)
    assert call.endswith(" --hypothesis-profile large -x") and "slow" not in call


@pytest.mark.parametrize(
    ("failing", "again", "said"),
    [
        ("", 0, ""),
        ("-m not slow", 0, ""),
        ("-m not slow", 1, "== FAILED: tests: pytest\n"),
        ("-m slow", 0, ""),
        ("-m slow", 1, "== FAILED: tests: slow\n"),
    ],
)
def test_ci_runs_both_tiers_and_what_fails_once_more(
    gpu_clone: Path, monkeypatch: pytest.MonkeyPatch, failing: str, again: int, said: str
) -> None:
    browser = gpu_clone.parent / "tools" / "chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    monkeypatch.setenv("FAILING", failing)
    monkeypatch.setenv("AGAIN", str(again))
    began = int(time.time())
    done = in_clone(gpu_clone, "test.sh", "--gpu", "--ci")
    assert done.returncode == again and done.stderr.endswith(said)
    tries = pytest_calls(gpu_clone)
    default, slow = (call for call in tries if "--last-failed" not in call)
    assert "-m not slow" in default and slow.endswith("-m slow")
    day, until = (int(found) for found in re.findall(r"--day (\d+) --until (\d+)", slow)[0])
    assert day == began // 86400 and until == pytest.approx(began + 45 * 60, abs=60)
    # With nothing beside it, and without a time after which it would be left out.
    once_more = f"{failing} --last-failed --last-failed-no-failures none --maxfail=3"
    assert [call for call in tries if "--last-failed" in call] == [once_more] * bool(failing)


def test_the_quickstart_runs_in_a_gpu_environment(gpu_clone: Path) -> None:
    done = in_clone(gpu_clone, "quickstart.sh", "--gpu", "--", "trainer.total_training_steps=3")
    assert done.returncode == 0, done.stderr
    for module in ("sft", "main_ppo"):
        call = next(call for call in calls(gpu_clone) if f"-m verl.trainer.{module} " in call)
        assert "trainer.device=cuda" in call.split()
    overrides = [word for word in call.split() if "=" in word]
    config = load_config("tinywiki", [word for word in overrides if not word.endswith("=")])
    assert (config.trainer.device, config.actor_rollout_ref.rollout.dtype) == ("cuda", "bfloat16")
    assert config.trainer.total_training_steps == 3


def test_runs_on_slurm_have_a_retriever_that_their_nodes_reach(composed: Composed) -> None:
    jobs = [command for command in all_commands() if command.words[0] == "sbatch"]
    assert len(jobs) >= 2
    for job in jobs:
        place = job.words.index("scripts/cluster/slurm.sbatch")
        retriever = composed(*job.words[place + 1 :], **job.variables).retriever
        assert retriever.placement == "per_node" or not is_loopback(retriever.url), job.where


def test_a_run_is_named_after_its_folder(checkout: Checkout) -> None:
    """The default name is that of the published experiment."""

    def named(*arguments: str, **settings: str) -> tuple[str, str]:
        given = started(checkout, "train_grpo.sh", *arguments, "--cfg", "job", **settings)
        config = load_config_from_argv(given[:-2]).trainer
        return config.experiment_name, config.default_local_dir

    published = "nq_search-grpo-qwen2.5-3b"
    assert named() == (published, f"verl_checkpoints/{published}")
    assert named("trainer.default_local_dir=runs/mine") == ("mine", "runs/mine")
    name, folder = named("trainer.default_local_dir='runs/my café/'")
    assert re.fullmatch("my_caf_+", name) and folder == "runs/my café/"
    assert named("trainer.experiment_name=first") == ("first", "verl_checkpoints/first")
    assert named("trainer.default_local_dir=runs/mine", EXPERIMENT_NAME="other") == ("other", "runs/mine")


def test_a_script_sets_nothing_that_a_chat_model_has_no_use_for(checkout: Checkout) -> None:
    """A user could not leave it out."""
    own = ("agent.format=chat", "agent.template=chat")
    given = started(checkout, "train_grpo.sh", *own, "--cfg", "job")[:-2]
    assert not any("tags_in_thoughts" in word for word in given)
    assert load_config_from_argv(started(checkout, "train_grpo.sh", "--cfg", "job")[:-2]).agent.tags_in_thoughts


def test_what_a_user_adds_to_the_clone_is_not_ours(tmp_path: Path) -> None:
    """It is neither checked for style nor seen by git; our own files are checked."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("mine/my_reward.py", "mine/deep/tool.py", "my_env.py", "search_r1/ours.py", "infer.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def checked(folder: Path) -> set[str]:
        ruff = [Path(sys.executable).with_name("ruff"), "check", "--show-files", "--no-cache", "."]
        shown = subprocess.run(ruff, cwd=folder, capture_output=True, text=True, timeout=60, check=True).stdout
        return {str(Path(path).relative_to(folder)) for path in shown.splitlines()}

    assert checked(tmp_path) == {"pyproject.toml", "search_r1/ours.py", "infer.py"}
    ours = {
        str(path.relative_to(ROOT)) for name in ("verl", "tests", "scripts") for path in ROOT.glob(f"{name}/**/*.py")
    }
    assert ours <= checked(ROOT) and "notebooks/search_r1_demo.ipynb" in checked(ROOT)
    assert ignored("mine/file", "my_env.py", "infer.py") == {"mine/file", "my_env.py"}


def ignored(*paths: str, root: Path = ROOT) -> set[str]:
    """Those that git does not see."""
    git = ["git", "-c", f"safe.directory={root}", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(git, cwd=root, input="\n".join(paths), capture_output=True, text=True, timeout=60)
    if done.returncode == 128:
        pytest.skip("this is no git checkout")
    return set(done.stdout.splitlines())


def test_git_ignores_what_our_commands_write() -> None:
    """Else `git add .` takes a run's checkpoints along."""
    texts = [*ROOT.glob("*.sh"), *ROOT.glob("configs/*.yaml"), ROOT / "README.md", *ROOT.glob("docs/*.md")]
    texts += [path for folder in ("scripts", "search_r1", "verl") for path in (ROOT / folder).rglob("*.??")]
    paths = {found[1] for text in texts for found in OUTPUT.finditer(text.read_text())}
    assert {"verl_checkpoints/$EXPERIMENT_NAME", "checkpoints/sft", "indexes/"} <= paths and len(paths) > 15
    outputs = sorted({f"{path.rstrip('/')}/file" for path in paths} | {"data/nq/train.parquet", "results/a", "nq.log"})
    assert set(outputs) == ignored(*outputs)


def test_quickstart_says_what_it_takes_and_refuses_what_it_does_not_know() -> None:
    for flag in ("--help", "-h"):
        shown = run("scripts/quickstart.sh", flag)
        assert shown.returncode == 0 and not shown.stderr and "#" not in shown.stdout
        for word in ("--long", "--seed", "--output_dir", "minutes", " GB", "trainer.overwrite=archive"):
            assert word in shown.stdout, word
    for arguments, message in (
        (("--seed",), "--seed needs a value"),
        (("--seed", "x"), "whole number"),
        (("--fast",), "--help"),
    ):
        refused = run("scripts/quickstart.sh", *arguments)
        assert refused.returncode == 2 and message in refused.stderr and not refused.stdout
