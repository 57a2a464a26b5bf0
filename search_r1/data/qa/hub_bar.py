"""The progress bar of huggingface_hub's downloads, in the style of all other bars here."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from long_task import BYTES, Progress


class HubBar:
    """A bar to pass as `tqdm_class`; it has those of tqdm's methods that the hub's client calls."""

    def __init__(self, *_: Any, desc: str = "", total: int | None = None, initial: int = 0, **__: Any) -> None:
        self._progress = Progress(f"fetch {desc}", total, initial, BYTES)

    def __enter__(self) -> HubBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, count: float = 1) -> None:
        self._progress.update(int(count))

    def close(self) -> None:
        self._progress.close()

    def __getattr__(self, name: str) -> Any:
        """A method of tqdm's bar that sets a name or a suffix, which this bar does not show."""
        if name.startswith("set_") or name == "refresh":
            return lambda *_, **__: None
        raise AttributeError(name)
