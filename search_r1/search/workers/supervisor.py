"""The owner process: it searches for its front ends, starts them, restarts dead ones and ends with the last one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from search_r1.http.backoff import backoff_s
from search_r1.http.metrics import Metrics
from search_r1.http.process import DRAIN_S, settle_process
from search_r1.search.server.app import AppOptions
from search_r1.search.server.source_interface import NeedsWarmUp, Source, encoded_search
from search_r1.search.workers.front_end import METRICS_VARIABLE, Settings
from search_r1.search.workers.owner_link import Offer, OwnerLink
from search_r1.search.workers.remote_source import About
from search_r1.search.workers.service_metrics import ServiceMetrics
from search_r1.search.workers.shared_address import SharedAddress

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_STEADY_S = 60.0  # a front end that lived longer did not fail because of how it was started
_STOP_S = DRAIN_S + 5.0


def serve_workers(
    source: Source, options: AppOptions, metrics: Metrics, address: SharedAddress, num_workers: int
) -> None:
    """Serve `source` by `num_workers` front ends until SIGTERM or Ctrl-C.

    A second signal ends the front ends at once.
    """
    settle_process()
    with TemporaryDirectory(prefix="retrieval-") as folder, asyncio.Runner() as runner:
        runner.run(Supervisor(source, options, metrics, address, Path(folder)).run(num_workers))
    _LOG.info("stopped")


class Supervisor:
    """Keeps front ends running. They are processes of their own session, so that Ctrl-C reaches only this one."""

    def __init__(
        self, source: Source, options: AppOptions, metrics: Metrics, address: SharedAddress, folder: Path
    ) -> None:
        """`folder` is private: front ends count in it."""
        self._source = source
        about = About(source.name, source.num_passages, source.version, source.batch_size)
        self._settings = Settings(about, options).to_json()
        self._address = address
        self._environment = os.environ | {METRICS_VARIABLE: str(folder)}
        self._offer = Offer(encoded_search(source), self._warm_up, ServiceMetrics(metrics.registry, folder).render)
        self._warming: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._forced = False
        self._processes: set[asyncio.subprocess.Process] = set()

    async def run(self, num_workers: int) -> None:
        """Returns when all front ends have ended after the first signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        if isinstance(self._source, NeedsWarmUp):
            self._warming = asyncio.create_task(self._source.warm_up())
        keepers = [asyncio.create_task(self._keep_one()) for _ in range(num_workers)]
        await self._stopping.wait()
        await asyncio.wait(keepers, timeout=_STOP_S)
        self._signal_all(signal.SIGKILL)
        await asyncio.gather(*keepers)
        if not self._forced:  # closing waits for the search that runs
            closing = self._source.close()
            if inspect.isawaitable(closing):
                await closing

    async def _warm_up(self) -> None:
        """It runs once; every front end waits for it."""
        if self._warming:
            await asyncio.shield(self._warming)

    async def _keep_one(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            start = time.monotonic()
            ended = await self._run_one()
            if self._stopping.is_set():
                return
            attempt = 1 if time.monotonic() - start > _STEADY_S else attempt + 1
            pause_s = backoff_s(attempt, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            _LOG.error("a front end ended (%s); another one starts in %.1f s", ended, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_one(self) -> str:
        """How the front end ended."""
        try:
            process = await self._start()
        except OSError as error:
            return f"it could not be started: {error}"
        self._processes.add(process)
        if self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        self._processes.discard(process)
        return f"process {process.pid}, exit code {code}"

    async def _start(self) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()  # a Unix socket without a name: nobody else can connect
        with theirs, self._address.open() as listener:  # this process must not hold what it does not serve
            files = theirs.fileno(), listener.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "search_r1.search.workers.front_end", *map(str, files)),
                pass_fds=files,
                env=self._environment,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: OwnerLink(self._offer).link, sock=ours)
        assert process.stdin is not None
        process.stdin.write(self._settings)
        process.stdin.close()
        return process

    def _stop(self) -> None:
        self._forced = self._stopping.is_set()
        self._signal_all(signal.SIGKILL if self._forced else signal.SIGTERM)
        self._stopping.set()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)
