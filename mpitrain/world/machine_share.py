"""The share of this rank in its host: an accelerator, and cores."""

from __future__ import annotations

import dataclasses
import os
from typing import TypeVar

from mpitrain.comm.communicator import Communicator
from mpitrain.runtime import devices as device_rules
from mpitrain.runtime import gpus
from mpitrain.runtime import threads as thread_rules
from mpitrain.runtime.devices import DevicePlan, Visible
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import Topology
from mpitrain.world.consensus import run_on_all

Item = TypeVar("Item")


def threads(communicator: Communicator, topology: Topology, intra: int | None, inter: int | None) -> ThreadPlan:
    """Collective: this rank's share of the cores of its host."""
    cores = on_this_host(communicator, topology, thread_rules.available_cores())
    return thread_rules.plan(cores, topology.local_rank, intra, inter)


def devices(
    communicator: Communicator, topology: Topology, device: str, share: bool, memory: str | None, names: str | None
) -> DevicePlan:
    """Collective: choose this rank's accelerator, and let TensorFlow see no other."""

    def seen() -> Visible:
        found = device_rules.visible(os.environ, gpus.detect())
        return found if names is None else device_rules.narrowed(found, names)

    # Agreed before ranks compare what they see: one rank's error would else meet the others in the next exchange.
    visible = run_on_all(communicator, topology.hosts, seen)
    # A rank that wants none leaves them all to the others.
    taken = dataclasses.replace(visible, devices=()) if device == "cpu" else visible
    neighbours = on_this_host(communicator, topology, taken)
    plan = device_rules.assign(visible, topology, device, share, memory, neighbours)
    gpus.select(plan)
    if plan.device is not None or (plan.hide and visible.devices):
        gpus.limit_memory(plan)
    return plan


def on_this_host(communicator: Communicator, topology: Topology, own: Item) -> list[Item]:
    """Collective: what each rank of this host has, by local rank."""
    everyone = communicator.all_gather_obj(own)
    return [item for item, node in zip(everyone, topology.nodes, strict=True) if node == topology.node_rank]
