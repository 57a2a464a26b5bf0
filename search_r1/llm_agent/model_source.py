"""Where a model comes from: a folder here, or a name on the hub. Checked once, before anything heavy is imported."""

from __future__ import annotations

import logging
from pathlib import Path

from verl.errors import ConfigError

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0


def find_model(name: str) -> str:
    """The folder `name`, or the hub name `name` after the hub has said that it has such a model.

    Where the hub does not answer, the folder of a copy that was downloaded before. Raises `ConfigError` at once, after
    one request at most: the libraries that load a model retry for most of a minute.
    """
    source = find_source(name)
    if Path(source).is_dir():
        _check_folder(Path(source))
    return source


def find_source(name: str, what: str = "model") -> str:
    """Find a folder or hub name as `find_model` does, without looking for a model in the folder: it may hold only a
    tokenizer, say. `what` begins the messages of errors."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ConfigError(f"{what} {name}: this is a file; give the folder that it is in")
    if _can_only_be_a_path(name):
        parent = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
        hint = "" if parent is None else f" (there is {parent})"  # shows where the path goes wrong
        raise ConfigError(f"{what} {name}: there is no such folder{hint}")
    return _on_hub(name, what)


def _check_folder(path: Path) -> None:
    if (path / "config.json").is_file() or (path / "params.json").is_file():  # the latter: Mistral's own format
        return
    below = [*path.glob("global_step_*/config.json"), *path.glob("actor/global_step_*/config.json")]
    hint = f"; {below[-1].parent} does" if below else ""
    raise ConfigError(f"model {path}: the folder holds no model in Hugging Face format (no config.json){hint}")


def _can_only_be_a_path(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    first, slash, _ = name.partition("/")
    return bool(slash) and Path(first).is_dir()  # `runs/typo` beside a folder `runs`


def _on_hub(name: str, what: str) -> str:
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{what} {name}: there is no such folder, and the hub has no such model that this login may read"
        ) from error
    except (HTTPError, OSError) as error:
        # The hub did not answer the question, so that the copy of an earlier download is used.
        return _in_cache(name, what, error)
    return name


def _in_cache(name: str, what: str, reason: Exception) -> str:
    from huggingface_hub import snapshot_download

    why = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    try:
        folder = snapshot_download(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} {name}: there is no such folder, no copy of a hub model in the cache, and the hub cannot be asked "
            f"({why})"
        ) from error
    log.warning("the hub cannot be asked (%s): taking the copy of %s in the cache", why, name)
    return folder
