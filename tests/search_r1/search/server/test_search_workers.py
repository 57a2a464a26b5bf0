"""One service in several processes: real front ends and a real owner, compared with one process."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests
from e2e_world import free_port
from search_scheduling import PATIENCE_S, wait_until

from search_r1 import errors
from search_r1.errors import OnlineBusy, SearchError, SearchFailed, ServerError, ServiceUnavailable
from search_r1.http.process import bind
from search_r1.search.server.source_interface import EncodedHit
from search_r1.search.workers.link import Link
from search_r1.search.workers.messages import (
    ASK,
    CANCEL,
    HEADER,
    pack_error,
    pack_outcomes,
    pack_queries,
    unpack_error,
    unpack_outcomes,
    unpack_queries,
)
from search_r1.search.workers.owner_link import Offer, OwnerLink
from search_r1.search.workers.shared_address import SharedAddress

_ROOT = Path(__file__).resolve().parents[4]
_STAGE = Path(__file__).parents[1] / "workers_stage.py"
_CLI = ("-m", "search_r1.search.retrieval_server", "--retriever_name", "bm25", "--topk", "2")


class Workers:
    """A running service: the owner's process, its address, and the file that holds searches back."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.hold = folder / "hold"
        self.folder = folder

    def ask(self, *queries: str, **headers: str) -> requests.Response:
        body = {"queries": list(queries), "return_scores": True}
        return requests.post(f"{self.url}/retrieve", json=body, headers=headers, timeout=PATIENCE_S)

    def status(self, route: str) -> int:
        return requests.get(f"{self.url}{route}", timeout=PATIENCE_S).status_code

    def value(self, sample: str) -> float:
        """A value of /metrics, added up over the labels that `sample` leaves open."""
        text = requests.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        values = re.findall(rf"^{re.escape(sample)}(?:{{.*?}})? (\S+)$", text, re.MULTILINE)
        assert values, f"{sample} is not in {text}"
        return sum(map(float, values))

    def front_ends(self) -> set[int]:
        return set(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def connections(self) -> Counter[int]:
        """How many clients each front end has."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = {row[9] for row in rows if row[1].endswith(f":{self.port:04X}") and row[3] == "01"}
        found: Counter[int] = Counter()
        for pid in self.front_ends():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed since it was listed
                    found[pid] += os.readlink(link).removeprefix("socket:[").removesuffix("]") in ours
        return +found

    def release(self) -> None:
        self.hold.unlink()

    def counting_folders(self) -> list[Path]:
        return list((self.folder / "tmp").glob("retrieval-*"))

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """The exit code and the log; the log ends when the last process that can write to it has ended."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log


Start = Callable[..., Workers]


@contextmanager
def _running(environment: dict[str, str], corpus: Path) -> Iterator[Start]:
    """`start(*command)` runs a program of several processes; its temporary files are in a folder of their own."""
    started: list[Workers] = []
    folder = corpus.parent
    (folder / "tmp").mkdir()

    def start(*command: str, ready: bool = True) -> Workers:
        port = free_port()
        arguments = [*command, "--corpus_path", str(corpus), "--port", str(port)]
        if command[0] == str(_STAGE):
            arguments += ["--hold", str(folder / "hold")]
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env=environment | {"TMPDIR": str(folder / "tmp")},
            stderr=subprocess.PIPE,
            text=True,
        )
        workers = Workers(process, port, folder)
        started.append(workers)
        wait_until(lambda: process.poll() is not None or _answers(workers, "/readyz" if ready else "/healthz"))
        assert process.poll() is None, process.communicate()[1]
        wait_until(lambda: len(_reached(workers)) == 2)
        return workers

    try:
        yield start
    finally:
        (folder / "hold").unlink(missing_ok=True)
        for workers in started:
            if workers.process.returncode is None:
                workers.end(signal.SIGTERM)


def _answers(workers: Workers, route: str) -> bool:
    try:
        return workers.status(route) == 200
    except requests.ConnectionError:
        return False


