"""The settings as a page: `.venv/bin/python -m verl.config.docs` writes docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from verl.config.loading.command_line import default_text, type_text
from verl.config.rules.without_effect import INERT_KEYS
from verl.config.sections.fields import UNITS, WARM_START_UNITS, Key, leaves, unit_of
from verl.config.sections.schema import Config, SftConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `.venv/bin/python -m verl.config.docs` from the typed schema in verl/config; do not edit. -->

This page lists every setting of a run with its default, type, unit and meaning. The settings form one YAML tree,
`configs/ppo_trainer.yaml`. You override any key on the command line:

```bash
.venv/bin/python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n_agent=5 --cfg job
```

- `key=value` sets a key; `+key=value` and `++key=value` do the same. If a key is given twice, the last value wins.
  `~key` gives it its default again. A mapping is merged into that of the file; to replace it, put `~key` first, as in
  `~reward.kwargs "reward.kwargs={threshold: 0.5}"`. `'key=${oc.env:NAME}'` takes the value of an environment variable.
- An unknown key is an error that suggests the nearest one. A value of the wrong type or out of range is an error, too.
- `--config-name NAME` starts from another file in `configs/`, or in the folder `--config-dir DIR`, which is searched
  first. Such a file lists only what it changes, below `defaults: [ppo_trainer, _self_]`.
- `--cfg job` prints the composed settings, `--cfg job --package trainer` those of a section, `--info` the files that
  they come from, `--help` all keys.
- A default `${...}` is the value of another key.
- Of Hydra's own settings, `hydra.run.dir` is `trainer.default_local_dir`; the others are errors that say what to use.

## Several runs: seeds and sweeps

```bash
.venv/bin/python -m verl.trainer.main_ppo -m trainer.seed=0,1,2 actor_rollout_ref.actor.optim.lr=1e-6,5e-7
```

`-m` (`--multirun`) runs every combination of the values, one run after the other; `range(0,5)` is short for
`0,1,2,3,4`. It works for the warm start and the training scripts, too. All settings are checked before the first run
starts. Each run has a folder of its own in `trainer.default_local_dir`, such as `seed=0,lr=1e-06`, and that name at the
end of its `trainer.experiment_name`. At the end a table is printed and written to `sweep.md` in
`trainer.default_local_dir`. It has the last reward, validation score and test score of each run, and their mean over
seeds with its 95% interval (Student's t).

A run that fails does not keep the others from running. The same command resumes a sweep: it leaves finished runs as
they are and resumes the others from their last checkpoint. More seeds can be added. A folder that holds a run with
other settings is refused.
"""


WARM_START = """\
## The warm start

`.venv/bin/python -m verl.trainer.sft` (or `search-r1`'s `sft`) has its own YAML tree, `configs/sft.yaml`, with these
keys:
"""


def markdown(schema: type, prefix: str = "", units: Mapping[str, str] = UNITS) -> str:
    """All keys as Markdown tables, one per section of the tree; `prefix` is in front of its name in the heading."""
    return "\n".join(_tables(schema, prefix, units))


def page() -> str:
    """The whole of docs/configuration.md."""
    inert = [f"| `{key}` | {reason} |" for key, reason in INERT_KEYS.items()]
    return "\n".join(
        [
            INTRODUCTION,
            markdown(Config),
            "## Published keys without effect",
            "",
            "These keys of Search-R1 are accepted with their default only. Another value is an error with this reason:",
            "",
            "| key | reason, and what to use instead |",
            "|---|---|",
            *inert,
            "",
            WARM_START,
            markdown(SftConfig, "Warm start: ", WARM_START_UNITS),
        ]
    )


def _tables(schema: type, prefix: str, units: Mapping[str, str]) -> Iterator[str]:
    # A section's own keys may stand around its subsections in the tree, so they are gathered first.
    keys = list(leaves(schema).values())
    sections = list(dict.fromkeys(map(_section_of, keys)))
    keys.sort(key=lambda key: sections.index(_section_of(key)))
    for section, members in groupby(keys, key=_section_of):
        yield f"## {prefix}{section or 'Top level'}\n"
        yield "| key | default | type | unit | meaning |\n|---|---|---|---|---|"
        for key in members:
            yield _row(key, units)
        yield ""


def _row(key: Key, units: Mapping[str, str]) -> str:
    name = key.path.rpartition(".")[2]
    cells = (default_text(key), type_text(key), key.meaning)
    default, kind, meaning = (text.replace("|", "\\|") for text in cells)
    return f"| `{name}` | `{default}` | {kind} | {unit_of(key, units)} | {meaning} |"


def _section_of(key: Key) -> str:
    return key.path.rpartition(".")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
