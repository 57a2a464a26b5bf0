"""Buckets of weights sent once to several processes, by gloo; and what becomes of the group when one of them ends."""

from __future__ import annotations

import ast
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from e2e_world import free_port
from forked import forked

from verl.engine.files.checksum import differing, sums_of
from verl.errors import WeightSyncError
from verl.rollout.weight_sync import WeightSyncExtension, failure_of
from verl.weight_sync import group as weight_group
from verl.weight_sync.buckets import ExportedWeights, Version
from verl.weight_sync.group import Rendezvous, WeightGroup, WeightReceiver, WeightSource, end_group
from verl.weight_sync.memory import HostBuckets

CPU = torch.device("cpu")
HOST = "127.0.0.1"
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NOT_TOLD = "not done after"  # of a member that waited until the limit


def buckets_of(folder: Path) -> list[ExportedWeights]:
    """Two, which lie side by side in one file."""
    named = {
        "wide": torch.randn(300, 70),
        "bias": torch.randn(7),
        "steps": torch.tensor(12),
        "head": torch.randn(64, 9),
    }
    memory = HostBuckets(folder, 2**20)
    plan = [["wide", "bias"], ["steps", "head"]]
    return [memory.export(Version(named, plan, torch.bfloat16, 3), index) for index in range(2)]


def _receive(rank: int, driver: Any) -> None:
    """Carry out orders: (method, arguments) of a receiver, or a check of what it gives."""
    receiver = WeightReceiver(CPU)
    driver.send("ready")
    while (order := driver.recv()) is not None:
        driver.send(_carried_out(receiver, rank, *order))


def _carried_out(receiver: WeightReceiver, rank: int, method: str, *args: Any) -> Any:
    if method == "join":
        return failure_of(lambda: receiver.join(*args, rank))
    if method != "check":
        return failure_of(lambda: getattr(receiver, method)(*args))
    ticket, sums = args
    try:
        return differing(sums_of(receiver.take(ticket).items()), sums)
    except WeightSyncError as error:
        return str(error)


class Receivers:
    """Two processes, which are the ranks 1 and 2 of a group."""

    def __init__(self) -> None:
        context = forked()
        pipes = [context.Pipe() for _ in range(2)]
        self.ends = [own for own, _ in pipes]
        self.processes = [
            context.Process(target=_receive, args=(number + 1, theirs), daemon=True)
            for number, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        assert self.answers() == ["ready"] * 2  # until then they import torch

    def begin(self, *order: Any) -> None:
        for end in self.ends:
            end.send(order)

    def told(self, *order: Any) -> list[Any]:
        self.begin(*order)
        return self.answers()

    def answers(self) -> list[Any]:
        return [self.answer(number) for number in range(2)]

    def answer(self, number: int) -> Any:
        assert self.ends[number].poll(300), "no answer"
        return self.ends[number].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(30)


@pytest.fixture(scope="module")
def receivers() -> Any:
    receivers = Receivers()
    yield receivers
    receivers.close()


def joined(receivers: Receivers) -> WeightSource:
    source = WeightSource(CPU)
    receivers.begin("join", source.open(HOST, 3))
    source.join()
    assert receivers.answers() == ["", ""]
    return source


def test_all_have_the_bucket_that_was_sent_and_give_it_to_whoever_has_its_ticket(
    receivers: Receivers, tmp_path: Path
) -> None:
    source = joined(receivers)
    first, second = buckets_of(tmp_path)
    for number, bucket in enumerate((first, second, first)):
        ticket = str(number).encode()
        source.send(bucket.exports)
        assert receivers.told("receive", next(iter(bucket.exports.values())), ticket) == ["", ""]
        assert receivers.told("check", ticket, dict(bucket.sums)) == [[], []]
    assert all("was not received here" in told for told in receivers.told("check", ticket, {}))
    source.leave()


def test_a_group_that_is_left_is_no_longer_there_and_another_can_be_formed(
    receivers: Receivers, tmp_path: Path
) -> None:
    [bucket, _] = buckets_of(tmp_path)
    packed = next(iter(bucket.exports.values()))
    source = joined(receivers)
    source.leave()
    with pytest.raises(WeightSyncError, match="is in no group"):
        source.send(bucket.exports)
    for told in receivers.told("receive", packed, b""):
        assert "the broadcast of weights failed" in told and NOT_TOLD not in told
    receivers.told("leave")
    source = joined(receivers)
    source.send(bucket.exports)
    assert receivers.told("receive", packed, b"") == ["", ""]
    source.leave()


def test_who_does_not_come_is_not_waited_for_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "JOIN_S", 1.0)
    source = WeightSource(CPU)
    source.open(HOST, 2)
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join the group at 127.0.0.1:\d+"):
        source.join()
    with pytest.raises(WeightSyncError, match="rank 1 of 2 could not join"):
        WeightReceiver(CPU).join(Rendezvous(HOST, free_port(), 2), 1)


