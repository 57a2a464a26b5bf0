"""A retriever on each node that samples (`retriever.placement=per_node`), which starts and ends with the run."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from verl.config import Config
from verl.errors import EnvironmentUnavailable
from verl.single_controller import ResourcePool
from verl.single_controller.node_server import Launch, StartedServer, end_servers, start_server

ALREADY = (
    "where retriever.placement=per_node would start a retriever: stop the other program, or set "
    "retriever.placement=apart to use it"
)


class NodeRetrievers:
    """The retrievers of a run, by the address of their node; none unless the config asks for them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started: dict[str, StartedServer] = {}

    def ready_at(self, pool: ResourcePool, node: int) -> Any:
        """A reference that is ready when a node of `pool` has its retriever; None if the run does not start one."""
        retriever = self._config.retriever
        if retriever.placement != "per_node" or retriever.launch is None:
            return None
        address = pool.nodes[node].address if pool.nodes else ""
        # All engines of a node share one server.
        if address not in self._started:
            parts = urlsplit(retriever.url)
            launch = Launch(
                retriever.launch,
                parts.hostname or "",
                parts.port or 80,
                name="retriever",
                setting="retriever.launch",
                already=ALREADY,
                unheard="",
                error=EnvironmentUnavailable,
            )
            timeout_s = self._config.trainer.step_timeout_s
            self._started[address] = start_server(launch, pool.plain_options(node), timeout_s)
        return self._started[address].ready

    def leave(self, address: str) -> None:
        """End the retriever of a node that is lost, or not used any more."""
        if address in self._started:
            end_servers([self._started.pop(address)])

    def close(self) -> None:
        started, self._started = list(self._started.values()), {}
        end_servers(started)