def _reached(workers: Workers) -> set[int]:
    """The front ends that take connections."""
    clients = [socket.create_connection(("127.0.0.1", workers.port)) for _ in range(32)]
    try:
        wait_until(lambda: workers.connections().total() >= len(clients))
        return set(workers.connections())
    finally:
        for client in clients:
            client.close()


@pytest.fixture
def start(server_environment: dict[str, str], corpus_file: Path) -> Iterator[Start]:
    with _running(server_environment, corpus_file) as start:
        yield start


@pytest.fixture(scope="module")
def held(
    server_environment: dict[str, str],
    write_corpus: Callable[[Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Workers]:
    """Two front ends; five queries may wait."""
    corpus = write_corpus(tmp_path_factory.mktemp("held") / "corpus.jsonl")
    with _running(server_environment, corpus) as start:
        yield start(str(_STAGE), "--max_queue", "5")


@contextmanager
def _busy(workers: Workers, query: str) -> Iterator[ThreadPoolExecutor]:
    """Searches are held back, and one of `query` has begun. At the end they go on."""
    queued = workers.value("retrieval_cache_misses_total")
    workers.hold.touch()
    with ThreadPoolExecutor(32) as pool:
        running = pool.submit(workers.ask, query)
        try:
            wait_until(lambda: workers.value("retrieval_cache_misses_total") == queued + 1)
            wait_until(lambda: workers.value("retrieval_queue_queries") == 0)
            yield pool
        finally:
            workers.hold.unlink(missing_ok=True)
        assert running.result().status_code == 200


_REQUESTS = [
    ("POST", "/retrieve", {"queries": ["the river of Morn", "", "zyxxy", "東京"], "topk": 3, "return_scores": True}),
    ("POST", "/retrieve", {"query": "capital of Tarsia"}),
    ("POST", "/retrieve", {"queries": []}),
    ("POST", "/retrieve", {"queries": [f"Morn river {number}" for number in range(2560)], "return_scores": True}),
    ("POST", "/retrieve", {"queries": "Morn"}),
    ("POST", "/retrieve", {"queries": ["Morn"], "topk": 101}),
    ("POST", "/search", {"query": "Morn", "top_n": 1, "return_score": True}),
    ("POST", "/search", {"query": " "}),
    ("POST", "/batch_search", {"query": ["Morn", "Tarsia", "volcano"], "return_score": True}),
    ("GET", "/healthz", None),
    ("GET", "/readyz", None),
    ("GET", "/health", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nowhere", None),
]


def test_every_route_answers_as_one_process_does(small_server: str, start: Start) -> None:
    workers = start(*_CLI, "--workers", "2")

    def answers(server: str) -> list[tuple[int, str | None, bytes]]:
        replies = [requests.request(method, server + route, json=body) for method, route, body in _REQUESTS]
        return [(reply.status_code, reply.headers.get("content-type"), reply.content) for reply in replies]

    alone = answers(small_server)
    assert [status for status, _, _ in alone] == [200] * 4 + [422, 422, 200, 400, 200, 200, 200, 200, 200, 404]
    for _ in range(2):  # a second time from the cache
        assert answers(workers.url) == alone
    code, log = workers.end(signal.SIGINT)
    assert code == 0 and "Traceback" not in log


def test_the_token_guards_all_front_ends_and_is_not_in_their_command_line(start: Start) -> None:
    workers = start(*_CLI, "--workers", "2", "--auth_token", "s3cret", ready=False)
    wait_until(lambda: workers.ask("Morn", Authorization="Bearer s3cret").status_code == 200)
    for _ in range(16):  # every request is a connection of its own
        assert workers.ask("Morn").status_code == workers.status("/metrics") == 401
        assert workers.ask("Morn", Authorization="Bearer s3cret").status_code == 200
    for pid in workers.front_ends():
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"front_end" in shown and b"s3cret" not in shown


def test_only_the_owner_loads_numerical_libraries(held: Workers) -> None:
    libraries = re.compile("numpy|numba|llvmlite|torch|faiss|transformers")
    mapped = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in {held.process.pid} | held.front_ends()}
    assert libraries.search(mapped.pop(held.process.pid))
    assert len(mapped) == 2
    for maps in mapped.values():
        assert "pydantic_core" in maps and not libraries.search(maps)


def test_equal_queries_of_different_front_ends_are_searched_once(held: Workers) -> None:
    searched, shared = held.value("retrieval_batch_queries_sum"), held.value("retrieval_shared_queries_total")
    with _busy(held, "city of once") as pool:
        replies = [pool.submit(held.ask, "river  of once") for _ in range(16)]
        wait_until(lambda: held.value("retrieval_shared_queries_total") == shared + 15)
        assert len(held.connections()) == 2 and held.connections().total() >= 17
        held.release()
        assert len({reply.result().content for reply in replies}) == 1
    assert replies[0].result().json()["result"][0][0]["document"]["id"] == "p20"
    assert held.value("retrieval_batch_queries_sum") == searched + 2


def test_a_full_queue_is_503_and_counted_in_the_metrics_of_the_service(held: Workers) -> None:
    rejected = held.value("retrieval_rejected_total")
    with _busy(held, "city of full") as pool:
        waiting = pool.submit(held.ask, *(f"Morn full {number}" for number in range(5)))
        wait_until(lambda: held.value("retrieval_queue_queries") == 5)
        refused = [held.ask("one more full") for _ in range(8)]
        held.release()
        assert waiting.result().status_code == 200
    for reply in refused:
        assert reply.status_code == 503 and int(reply.headers["Retry-After"]) >= 1
        assert reply.json()["detail"].startswith("5 queries are queued and the limit is 5")
    for _ in range(8):  # whichever front end shows it
        assert held.value("retrieval_rejected_total") == rejected + 8


def test_what_has_no_time_left_is_dropped_by_the_owner(held: Workers) -> None:
    searched, expired = held.value("retrieval_batch_queries_sum"), held.value("retrieval_expired_total")
    with _busy(held, "city of late"):
        queued = held.value("retrieval_cache_misses_total")
        reply = held.ask("Morn late", **{"X-Deadline-Ms": "2000"})
        assert held.value("retrieval_cache_misses_total") == queued + 1
        wait_until(lambda: held.value("retrieval_queue_queries") == 0)
    assert reply.status_code == 504 and reply.json()["detail"] == "not answered within the deadline of 2 s"
    assert held.value("retrieval_expired_total") == expired + 1
    assert held.value("retrieval_batch_queries_sum") == searched + 1


def test_the_queries_of_a_client_that_leaves_are_dropped_by_the_owner(held: Workers) -> None:
    searched, gone = held.value("retrieval_batch_queries_sum"), held.value("retrieval_gone_total")
    body = b'{"queries": ["Morn gone"]}'
    with _busy(held, "city of gone"):
        with socket.create_connection(("127.0.0.1", held.port)) as client:
            client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            wait_until(lambda: held.value("retrieval_queue_queries") == 1)
        wait_until(lambda: held.value("retrieval_queue_queries") == 0)
    wait_until(lambda: held.value("retrieval_gone_total") == gone + 1)
    assert held.value("retrieval_batch_queries_sum") == searched + 1


def test_a_failed_search_is_500_with_its_message(held: Workers) -> None:
    failed = held.value("retrieval_errors_total")
    reply = held.ask("poison")
    assert reply.status_code == 500
    assert reply.json()["detail"] == "the bm25 retriever failed: RuntimeError: a poisoned query"
    assert held.value("retrieval_errors_total") == failed + 1
    assert "pid=" not in requests.get(f"{held.url}/metrics", timeout=PATIENCE_S).text  # one service, one set of series
    memory = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{held.process.pid}/status").read_text())[1]) * 1024
    assert held.value("process_resident_memory_bytes") == pytest.approx(memory, rel=0.2)


def test_no_front_end_is_ready_before_the_owner_has_searched_and_a_stop_drains(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    workers = start(str(_STAGE), ready=False)
    assert {workers.status("/readyz") for _ in range(8)} == {503}
    os.kill(killed := min(workers.front_ends()), signal.SIGKILL)  # the others wait on for the same warm-up
    wait_until(lambda: killed not in workers.front_ends() and len(_reached(workers)) == 2)
    assert {workers.status("/readyz") for _ in range(8)} == {503}
    workers.release()
    wait_until(lambda: [workers.status("/readyz") for _ in range(8)] == [200] * 8)
    (folder,) = workers.counting_folders()
    assert folder.stat().st_mode & 0o777 == 0o700

    with _busy(workers, "capital of Tarsia") as pool:
        stopped = pool.submit(workers.end, signal.SIGTERM)
        wait_until(lambda: _refused(workers))
        assert not stopped.done()
    code, log = stopped.result()
    assert code == 0 and "Traceback" not in log and log.count("front end ended") == 1
    assert not folder.exists()
    with pytest.raises(requests.ConnectionError):
        workers.status("/healthz")


def _refused(workers: Workers) -> bool:
    try:
        reply = workers.ask("")  # until then it is answered without a search
    except requests.ConnectionError:  # a front end that has nothing to finish closes what it has not read
        return False
    return reply.status_code == 503 and reply.json()["detail"] == "the server is stopping"


def test_a_front_end_that_is_killed_is_replaced_and_its_queries_are_dropped(start: Start) -> None:
    workers = start(str(_STAGE))
    for number in range(16):
        assert workers.ask(f"before {number}").status_code == 200
    killed = min(workers.front_ends())
    with _busy(workers, "city of the survivor") as pool:
        if killed in workers.connections():  # it must not have the query that runs
            killed = max(workers.front_ends())
        asked = [pool.submit(workers.ask, f"Morn {number}") for number in range(16)]
        wait_until(lambda: workers.value("retrieval_queue_queries") == 16)
        of_killed = workers.connections()[killed]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in workers.front_ends())
        wait_until(lambda: workers.value("retrieval_queue_queries") == 16 - of_killed)
        wait_until(lambda: len(workers.front_ends()) == 2)
        workers.release()
        ends = Counter(type(call.exception()).__name__ for call in asked)
    assert ends == {"NoneType": 16 - of_killed, "ConnectionError": of_killed} and 0 < of_killed < 16
    wait_until(lambda: _reached(workers) == workers.front_ends())
    # what the dead one counted of the 16 before stays
    answered = 'retrieval_requests_total{route="/retrieve",status="200"}'
    wait_until(lambda: workers.value(answered) == 16 + 1 + 16 - of_killed)
    code, log = workers.end(signal.SIGTERM)
    assert code == 0 and f"a front end ended (process {killed}, exit code -9); another one starts in" in log


def test_a_second_signal_ends_the_service_at_once(start: Start) -> None:
    workers = start(str(_STAGE))
    (folder,) = workers.counting_folders()
    workers.hold.touch()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(workers.ask, "capital of Tarsia")
        wait_until(lambda: workers.value("retrieval_cache_misses_total") == 1)
        workers.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _refused(workers))
        begin = time.monotonic()
        code, log = workers.end(signal.SIGINT)
        assert time.monotonic() - begin < 20 and isinstance(running.exception(), requests.ConnectionError)
    assert code == 0 and "Traceback" not in log and not folder.exists()


def test_front_ends_end_with_the_owner(start: Start) -> None:
    workers = start(str(_STAGE))
    front_ends, (folder,) = workers.front_ends(), workers.counting_folders()
    assert len(front_ends) == 2
    code, log = workers.end(signal.SIGKILL)  # returns when the front ends have closed the log too
    assert code == -9 and "Traceback" not in log
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in front_ends))
    assert not folder.exists()
    with pytest.raises(requests.ConnectionError):
        workers.status("/healthz")


