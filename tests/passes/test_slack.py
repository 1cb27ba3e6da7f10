"""Slack costs neither time nor memory, and is worth its name where links are slower than planned."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from tests.passes.oracle import finish, launches
from tests.strategies import chain, link_costs, problems
from zfx.certificate import certify
from zfx.ir import Limits
from zfx.passes import stages
from zfx.passes.choose import choose_fastest
from zfx.passes.slack import add_slack
from zfx.simulate import simulate
from zfx.verify import verify


def before_and_after(problem):
    made = {run: schedule for run, schedule in stages(*problem)}
    return made[choose_fastest], made[add_slack]


def reduction_waits(schedule):
    return [i.point for i in schedule.instructions if i.kind == "wait_reduce"]


@given(problems())
def test_slack_costs_neither_time_nor_memory(problem):
    tight, slack = before_and_after(problem)
    verify(slack)
    assert slack.buckets == tight.buckets
    assert finish(slack) <= finish(tight) * (1 + 1e-9)
    assert certify(slack).peak_bytes <= certify(tight).peak_bytes
    assert all(a <= b for a, b in zip(launches(slack), launches(tight)))
    assert all(a >= b for a, b in zip(reduction_waits(slack), reduction_waits(tight)))


@given(problems(replicas=(2, 3)))
def test_with_replicas_neither(problem):
    tight, slack = before_and_after(problem)
    verify(slack)
    assert slack.buckets == tight.buckets and reduction_waits(slack) == reduction_waits(tight)
    assert simulate(slack).finish_us <= simulate(tight).finish_us * (1 + 1e-9)
    assert certify(slack).peak_bytes <= certify(tight).peak_bytes
    assert all(a <= b for a, b in zip(launches(slack), launches(tight)))


def test_a_link_half_as_fast_as_planned_delays_nothing_in_between():
    costs = link_costs(3.0, 4.0, pack_threshold_bytes=0)
    limits = Limits(max_reuse_distance=0, param_persistence_threshold=0, prefetch_bucket_size=0, reduce_bucket_size=0)
    transfer_us = costs.gather_us(chain(1).parameters[0].num_bytes)
    program = chain(12, duration_us=0.75 * transfer_us, repeat=4, costs=costs)
    # activations leave room almost everywhere but at their peak
    steps = tuple(replace(s, other_bytes=1000 if s.phase == "turn" else 0) for s in program.steps)
    tight, slack = before_and_after((replace(program, steps=steps), limits))

    def finish_on_a_slow_link(schedule):
        return finish(replace(schedule, program=replace(schedule.program, costs=costs.on_slower_links(2.0))))

    assert finish(tight) == finish(slack)
    assert finish_on_a_slow_link(slack) < finish_on_a_slow_link(tight)
    # what can't hide: the gathers before the first step of each half, and the last reduction
    assert finish_on_a_slow_link(slack) <= finish(slack) + 3 * transfer_us + 1e-9
