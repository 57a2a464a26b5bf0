"""`.venv/bin/python -m verl.trainer.preflight key=value ...`: would this run start, and would it fit? Loads no model.

The settings may be those of main_ppo or of main_ppo_format. `--gpus 8x80` asks for GPUs that this machine lacks, as
in the dry run (`--devices 8 --device_memory_gib 79.1` says the same); `--estimate_only` is the dry run alone.
"""

from __future__ import annotations

import sys

from url_text import mask_text
from verl.errors import VerlError
from verl.process.startup import leave
from verl.trainer.start_checks.command_line import parse
from verl.trainer.start_checks.finding import Finding


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: all is ok and it fits (warnings count as ok); 1: otherwise."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)

        from verl.trainer.start_checks.findings import all_findings  # imports torch, which --help need not wait for
        from verl.trainer.start_checks.models import models_of, require_engines_share_heads

        models = models_of(arguments.config)
        if arguments.place.on_gpu:
            require_engines_share_heads(arguments.config, models.policy)
    except VerlError as error:
        _show(Finding("FAIL", "config", str(error)))
        return 1
    failed = False
    # A check that fails does not end the loop: the user sees as many problems as possible in one go.
    for finding in all_findings(arguments, models):
        _show(finding)
        failed |= finding.level == "FAIL"
    print("does not start, or does not fit" if failed else "can start, and fits")
    return int(failed)


def _show(finding: Finding) -> None:
    print(mask_text(str(finding)), flush=True)


if __name__ == "__main__":
    leave(main())