@pytest.mark.parametrize(("workers", "message"), [("0", "error: --workers is 0; it must be at least 1\n"), ("2", None)])
def test_bad_arguments_and_a_port_in_use_are_one_line(
    held: Workers, server_environment: dict[str, str], workers: str, message: str | None
) -> None:
    arguments = [*_CLI, "--workers", workers, "--port", str(held.port), "--corpus_path", "/never/read"]
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env=server_environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr == message if message else f"error: cannot listen on 127.0.0.1:{held.port}" in ended.stderr


@pytest.mark.parametrize("chosen_by_kernel", [True, False])
def test_a_shared_address_is_shared_only_by_its_own_sockets(chosen_by_kernel: bool) -> None:
    first = bind("127.0.0.1", 0 if chosen_by_kernel else free_port())
    port = first.getsockname()[1]
    with first, bind("127.0.0.1", port) as loading, bind("127.0.0.1", port) as alone:
        address = SharedAddress(first)
        with pytest.raises(ConnectionRefusedError):  # nobody serves yet
            socket.create_connection(("127.0.0.1", port))
        for _ in range(2):  # before a front end listens, and while one does
            with pytest.raises(ServerError, match=f"cannot listen on .*{port}.*another --port"):
                SharedAddress(loading)
            with pytest.raises(OSError, match="in use"):
                alone.listen()
            with pytest.raises(ServerError, match="cannot listen"):
                bind("127.0.0.1", port)
            serving = address.open()
            serving.listen()
        with socket.create_connection(("127.0.0.1", port)):
            serving.close()


