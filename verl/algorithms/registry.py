"""Functions found by the name a config gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Mapping[str, F], Generic[F]):
    """A read-only mapping from name to function, filled by a decorator: `@REGISTRY.register("name", "alias")`.

    `declared`: the only names that may be registered, where a table elsewhere describes them.
    """

    def __init__(self, kind: str, declared: Collection[str] | None = None) -> None:
        self.kind = kind
        self.declared = declared
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Make the decorated function available under each of `names`; a name can be taken only once."""

        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.kind} '{name}' is already registered")
                if self.declared is not None and name not in self.declared:
                    raise ValueError(f"{self.kind} '{name}' has no row in verl/algorithms/traits.py: add one")
                self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        if name not in self._functions:
            raise KeyError(f"unknown {self.kind} '{name}'; known: {', '.join(sorted(self._functions))}")
        return self._functions[name]

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)
