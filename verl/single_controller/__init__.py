"""Where workers run, and how one call fans out to a group of them and comes back."""

from verl.single_controller.resource_pool import Node, ResourcePool, device_of_cluster
from verl.single_controller.waiting import wait_for, wait_for_any
from verl.single_controller.worker_group import WorkerGroup

__all__ = ["Node", "ResourcePool", "WorkerGroup", "device_of_cluster", "wait_for", "wait_for_any"]
