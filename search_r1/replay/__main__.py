"""Use stored trajectories (`RUN/trajectories/*.parquet`) again without sampling.

.venv/bin/python -m search_r1.replay score FILES --tokenizer MODEL --reward NAME --output FILE     another reward
.venv/bin/python -m search_r1.replay log_probs FILES --model MODEL --output FILE                   another checkpoint
.venv/bin/python -m search_r1.replay export FILES --output FILE                                    a training set
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from program_end import exit_status
from search_r1.search.manifest import check_not_read, make_folder_of
from verl.errors import DataError
from verl.process.startup import leave

if TYPE_CHECKING:
    from verl.config.sections.agent import AgentConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status, as `exit_status` says."""
    args = _parser().parse_args(argv)

    def run() -> None:
        make_folder_of("--output", args.output)  # hours of work are not to end at a file that cannot be written
        args.run(args)

    return exit_status(run, "nothing was written")


def score(args: argparse.Namespace) -> None:
    """Writes the rows with another reward and its components, and prints the means of both rewards."""
    from search_r1.replay.rescoring import read_stored, rescore
    from verl.config import load_config
    from verl.pretrained import load_tokenizer
    from verl.tracking.trajectory_store import write_trajectory_table
    from verl.trainer.sampling.scoring import make_reward

    check_not_read("--output", args.output, args.files)  # the rewards that were trained on are nowhere else

    # The grammar and the reward, as the run of the files would have them.
    config = load_config("ppo_trainer")
    if args.template is not None:
        config.agent.template = args.template
    else:
        config.agent = _agent_of_run(args.files, config.agent)
    config.agent.tags_in_thoughts |= args.tags_in_thoughts
    rule = make_reward(config, args.reward, args.kwargs)

    # A tokenizer that decodes the ids to other texts than the stored ones would give other rewards.
    tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code, "--tokenizer")
    stored = read_stored(args.files)
    stored.check_tokenizer(tokenizer)
    found = rescore(stored, rule, tokenizer)
    write_trajectory_table(args.output, found.table)
    # A line for each data source, in columns.
    width = max(len("data source"), *(len(change.data_source) for change in found.changes))
    print(f"{'data source':{width}}  {'scored':>8}  {'changed':>8}  {'old mean':>10}  {'new mean':>10}")
    for row in found.changes:
        counts = f"{row.num_scored:>8}  {row.num_changed:>8}"
        print(f"{row.data_source:{width}}  {counts}  {row.old_mean:>10.4f}  {row.new_mean:>10.4f}")
    print(f"{found.num_failed} failed before and are as they were; {found.num_unavailable} could not be scored")
    print(f"-> {args.output}")


def _agent_of_run(files: Sequence[Path], default: AgentConfig) -> AgentConfig:
    """How the run that wrote the files reads tags; `default` for files of no run. Raises DataError for files of runs
    whose templates differ.
    """
    from search_r1.llm_agent.command_line import stored_agent
    from search_r1.llm_agent.templates import template_of
    from verl.tracking.trajectory_store import run_of_file

    found: dict[str, tuple[Path, AgentConfig]] = {}
    for folder in map(run_of_file, files):
        agent = stored_agent(folder) or default
        found.setdefault(template_of(agent).fingerprint, (folder, agent))
    if len(found) > 1:
        (first, _), (second, _), *_ = found.values()
        raise DataError(f"the runs of {first} and {second} have other templates: score their files one after the other")
    [(_, agent)] = found.values()
    return agent