def test_who_waits_for_a_member_that_does_nothing_fails_when_the_group_is_ended(tmp_path: Path) -> None:
    """As by the driver, when an engine has died: the others would wait until their limit."""
    receivers = Receivers()
    [bucket, _] = buckets_of(tmp_path)
    packed = next(iter(bucket.exports.values()))
    source = WeightSource(CPU)
    rendezvous = source.open(HOST, 3)
    receivers.ends[0].send(("join", rendezvous))
    end_group(rendezvous)
    assert "another member has failed" in receivers.answer(0)
    assert "another member has failed" in failure_of(source.join)
    rendezvous = source.open(HOST, 3)
    receivers.begin("join", rendezvous)
    source.join()
    assert receivers.answers() == ["", ""]
    receivers.begin("receive", packed, b"")  # before anything is sent
    assert not receivers.ends[0].poll(1)
    end_group(rendezvous)
    assert all("another member has failed" in told for told in receivers.answers())
    source.leave()
    receivers.close()


def test_the_driver_goes_on_soon_where_the_sender_is_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "CONNECT_S", 1.0)
    begun = time.monotonic()
    end_group(Rendezvous(HOST, free_port(), 2))
    assert time.monotonic() - begun < 30, "it waits for longer than it was told to"


def test_a_receiver_that_ends_is_told_to_all_others(tmp_path: Path) -> None:
    receivers = Receivers()
    [bucket, _] = buckets_of(tmp_path)
    source = joined(receivers)
    assert (pid := receivers.processes[1].pid)
    os.kill(pid, signal.SIGKILL)
    receivers.processes[1].join(30)
    receivers.ends[0].send(("receive", next(iter(bucket.exports.values())), b""))
    source_told = failure_of(lambda: send_all(source, bucket))
    source.leave()
    told = receivers.answer(0)
    assert source_told or told, "nobody noticed"
    assert NOT_TOLD not in source_told + told
    receivers.close()


class Stub:
    """A class of PyTorch's that only a build with CUDA has: what its type stubs say that its methods take."""

    def __init__(self, name: str) -> None:
        tree = ast.parse(Path(torch.__file__).with_name("_C").joinpath("_distributed_c10d.pyi").read_text())
        body, self._methods = tree.body, dict[str, ast.arguments]()
        for part in name.split("."):
            [found] = [one for one in body if isinstance(one, ast.ClassDef) and one.name == part]
            body = found.body
        self._methods = {one.name: one.args for one in body if isinstance(one, ast.FunctionDef)}

    def check(self, method: str, *args: object) -> None:
        """Raise TypeError unless it takes so many arguments by position."""
        known = self._methods[method]
        most, least = len(known.args) - 1, len(known.args) - 1 - len(known.defaults)
        if not least <= len(args) <= most:
            raise TypeError(f"{method} takes {least} to {most} arguments, not {len(args)}")


class NcclByStubs:
    """ProcessGroupNCCL as its stubs have it; what it sends goes by gloo."""

    class Options:
        def __init__(self, *args: object) -> None:
            Stub("ProcessGroupNCCL.Options").check("__init__", *args)

    made: ClassVar[list[NcclByStubs]] = []

    def __init__(self, *args: Any) -> None:
        self._stub = Stub("ProcessGroupNCCL")
        self._stub.check("__init__", *args)
        store, rank, size, options = args
        assert isinstance(options, NcclByStubs.Options)
        self.handling = os.environ.get(HANDLING)
        self.is_aborted, self._group = False, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._group.broadcast(tensors, options)

    def abort(self, *args: object) -> None:
        self._stub.check("abort", *args)
        self.is_aborted = True


@pytest.mark.parametrize("before", [None, "3"])
def test_a_group_of_nccl_is_made_as_pytorch_wants_it(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """And so that a member which fails ends no process: the mode is read when the group is made, and then put back."""
    monkeypatch.delenv(HANDLING, raising=False)
    if before:
        monkeypatch.setenv(HANDLING, before)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclByStubs, raising=False)
    ones = torch.ones
    monkeypatch.setattr(torch, "zeros", lambda size, device: ones(size))  # there is no GPU that it could be on
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    group = WeightGroup(Rendezvous(HOST, store.port, 1), 0, torch.device("cuda"), store)
    [nccl] = NcclByStubs.made
    NcclByStubs.made.clear()
    assert nccl.handling == "0" and os.environ.get(HANDLING) == before
    group.finish(group.begin(ones(3)))
    group.leave()
    assert nccl.is_aborted


class NotedReceiver(WeightReceiver):
    """Joins nothing, and notes one of NCCL's settings as it is while it would."""

    proto: str | None = None

    def join(self, rendezvous: Rendezvous, rank: int) -> None:
        self.proto = os.environ.get("NCCL_PROTO")


def test_a_group_does_not_have_the_nccl_settings_of_a_batch_invariant_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer has others, and NCCL hangs where members of a group have different ones."""
    from vllm.utils import nccl

    for name in ("NCCL_PROTO", "NCCL_NO_CACHE"):
        monkeypatch.setenv(name, "")  # so that both are as they were after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)  # of the NCCL that GPU machines have
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})
    rank = WeightSyncExtension()
    rank.rank, rank.weight_receiver = 0, NotedReceiver(CPU)
    assert rank.join_weight_group(HOST, 1, 2, 1) == ""
    assert rank.weight_receiver.proto is None and os.environ["NCCL_PROTO"] == "Simple"


def send_all(source: WeightSource, bucket: ExportedWeights) -> None:
    """The second begins when the first is sent."""
    source.send(bucket.exports)
    source.send(bucket.exports)
