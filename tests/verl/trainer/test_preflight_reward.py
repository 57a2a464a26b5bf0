"""The reward is tried on real rows before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preflight_run import QUESTION, small_run
from run_config import run_config

from verl.config import Config
from verl.errors import RewardError, RewardUnavailable
from verl.trainer.preflight.__main__ import main
from verl.trainer.preflight.inputs import check_inputs


def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def never_a_number(data_source, solution_str, ground_truth, extra_info=None):
    return math.nan


def knows_nq_alone(data_source, solution_str, ground_truth, extra_info=None):
    return {"nq": 1.0}[data_source]


def unavailable(data_source, solution_str, ground_truth, extra_info=None):
    raise RewardUnavailable("the judge is down")


@pytest.fixture
def trying(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Config]:
    """Without a retriever: what is wrong with a reward is said before one is asked."""

    def config(function: Callable[..., object], *overrides: str) -> Config:
        name = f"reward.function={__name__}.{function.__name__}"
        dead = "retriever.url=http://127.0.0.1:1/retrieve"
        return run_config(small_run(prompt_file, tmp_path / "run", tiny_model_dir, name, dead, *overrides))

    return config


def test_a_reward_that_is_no_number_ends_the_run_at_its_start(trying: Callable[..., Config]) -> None:
    with pytest.raises(RewardError) as caught:
        check_inputs(trying(never_a_number))
    for part in (f"{__name__}.never_a_number", "gave nan", "data_source 'nq'", f"question '{QUESTION}"):
        assert part in str(caught.value)


def test_a_judge_that_is_down_is_not_the_rewards_fault(trying: Callable[..., Config]) -> None:
    with pytest.raises(RewardUnavailable, match="the judge is down"):
        check_inputs(trying(unavailable))


def test_every_data_source_is_tried(trying: Callable[..., Config], prompt_file: Path) -> None:
    """Validation asks about sets that training has not; the first row of each is tried."""
    table = pq.read_table(prompt_file)
    other = table.set_column(table.column_names.index("data_source"), "data_source", pa.array(["nq", "musique"]))
    validation = prompt_file.with_name("validation.parquet")
    pq.write_table(other, validation)
    with pytest.raises(RewardError, match="knows_nq_alone raised KeyError: 'musique' .*data_source 'musique'"):
        check_inputs(trying(knows_nq_alone, f"data.val_files={validation}"))


@pytest.mark.usefixtures("no_dry_run")
def test_the_command_says_what_the_reward_gave(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    main([*arguments, f"reward.function={__name__}.half"])
    assert f"ok   reward: {__name__}.half gave 0.5" in capsys.readouterr().out
    assert main([*arguments, f"reward.function={__name__}.never_a_number"]) == 1
    out = capsys.readouterr().out
    assert f"FAIL reward: reward {__name__}.never_a_number gave nan" in out and "ok   environment" in out