def log_probs(args: argparse.Namespace) -> None:
    """Writes the rows with a column `log_probs_under`, and prints its difference from the sampler's log-probs."""
    from search_r1.replay.log_probs import Checkpoint, difference
    from search_r1.replay.rescoring import add_log_probs, read_stored
    from verl.pretrained import load_tokenizer
    from verl.tracking.trajectory_store import write_trajectory_table

    # To a model with another tokenizer, the stored ids would be another text.
    stored = read_stored(args.files)
    stored.check_tokenizer(load_tokenizer(args.model, args.trust_remote_code, "--model"))
    checkpoint = Checkpoint(args.model, args.device, args.dtype, args.trust_remote_code)
    values = checkpoint.log_probs(stored, args.temperature, args.max_tokens)
    found = difference(stored.trajectories, values)
    write_trajectory_table(args.output, add_log_probs(stored.table, values))
    print(f"{found.num_tokens} policy tokens of {len(values)} trajectories, {args.model} against the sampler:")
    print(f"mean difference of log-probs  {found.mean:+.6f}")
    print(f"largest difference            {found.max_abs:.6f}")
    print(f"KL(sampler || model), k3      {found.kl:.6f} nats a token")
    print(f"-> {args.output}")


def export(args: argparse.Namespace) -> None:
    """Writes rows for `verl.trainer.sft`, and prints what was left out."""
    from search_r1.replay.rejection import Criteria, choose, sft_table
    from search_r1.replay.rescoring import read_stored
    from verl.tracking.trajectory_store import write_trajectory_table

    check_not_read("--output", args.output, args.files)  # what was sampled is nowhere else
    stored = read_stored(args.files)
    choice = choose(stored, Criteria(args.min_reward, args.per_prompt, args.dedupe))
    print(f"kept {len(choice.kept)} of {len(stored.trajectories)} trajectories")
    for reason, count in choice.dropped.most_common():
        print(f"dropped {count}: {reason}")
    if not choice.kept:
        raise DataError("no trajectory is good enough; nothing was written")
    table = sft_table(stored, choice.kept, args.text_only)
    write_trajectory_table(args.output, table)
    if any(len(stored.trajectories[row].sequences) > 1 for row in choice.kept):
        print(f"{len(table)} rows: one for each sequence in which the policy wrote something")
    print(f"-> {args.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="score | log_probs | export")

    # score: which reward, on which reading of the text
    scored = _command(commands, "score", score)
    scored.add_argument(
        "--reward", required=True, metavar="NAME", help="dotted name of the reward, as in reward.function"
    )
    scored.add_argument("--kwargs", type=_mapping, default={}, help="keyword arguments of the reward, as YAML or JSON")
    scored.add_argument("--template", help="template, for its grammar (default: that of the run, or search_r1)")
    scored.add_argument(
        "--tags_in_thoughts",
        action="store_true",
        help="read tags as a run with agent.tags_in_thoughts=true (default: as the run of the files)",
    )
    scored.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="Hugging Face folder of the model that sampled"
    )

    # log_probs: which model, and how it computes
    under = _command(commands, "log_probs", log_probs)
    under.add_argument("--model", required=True, help="Hugging Face folder of the checkpoint")
    under.add_argument(
        "--temperature", type=_above_0, default=1.0, help="sampling temperature of the trajectories (default: 1.0)"
    )
    under.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    under.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
                       help="number format of the forward pass; auto: as param_dtype=auto")  # fmt: skip
    under.add_argument(
        "--max_tokens",
        type=_positive,
        default=16384,
        help="maximum number of tokens in a forward pass (default: 16384)",
    )

    for command in (scored, under):
        command.add_argument("--trust_remote_code", action="store_true", help="run Python code from the model's folder")

    # export: which trajectories are good enough
    chosen = _command(commands, "export", export)
    chosen.add_argument(
        "--min_reward", type=float, default=1.0, help="minimum reward to keep a trajectory (default: 1.0)"
    )
    chosen.add_argument(
        "--per_prompt", type=_positive, metavar="K", help="keep the K best of each prompt, with different texts"
    )
    chosen.add_argument("--dedupe", action="store_true", help="keep one of several equal texts of a prompt")
    chosen.add_argument("--text_only", action="store_true", help="leave out the ids, to train with another tokenizer")
    return parser


def _command(commands: Any, name: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, description=run.__doc__)
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="parquet files of trajectories")
    command.add_argument("--output", required=True, type=Path, help="parquet file to write")
    command.set_defaults(run=run)
    return command


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping of names to values")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    leave(main())
