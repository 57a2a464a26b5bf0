"""What Ray keeps of the calls to a role's workers."""

from __future__ import annotations

import time
from typing import Any

from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated.gcs_service_pb2_grpc import TaskInfoGcsServiceStub

from verl.single_controller import ResourcePool


class Echo:
    def said_by_ours(self) -> None: ...

    def said_by_theirs(self) -> None: ...


def known_calls(ray: Any) -> list[str]:
    service = TaskInfoGcsServiceStub(init_grpc_channel(ray.get_runtime_context().gcs_address))
    events = service.GetTaskEvents(messages.GetTaskEventsRequest()).events_by_task
    return [event.task_info.name for event in events]


def test_ray_keeps_no_record_of_calls(ray_session: Any) -> None:
    """It would be of 100,000 calls, in the memory of its control service."""
    ray = ray_session
    ours = ray.remote(Echo).options(**ResourcePool(1, 1, "cpu").actor_options(0)).remote()
    theirs = ray.remote(Echo).options(num_cpus=0).remote()
    ray.get([ours.said_by_ours.remote() for _ in range(5)])
    time.sleep(2)  # a worker reports every second
    ray.get([theirs.said_by_theirs.remote() for _ in range(5)])
    end = time.monotonic() + 120
    while known_calls(ray).count("Echo.said_by_theirs") < 5 and time.monotonic() < end:
        time.sleep(0.2)
    calls = known_calls(ray)
    assert calls.count("Echo.said_by_theirs") == 5 and "Echo.said_by_ours" not in calls
    for actor in (ours, theirs):
        ray.kill(actor)
