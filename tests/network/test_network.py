"""Machines that lose their network, on links with delay and loss; NATS servers that die and part.

Real processes on hosts of their own (`make test-network`; root, on Linux).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jigsawrl.contract.commands import StartTenant, StopTenant
from jigsawrl.contract.events import Tick
from tests.integration.live_run import GROUPS_PER_BATCH, assert_one_fate_each, conserved
from tests.network.hosts import Network, Weather, missing
from tests.network.recording import Recording
from tests.network.site import HOSTS, NODES, Site, Status

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

EVENTS = "JIG_EVENTS"

SETTINGS = ("rollout.num_workers=2", "evaluation.every=100")
"""A worker on each node; first and last version alone are evaluated."""

CUT_S = 25.0
"""At least: a node's silence is believed after 10 s, an order's lease ends after 5 s."""

FLOWS_WITHIN_S = 30.0
"""After a leader's death; what is looked at for the longest silence."""

Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Prints figures where a person sees them."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="")

    return say


@pytest.fixture
def site(tmp_path: Path, say: Say) -> Iterator[Site]:
    lack = missing()
    if lack is not None:
        pytest.fail(lack, pytrace=False)
    weather = Weather()
    with Network(tmp_path, HOSTS, weather) as network:
        say(
            f"links: {weather.delay_ms:g} ms +- {weather.jitter_ms:g} ms, {weather.loss_percent:g} %"
            f" lost, by {network.means}"
        )
        site = Site(tmp_path, network)
        site.start()
        yield site


def reached(version: int) -> Callable[[Status], bool]:
    return lambda status: (status["version"] or 0) >= version


def homes(status: Status) -> dict[str, str]:
    """The host of each worker that has a device."""
    devices = {w["worker"]: w["device"] for w in status["workers"]}
    return {name: device.partition("/")[0] for name, device in devices.items() if device}


def finish(site: Site, *, num_steps: int) -> Recording:
    """The end of a run, and that all of it came to a good end once."""
    status = site.until(lambda s: s["state"] == "finished")
    assert status["version"] == num_steps
    assert status["groups"]["trained"] == num_steps * GROUPS_PER_BATCH
    assert conserved(status["groups"])
    assert conserved(status["sequences"])
    assert_one_fate_each(site.runs / "tiny", status, num_steps=num_steps)
    site.end()
    return Recording(site.state)


def test_a_host_that_was_cut_off_for_longer_than_its_leases_is_not_believed(
    site: Site, say: Say
) -> None:
    num_steps = 14
    site.submit(f"trainer.num_steps={num_steps}", *SETTINGS)
    before = site.until(reached(2))
    lost = homes(before)["tiny.trainer0"]
    kept = next(node for node in NODES if node != lost)
    moving = sorted(name for name, home in homes(before).items() if home == lost)
    cut_s = site.network.cut(lost)
    moved = site.until(lambda s: set(homes(s).values()) == {kept})
    site.until(reached(moved["version"] + 1))
    time.sleep(max(0.0, CUT_S - (time.time() - cut_s)))
    assert site.tenants_of(lost), "nobody told them to end"
    healed_s = site.network.heal(lost)
    returned = site.until(lambda s: not site.tenants_of(lost))
    assert returned["version"] < num_steps, "it came back while the run went on"
    recording = finish(site, num_steps=num_steps)

    boots = recording.boots_on(lost, until_s=cut_s)
    assert {boot.id for boot in boots} >= set(moving)
    late = recording.told_by(boots, after_s=healed_s)
    assert late, "it had something to say"
    assert all(moment.was_ignored for moment in late)
    assert set(recording.orders(StopTenant, after_s=healed_s)) >= set(moving)
    say(f"cut off for {healed_s - cut_s:.1f} s: {', '.join(moving)}; late messages: {len(late)}")
    starts = recording.orders(StartTenant, after_s=cut_s)
    for tenant in moving:
        say(f"{tenant}: started elsewhere {starts[tenant] - cut_s:.1f} s after the cut")
        if ".rollout" in tenant:
            at_s = recording.generates_s(tenant, after_s=cut_s, but=boots)
            assert at_s is not None
            say(f"{tenant}: generates again {at_s - cut_s:.1f} s after the cut")


def test_a_run_outlives_the_death_and_the_absence_of_nats_servers(site: Site, say: Say) -> None:
    num_steps = 14
    site.submit(f"trainer.num_steps={num_steps}", *SETTINGS)
    site.until(reached(2))
    dead = site.leader_of(EVENTS)
    killed_s = site.kill_server(dead)
    site.until(reached(4))
    site.start_server(dead)
    alone = site.leader_of(EVENTS)  # all three are in step again
    cut_s = site.network.cut(alone)
    during = site.until(lambda s: time.time() - cut_s > CUT_S)
    healed_s = site.network.heal(alone)
    assert during["version"] < num_steps, "it came back while the run went on"
    site.leader_of(EVENTS)
    recording = finish(site, num_steps=num_steps)
    for what, when_s in (("killed", killed_s), ("cut off", cut_s), ("back", healed_s)):
        _, flows_s = recording.longest_gap_s(when_s, within_s=FLOWS_WITHIN_S)
        _, leads_s = recording.longest_gap_s(when_s, within_s=FLOWS_WITHIN_S, of=Tick)
        say(
            f"leading server {what}: events flow again {flows_s - when_s:.1f} s later, the scheduler"
            f" decides again {leads_s - when_s:.1f} s later"
        )
