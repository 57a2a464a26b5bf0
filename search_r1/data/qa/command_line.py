"""What the scripts in scripts/data_process share: their arguments, and the files they write, here and on HDFS."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from program_end import exit_status
from search_r1.data.qa.build import Contexts, PromptBuilder
from search_r1.data.qa.source_files import BadRows, sources
from search_r1.llm_agent.templates import load_template, shipped_templates
from search_r1.search.manifest import check_not_read
from verl.errors import ConfigError


@dataclass(frozen=True)
class PromptScript:
    """What a script writes: `base` is the template of `--template_type base`, `splits` are the files."""

    local_dir: str
    base: str
    splits: tuple[str, ...]
    several_sets: bool = False
    with_context: bool = False


def main(description: str | None, script: PromptScript, arguments: Sequence[str] | None = None) -> int:
    """Run a script. Returns the exit status, as `exit_status` says."""
    args = _parser(description, script).parse_args(arguments)
    return exit_status(lambda: run(args, script), "files that were not named are not written")


def run(args: argparse.Namespace, script: PromptScript) -> None:
    """Write the files that `args` specify. Raises `VerlError` or `SearchError`."""
    client = hdfs_client() if args.hdfs_dir else None
    template = load_template(script.base if args.template_type == "base" else args.template_type)
    if template.needs_context != script.with_context:
        what = "has a place for" if template.needs_context else "has no place for"
        raise ConfigError(f"--template_type {args.template_type} {what} retrieved passages, which only nq_rag.py gives")
    # Find all files before the first one is read, and write over none of them.
    found = {split: sources(args.data_sources, split, args.input_dir) for split in _splits(args, script)}
    for split in found:
        inputs = (source.path for of_split in found.values() for source in of_split)
        check_not_read("--local_dir", _output(args, split), inputs)
    builder = PromptBuilder(template, args.limit, BadRows(args.skip_bad_rows))
    written = []
    for split, of_split in found.items():
        path = _output(args, split)
        counts = builder.write(path, of_split, split, _contexts(args, split, script))
        written.append(path)
        pairs = zip(of_split, counts, strict=True)
        parts = (f"{count} of {source.data_source} from {source.path.name}" for source, count in pairs)
        print(f"{path}: {sum(counts)} prompts ({', '.join(parts)})")
    # Say what was left out, and copy what was written.
    for message in builder.bad_rows.listed:
        print(f"left out: {message}", file=sys.stderr)
    if args.skip_bad_rows:
        print(f"{len(builder.bad_rows.listed)} rows left out")
    if client:
        copy_to_hdfs(client, written, args.hdfs_dir)


def _splits(args: argparse.Namespace, script: PromptScript) -> list[str]:
    chosen = [word.strip() for word in args.splits.split(",")]
    if not set(chosen) <= set(script.splits) or len(set(chosen)) != len(chosen):
        raise ConfigError(f"--splits {args.splits!r} has to be some of {','.join(script.splits)}")
    return chosen


def _output(args: argparse.Namespace, split: str) -> Path:
    return Path(args.local_dir / f"{split}.parquet")


def _contexts(args: argparse.Namespace, split: str, script: PromptScript) -> Contexts | None:
    if not script.with_context:
        return None
    cache = args.train_retrieval_cache if split == "train" else args.test_retrieval_cache
    return Contexts(cache, args.corpus_path, args.retriever_url, args.topk)


def _parser(description: str | None, script: PromptScript) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_dir", type=Path, default=Path(script.local_dir), help="output folder (default: %(default)s)")
    add("--hdfs_dir", help="folder on HDFS to copy the files to")
    templates = ", ".join(shipped_templates())
    add("--template_type", default="base", help=f"base ({script.base}), or a file, or one of {templates}")
    add("--input_dir", type=Path, help="folder with <set>/<split>.jsonl or the original files (default: the hub)")
    add("--skip_bad_rows", action="store_true", help="list and skip rows that cannot be used")
    add("--limit", type=_positive, help="maximum number of questions from each set")
    if script.several_sets:
        add("--data_sources", default="nq", help="sets, or NAME=FILE, separated by commas")
        parser.set_defaults(splits=",".join(script.splits))
    else:
        add("--splits", default=",".join(script.splits), help="splits to write (default: %(default)s)")
        parser.set_defaults(data_sources="nq")
    if script.with_context:
        _add_context_arguments(parser)
    return parser


def _add_context_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--topk", type=_positive, default=3, help="passages per prompt (default: %(default)s)")
    add("--corpus_path", type=Path, help="the passages to which the ids in the caches refer")
    for split in ("train", "test"):
        add(f"--{split}_retrieval_cache", type=Path, help='JSON {question: [{"id": ..}, ..]}, best first')
    add("--retriever_url", help="/retrieve of a running server, used for questions that are in no cache")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


# Copy the written files to HDFS with Hadoop's command-line client.


def hdfs_client() -> str:
    """The path of the client. Raises `ConfigError` if there is none."""
    client = shutil.which("hdfs")
    if client is None:
        raise ConfigError("--hdfs_dir needs the program hdfs of Hadoop on the PATH; without it leave --hdfs_dir out")
    return client


def copy_to_hdfs(client: str, files: Sequence[Path], folder: str) -> None:
    """Copy `files` to `folder`, replacing files of the same names. Raises `ConfigError` with the client's message."""
    for words in (["-mkdir", "-p", folder], ["-put", "-f", *map(str, files), folder]):
        done = subprocess.run([client, "dfs", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"hdfs dfs {words[0]} to {folder} failed: {done.stderr.strip()}")