def test_queries_and_answers_arrive_as_they_were() -> None:
    queries = ["", "Morn", "東京 \ud800", "a\nb" * 1000]
    for wait_s in (0.25, math.inf):
        assert unpack_queries(memoryview(b"".join(pack_queries(queries, 100, wait_s)))) == (queries, 100, wait_s)
    answers = [(EncodedHit(b'{"id": "1"}', 1.5), EncodedHit(b"", -0.1)), (), (EncodedHit("é".encode(), 1e-300),)]
    for some in ([], [()], answers):
        assert unpack_outcomes(memoryview(b"".join(pack_outcomes(some)))) == some


def test_the_errors_of_single_queries_arrive_between_the_answers() -> None:
    answer = (EncodedHit(b'{"id": "1"}', 1.5),)
    packed = pack_outcomes([SearchFailed("why"), answer, OnlineBusy("later", 2.5), ()])
    failed, answered, busy, nothing = unpack_outcomes(memoryview(b"".join(packed)))
    assert (answered, nothing) == (answer, ())
    assert type(failed) is SearchFailed and str(failed) == "why"
    assert isinstance(busy, OnlineBusy) and (str(busy), busy.retry_after_s) == ("later", 2.5)


_KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not ServiceUnavailable]


@pytest.mark.parametrize("kind", _KINDS)
def test_errors_come_back_as_the_same_class(kind: type[SearchError]) -> None:
    error = unpack_error(memoryview(pack_error(kind("why"))))
    assert type(error) is kind and str(error) == "why"


