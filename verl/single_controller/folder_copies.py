"""A run folder that the nodes do not share: the driver's folder is the one that is kept, and files are copied.

Files that ranks on another node write are at the same path on that node's own disk until they are moved here; files
that they read are copied there for as long as they need them.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray.exceptions import RayError

from verl.errors import CheckpointError, StorageError, VerlError, translated
from verl.process.ranks import enter_working_dir
from verl.process.storage import Digests, could_not_write, sync, writing
from verl.process.watchdog import note_progress
from verl.single_controller.waiting import as_verl_error
from verl.single_controller.worker_group import ResourcePool

CHUNK = 64 * 2**20
REMOVE_S = 10.0  # at most, to remove a copy: its node may be lost without Ray's knowing it yet
MANIFEST = "manifest.json"


class NodeFolder:
    """Runs on another node and works on its own disk. Raises StorageError with the name of its host."""

    def __init__(self) -> None:
        enter_working_dir()
        self._marker = Path()

    def mark(self, run_dir: str) -> str:
        """Make the run folder, with a marker file of this node in it. Returns the file's name."""
        with _as_storage_error(run_dir):
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            self._marker = Path(run_dir) / f".seen-by-{socket.gethostname()}-{secrets.token_hex(8)}"
            self._marker.touch()
        return self._marker.name

    def marks(self, run_dir: str, names: Sequence[str]) -> list[bool]:
        """Whether each of these marker files exists here."""
        return [(Path(run_dir) / name).exists() for name in names]

    def unmark(self) -> None:
        self._marker.unlink(missing_ok=True)

    def make(self, folders: Sequence[str]) -> None:
        """Make empty folders."""
        for folder in folders:
            with _as_storage_error(folder):
                shutil.rmtree(folder, ignore_errors=True)
                Path(folder).mkdir(parents=True)

    def begin_copy(self, folder: str, manifest: bytes | None) -> bool:
        """Whether the folder must be copied here (and later removed by `remove`): not if a state with this manifest
        exists here already. Raises CheckpointError when something else does.
        """
        path = Path(folder)
        with _as_storage_error(folder):
            # A folder without a mark was not put there as a copy, so it must not be replaced or removed.
            if path.exists() and not _mark_of(path).exists():
                if manifest is not None and (path / MANIFEST).is_file() and (path / MANIFEST).read_bytes() == manifest:
                    return False
                raise CheckpointError(
                    f"on host {socket.gethostname()} there is a different {folder} already, where the run must put a "
                    "copy of the driver's: move it away"
                )
            # The mark is there before the first file, so that a copy that breaks off is known as one.
            shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
            path.parent.mkdir(parents=True, exist_ok=True)
            _mark_of(path).touch()
        return True

    def files(self, folder: str) -> list[tuple[str, int]]:
        """Files in a folder and its subfolders, with their sizes in bytes."""
        return _files(Path(folder))

    def read(self, folder: str, name: str, offset: int) -> bytes:
        """Read at most `CHUNK` bytes."""
        with _as_storage_error(f"{folder}/{name}"), open(Path(folder) / name, "rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def write(self, folder: str, name: str, offset: int, values: bytes) -> None:
        """Write a part; the first one creates the file."""
        path = Path(folder) / name
        with _as_storage_error(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(values)

    def remove(self, folders: Sequence[str]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            _mark_of(Path(folder)).unlink(missing_ok=True)


class FolderCopies:
    """The driver's view of the disks of `nodes` of the pool, which do not see its `run_dir`; idle without nodes.

    If several of them share a folder, only one works on it.
    """

    def __init__(self, pool: ResourcePool, nodes: Sequence[int], run_dir: Path, timeout_s: float) -> None:
        """Raises StorageError when a node cannot make the folder."""
        self._run_dir, self._timeout_s = run_dir, timeout_s
        self._has_first = 0 in nodes
        self._disks: list[Any] = [ray.remote(NodeFolder).options(**pool.plain_options(node)).remote() for node in nodes]
        try:
            self._keep_one_of_each()
        except BaseException:
            self.close()
            raise

    def make(self, folders: Sequence[Path]) -> None:
        """Make empty folders for ranks that write there."""
        self._all("make", [str(folder) for folder in folders])

    def begin_bringing(self, folder: Path) -> Future[Digests]:
        """Start moving the folder's files on the other disks into it here, in the background. The result has bytes and
        SHA-256 by name, as they arrived.
        """
        if not self._disks:
            return nothing_to_bring()
        arriving: Future[Digests] = Future()

        def bring() -> None:
            try:
                arriving.set_result(self._bring(self._disks, folder, folder))
            except BaseException as error:
                arriving.set_exception(error)

        Thread(target=bring, daemon=True).start()  # a run that ends does not wait for it
        return arriving

    def bring(self, folder: Path) -> None:
        """Move a folder that rank 0 has made here, if that is on another disk; waits for it. The move is atomic."""
        temporary = folder.with_name(f".{folder.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        if self._has_first and self._bring(self._disks[:1], folder, temporary):
            with writing(folder):
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)

    @contextmanager
    def on_all_disks(self, *folders: Path) -> Iterator[None]:
        """Context in which the folders are on the other disks too. Raises StorageError when they cannot be copied."""
        copied: list[tuple[Any, Path]] = []
        try:
            for folder in folders:
                # A node that already has a state with the same manifest needs no copy.
                is_state = (folder / MANIFEST).is_file()
                manifest = (folder / MANIFEST).read_bytes() if is_state else None
                for disk in self._disks:
                    if self._ask(disk, "begin_copy", str(folder), manifest):
                        # Noted before it is sent, so that a copy that breaks off is removed, too.
                        copied.append((disk, folder))
                        self._send(disk, folder)
            yield
        finally:
            for disk, folder in copied:
                self._remove(disk, folder)

    def remove(self, folder: Path) -> None:
        """Remove the folder on the other disks, as far as possible."""
        for disk in self._disks:
            self._remove(disk, folder)

    def close(self) -> None:
        for disk in self._disks:
            ray.kill(disk)
        self._disks = []

    def _keep_one_of_each(self) -> None:
        run_dir = str(self._run_dir)
        names = self._all("mark", run_dir)
        seen = self._all("marks", run_dir, names)
        self._all("unmark")
        for number, disk in reversed(list(enumerate(self._disks))):
            if any(seen[number][:number]):  # it shares the folder with an earlier one
                ray.kill(disk)
                del self._disks[number]

    def _bring(self, disks: Sequence[Any], folder: Path, into: Path) -> Digests:
        found: Digests = {}
        for disk in disks:
            for name, size in self._ask(disk, "files", str(folder)):
                found[name] = self._fetch(disk, folder, into, name, size)
            self._remove(disk, folder)
        return found

    def _fetch(self, disk: Any, folder: Path, into: Path, name: str, size: int) -> tuple[int, str]:
        path, checksum, offset = into / name, hashlib.sha256(), 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                # Part by part, since files may be larger than memory. The digest is that of what has arrived.
                while offset < size:
                    values = self._ask(disk, "read", str(folder), name, offset)
                    if not values:
                        raise StorageError(f"{path}: only {offset} of {size} bytes could be copied from its node")
                    file.write(values)
                    checksum.update(values)
                    offset += len(values)
            sync(path)
        return offset, checksum.hexdigest()

    def _send(self, disk: Any, folder: Path) -> None:
        for name, size in _files(folder):
            with open(folder / name, "rb") as file:
                for offset in range(0, max(1, size), CHUNK):
                    note_progress()
                    self._ask(disk, "write", str(folder), name, offset, file.read(CHUNK))

    def _remove(self, disk: Any, folder: Path) -> None:
        with suppress(VerlError):  # the node is lost
            _answers([disk.remove.remote([str(folder)])], "remove", REMOVE_S)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return _answers([getattr(disk, method).remote(*args) for disk in self._disks], method, self._timeout_s)

    def _ask(self, disk: Any, method: str, *args: Any) -> Any:
        return _answers([getattr(disk, method).remote(*args)], method, self._timeout_s)[0]


def nothing_to_bring() -> Future[Digests]:
    """A completed result without files."""
    nothing: Future[Digests] = Future()
    nothing.set_result({})
    return nothing


def require_arrived(folder: Path, arrived: Digests, written: Digests) -> None:
    """Raise CheckpointError when a file differs from what its rank wrote, or is missing here."""
    for name, found in arrived.items():
        if written.get(name) != found:
            raise CheckpointError(f"{folder / name} is not what its rank wrote: it changed before or during the copy")
    if missing := [name for name in written if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / missing[0]} is not here, nor on nodes that do not share {folder.parent}")


def _answers(references: list[Any], method: str, timeout_s: float) -> list[Any]:
    """What `wait_for` returns; this does not count as the driver's progress, since it also runs in the background."""
    try:
        return ray.get(references, timeout=timeout_s)
    except RayError as error:
        if known := as_verl_error(error, f"copying between run folders ('{method}')", timeout_s):
            raise known from error
        raise


def _mark_of(path: Path) -> Path:
    """A file beside a folder that marks it as a copy, which will be removed."""
    return path.with_name(f".{path.name}.lent")


def _files(folder: Path) -> list[tuple[str, int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def _as_storage_error(path: str) -> AbstractContextManager[None]:
    """Raise StorageError, with the name of this host, in place of an OSError of the block, which uses `path`."""
    host = socket.gethostname()
    return translated(OSError, lambda error: StorageError(f"on host {host}: {could_not_write(Path(path), error)}"))
