"""The machines of the simulated world: nodes that start tenants, fall silent, leave, vanish."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device
from jigsawrl.devices.base import check_shares
from tests.unit.core.tenants import Process

if TYPE_CHECKING:
    from tests.unit.core.world import World

NodeCommand = c.StartTenant | c.StopTenant | c.RestartTenant | c.SetShares | c.ReleaseNode


class Machine:
    """One machine, through all boots of its node."""

    def __init__(self, name: str, memory_bytes: tuple[int, ...]) -> None:
        each = enumerate(memory_bytes)
        self.devices = tuple(Device(name, i, "cpu", num_bytes) for i, num_bytes in each)
        self.node = Worker(id=name, boot="")
        self.is_up = False
        self.orders: dict[str, c.StartTenant] = {}
        self.running: dict[str, Process] = {}
        self.silent_until_s = 0.0


class Machines:
    """All of a world's."""

    def __init__(self, world: World, memory_bytes: Mapping[str, tuple[int, ...]]) -> None:
        """`memory_bytes` of each device of each machine. All share one folder of runs."""
        self._world = world
        self._boots = itertools.count(1)
        self.by_name = {name: Machine(name, each) for name, each in memory_bytes.items()}
        self.shares: dict[str, dict[str, float]] = {}
        """By device, as its node was asked."""
        self.num_restarts = 0
        self.num_released = 0
        self.end_s = 0.0
        """What a tenant that is told to stop takes for it."""

    def start(self, name: str) -> None:
        """A new boot of its node; what an older one ran is gone."""
        machine = self.by_name[name]
        self._clear(machine)
        machine.node = Worker(id=name, boot=f"n{next(self._boots)}")
        machine.is_up, machine.silent_until_s = True, 0.0
        self._world.publish(
            e.NodeStarted(
                id=self._world.new_id("node"),
                node=machine.node,
                devices=machine.devices,
                runs_id="shared",
            )
        )

    def vanish(self, name: str) -> None:
        """The machine loses its power."""
        machine = self.by_name[name]
        machine.is_up = False
        self._clear(machine)

    def leave(self, name: str, *, notice_s: float) -> None:
        """Its node is told to stop, and stops once released, or after `notice_s`."""
        node = self.by_name[name].node
        id = self._world.new_id("leaving")
        self._world.publish(e.NodeLeaving(id=id, node=node, notice_s=notice_s, reason="told to"))
        self._world.later(notice_s, lambda: self._stop(node))

    def _stop(self, node: Worker) -> None:
        machine = self.by_name[node.id]
        if machine.node == node and machine.is_up:
            self.vanish(node.id)
            id = self._world.new_id("stopped")
            self._world.publish(e.NodeStopped(id=id, node=node, reason="told to"))

    def _clear(self, machine: Machine) -> None:
        for process in machine.running.values():
            process.alive = False
        machine.running, machine.orders = {}, {}
        for device in machine.devices:
            self.shares.pop(device.id, None)

    def beat(self) -> None:
        """Heartbeats of those that are heard."""
        for machine in self.by_name.values():
            if machine.is_up and self._world.now_s >= machine.silent_until_s:
                id = self._world.new_id("heartbeat")
                self._world.publish(e.Heartbeat(id=id, node=machine.node))

    def deliver(self, command: c.Command) -> bool:
        """Whether it was one for a node, which carries it out soon if it lives."""
        if not isinstance(command, NodeCommand):
            return False
        self._world.later(0.05, lambda: self._handle(command))
        return True

    def _handle(self, command: NodeCommand) -> None:
        machine = self.by_name.get(command.worker.id)
        if machine is None or command.worker != machine.node or not machine.is_up:
            return
        if isinstance(command, c.StartTenant):
            machine.orders[command.tenant] = command
            self.spawn(command)
        elif isinstance(command, c.RestartTenant):
            self._restart(machine, command)
        elif isinstance(command, c.SetShares):
            self._divide(machine, command.device, dict(command.shares))
        elif isinstance(command, c.StopTenant):
            self._stop_tenant(machine, command.tenant)
            id = self._world.new_id("tenant-stopped")
            stopped = e.TenantStopped(id=id, node=machine.node, tenant=command.tenant)
            self._world.later(self.end_s, lambda: self._world.publish(stopped))
        else:
            self.num_released += 1
            self._stop(machine.node)

    def _stop_tenant(self, machine: Machine, tenant: str) -> None:
        machine.orders.pop(tenant, None)
        for device in machine.devices:
            self.shares.get(device.id, {}).pop(tenant, None)
        process = machine.running.pop(tenant, None)
        if process is not None:
            process.alive = False
            if self._world.processes.get(tenant) is process:
                del self._world.processes[tenant]

    def spawn(self, order: c.StartTenant) -> None:
        """A process of a tenant, unless its order was taken back."""
        machine = self.by_name[order.worker.id]
        if machine.orders.get(order.tenant) is not order:
            return
        worker = Worker(id=order.tenant, boot=f"b{next(self._boots)}")
        process = Process(worker, order)
        self._world.processes[order.tenant] = machine.running[order.tenant] = process
        if order.device is not None:
            asked = {order.tenant: order.share} | self.shares.get(order.device, {})
            self._divide(machine, order.device, asked)
        self._world.say(
            process,
            e.WorkerStarted(
                id=self._world.new_id("started"),
                pipeline=order.pipeline,
                worker=worker,
                role=order.role,
                node=machine.node.id,
                device=order.device,
            ),
        )

    def _divide(self, machine: Machine, device: str, shares: dict[str, float]) -> None:
        """Apply exactly what is asked, which the node would refuse where it is no division."""
        check_shares(device, shares)
        self.shares[device] = shares
        entries = (
            parts.AppliedShare(tenant=tenant, asked=share, applied=share)
            for tenant, share in shares.items()
            if tenant in machine.running
        )
        event = e.SharesApplied(
            id=self._world.new_id("shares"),
            node=machine.node,
            device=device,
            shares=tuple(entries),
            mechanism="simulated",
        )
        self._world.publish(event)

    def _restart(self, machine: Machine, command: c.RestartTenant) -> None:
        process = machine.running.get(command.tenant)
        running = process is not None and process.alive
        if process is not None and running and command.boot in (None, process.worker.boot):
            process.alive = False
            self.num_restarts += 1
            self._world.later(0.4, lambda: self.spawn(process.order))

    def kill(self, process: Process) -> None:
        """A crash; the node sees it (perhaps after the next start) and restarts it."""
        process.alive = False
        order = process.order
        exited = e.WorkerExited(
            id=self._world.new_id("exited"),
            pipeline=order.pipeline,
            worker=process.worker,
            exit_code=-9,
            reason="killed",
        )
        self._world.later(self._world.random.uniform(0.0, 0.8), lambda: self._world.publish(exited))
        self._world.later(0.4, lambda: self.spawn(order))

    def harm(self) -> None:
        """Silence, loss and leave, as probable as the world's faults say; all come back."""
        world, faults = self._world, self._world.faults
        for name, machine in self.by_name.items():
            if not machine.is_up:
                continue
            if world.chance(faults.silence_per_s):
                machine.silent_until_s = world.now_s + 20.0
            if world.chance(faults.node_restart_per_s):
                self.start(name)
            elif world.chance(faults.node_loss_per_s):
                self.vanish(name)
                self._come_back(name)
            elif world.chance(faults.node_leave_per_s):
                self.leave(name, notice_s=world.random.uniform(0.5, 20.0))
                self._come_back(name)

    def _come_back(self, name: str) -> None:
        self._world.later(self._world.random.uniform(21.0, 60.0), lambda: self.start(name))
