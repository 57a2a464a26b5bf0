"""Typed errors. Each message says what was wrong, where it came from, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from program_end import NEEDS_A_PERSON, ExpectedError

E = TypeVar("E", bound=Exception)


@contextlib.contextmanager
def translated(caught: type[E] | tuple[type[E], ...], make: Callable[[E], VerlError]) -> Iterator[None]:
    """Raise `make(error)` in place of an error of the block that is of type `caught`."""
    try:
        yield
    except caught as error:
        raise make(error) from error


class VerlError(ExpectedError):
    """Base of every error this project raises on purpose; entry points print it without a traceback."""


class ConfigError(VerlError):
    """A configuration value or key that cannot be used."""

    exit_status = NEEDS_A_PERSON


class DataError(VerlError):
    """A prompt or training file that is missing, empty or malformed."""

    exit_status = NEEDS_A_PERSON


class EnvironmentUnavailable(VerlError):
    """The environment's infrastructure (a retriever, say) did not answer within its deadline."""


class RewardUnavailable(VerlError):
    """The reward of a trajectory is not available (a judge is down): it is masked and counted, never scored 0."""


class RewardError(VerlError):
    """A reward raised an error, or gave something that is no finite number: its code has to be changed."""

    exit_status = NEEDS_A_PERSON


class RolloutError(VerlError):
    """Sampling failed, or too many trajectories of a step failed."""


class SamplingAbandoned(RolloutError):
    """Sampling was cancelled: its results are no longer needed."""


class WeightsInTraining(RolloutError):
    """Restarted engines have no weights, and the trainer's are changing at the moment."""


class EngineDied(RolloutError):
    """The process of a rollout engine ended unexpectedly."""


class WeightSyncError(VerlError):
    """The sampler's weights are not the trainer's: version or checksum differ."""


class NumericalError(VerlError):
    """NaN or Inf in a loss, a log-prob, a weight or a reward."""


class WorkerError(VerlError):
    """A worker process ended or did not answer within its deadline."""


class WorkerDied(WorkerError):
    """A worker process ended unexpectedly."""


class Stalled(WorkerError):
    """A worker did not answer within its deadline."""


class DeviceOutOfMemory(VerlError):
    """A device has no memory left for what a phase needs: the same settings would fail again."""

    exit_status = NEEDS_A_PERSON


class CheckpointError(VerlError):
    """A checkpoint could not be written or read."""


class StorageError(VerlError):
    """A file of the run could not be written: the disk is full, read-only or gone."""


class SweepIncomplete(VerlError):
    """Some runs of a sweep did not finish."""


class TrainingCollapsed(VerlError):
    """The collapse guard ended the run."""

    exit_status = NEEDS_A_PERSON