def test_an_error_of_another_module_comes_back_as_the_nearest_known_class() -> None:
    class Mine(SearchFailed):
        pass

    assert type(unpack_error(memoryview(pack_error(Mine("why"))))) is SearchFailed
    busy = unpack_error(memoryview(pack_error(ServiceUnavailable("busy", retry_after_s=7))))
    assert isinstance(busy, ServiceUnavailable) and (str(busy), busy.retry_after_s) == ("busy", 7)


@pytest.mark.parametrize("size", [1, 16, 17, 18, 30, 1000])
def test_messages_arrive_whole_whatever_the_pieces_they_come_in(size: int) -> None:
    sent = [(0, 1, b"abc"), (3, 2**63, b""), (4, 7, b"x" * 100), (1, 8, b"")]
    stream = b"".join(HEADER.pack(len(payload), kind, number) + payload for kind, number, payload in sent)
    came: list[tuple[int, int, bytes]] = []
    link = Link(lambda kind, number, payload: came.append((kind, number, bytes(payload))), lambda: None)
    for start in range(0, len(stream), size):
        link.data_received(stream[start : start + size])
    assert came == sent


def test_a_question_that_is_cancelled_as_it_arrives_leaves_nothing_behind() -> None:
    async def never(*_: object) -> None:
        raise AssertionError("it was asked")

    async def both() -> None:
        owner, question = OwnerLink(Offer(never, never, never)), b"".join(pack_queries(["q"], 1, math.inf))
        owner.link.data_received(HEADER.pack(len(question), ASK, 7) + question + HEADER.pack(0, CANCEL, 7))
        assert list(owner._running) == [7]
        await asyncio.wait(owner._running.values())
        await asyncio.sleep(0)
        assert not owner._running

    asyncio.run(both())
