"""Where workers run, and how one call is sent to a group of them."""

from verl.single_controller.waiting import wait_for, wait_for_any
from verl.single_controller.worker_group import Node, ResourcePool, WorkerGroup, device_of_cluster

__all__ = ["Node", "ResourcePool", "WorkerGroup", "device_of_cluster", "wait_for", "wait_for_any"]
