"""The server that a reward calls (`reward.launch`: a judge, say), which starts and ends with the run."""

from __future__ import annotations

from typing import Any

import ray

from verl.config import Config
from verl.errors import RewardUnavailable, WorkerError
from verl.process.ranks import variables_of_driver
from verl.process.startup import phase, tell
from verl.single_controller import ResourcePool, wait_for
from verl.single_controller.node_server import Launch, StartedServer, end_servers, start_server
from verl.single_controller.worker_group import A_BIT, JOINING_S, NO_GPUS
from verl.trainer.sampling.scoring import Scorer

LOOPBACK = "127.0.0.1"


def reserve_reward_server(config: Config, timeout_s: float) -> ResourcePool | None:
    """Reserve the server's GPUs, on one node; None if it uses none. Raises WorkerError when no node has enough left."""
    reward = config.reward
    if not reward.n_gpus:
        return None
    pool = ResourcePool(1, reward.n_gpus, "cuda")
    try:
        pool.reserve(min(JOINING_S, timeout_s))  # what this run holds of the cluster does not become free
    except WorkerError as error:
        raise WorkerError(
            f"the server of reward.launch needs reward.n_gpus={reward.n_gpus} GPUs of one node in addition to "
            f"those of the other roles: {error}"
        ) from error
    return pool


class RewardServer:
    """Starts `reward.launch`, if set, on `pool`, or without a pool on the driver's node."""

    def __init__(self, config: Config, pool: ResourcePool | None) -> None:
        self._started: StartedServer | None = None
        self._timeout_s = config.trainer.step_timeout_s
        self.address: str | None = None  # host:port, as the driver reaches it
        reward = config.reward
        if reward.launch is None:
            return

        # On the driver's node it need not listen on more than the loopback address.
        own = ray.util.get_node_ip_address()
        node = pool.address if pool else own
        host = LOOPBACK if node == own else node
        self.address = f"[{host}]:{reward.port}" if ":" in host else f"{host}:{reward.port}"
        unheard = "; it must listen on all addresses of its node (such as --host 0.0.0.0)"
        launch = Launch(
            reward.launch,
            host,
            reward.port,
            name="reward server",
            setting="reward.launch",
            already="where reward.launch would start a server: stop the other program, or set another reward.port",
            unheard="" if host == LOOPBACK else unheard,
            error=RewardUnavailable,
            variables={"PORT": str(reward.port)},
        )
        tell(f"starting the reward's server on {node}")
        self._started = start_server(launch, _options(pool, own), self._timeout_s)

    def check(self, scorer: Scorer) -> None:
        """Wait until the server listens, and let the reward call it once. Raises the reward's errors, and
        RewardUnavailable.
        """
        if self._started is None:
            return
        with phase("waiting for the reward's server"):
            [log] = wait_for([self._started.ready], "start of the reward's server", self._timeout_s)
            tell(f"the reward's server listens at {self.address}; its log there is {log}")
            scorer.check()

    def close(self) -> None:
        if self._started is not None:
            end_servers([self._started])
            self._started = None


def _options(pool: ResourcePool | None, own: str) -> dict[str, Any]:
    """The Ray options of the server's actor."""
    if pool is not None:
        return pool.actor_options(0, pool.workers_per_node)
    variables = {"env_vars": variables_of_driver() | NO_GPUS}
    return {"num_cpus": 0, "resources": {f"node:{own}": A_BIT}, "runtime_env": variables}
