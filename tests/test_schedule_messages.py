"""The messages of a plan: where receives are posted, and what proves a send to be over."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from plan_sizes import sizes
from torch.distributed.pipelining import schedules as torchs

from mcp_parallel.parallel.pipeline import torch_actions
from mcp_parallel.schedules.action import Action
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.messages import (
    Message,
    needed_by,
    posted_receives,
    proofs_of_delivery,
    sent_by,
)


def sends_of(plan, rank):
    return [message for a in plan.orders[rank] if (message := sent_by(plan, a)) is not None]


@given(sizes())
@settings(max_examples=100, deadline=None)
def test_what_is_sent_is_what_is_needed(size):
    plan = build_plan(*size)
    needed = [needed_by(plan, action) for order in plan.orders for action in order]
    sent = [message for rank in range(plan.pp) for message in sends_of(plan, rank)]
    assert len(set(sent)) == len(sent)
    assert set(sent) == set(needed) - {None}


def when(plan):
    """Whether one action ends before another starts in every run, whatever takes how long.

    A run may be late anywhere, so what is certain is what follows from the orders of the ranks and
    from waiting for messages: the set of actions behind each, by walking the graph.
    """
    makers = {sent_by(plan, a): a for order in plan.orders for a in order if sent_by(plan, a)}
    behind = {}
    left = [list(reversed(order)) for order in plan.orders]
    so_far = [frozenset() for _ in plan.orders]
    while any(left):
        for rank, order in enumerate(left):
            if not order:
                continue
            maker = makers.get(needed_by(plan, order[-1]))
            if maker is not None and maker not in behind:
                continue
            action = order.pop()
            behind[action] = so_far[rank] | (behind[maker] | {maker} if maker else frozenset())
            so_far[rank] = behind[action] | {action}
    return behind


@given(sizes())
@settings(max_examples=60, deadline=None)
def test_a_proof_holds_in_every_run(size):
    schedule, pp, count, chunks = size
    plan = build_plan(schedule, pp, min(count, 4 * pp), chunks)
    behind = when(plan)
    takers = {needed_by(plan, a): a for order in plan.orders for a in order}
    makers = {sent_by(plan, a): a for order in plan.orders for a in order}
    for rank in range(plan.pp):
        own = sends_of(plan, rank)
        proven = []
        for message, sent in proofs_of_delivery(plan, rank).items():
            assert takers[message] in plan.orders[rank]
            for each in sent:
                # Whoever took it had started on it when it made the message, or before.
                taker, maker = takers[each], makers[message]
                assert taker == maker or taker in behind[maker]
            proven += sent
        assert len(set(proven)) == len(proven)
        assert set(proven) <= set(own)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_what_is_kept_does_not_grow_with_the_microbatches(schedule, chunks, pp):
    most = defaultdict(list)
    for count in (4 * pp, 16 * pp):
        plan = build_plan(schedule, pp, count, chunks)
        for rank, order in enumerate(posted_receives(plan)):
            proofs = proofs_of_delivery(plan, rank)
            received, sent, peak = set(), set(), 0
            for item in order:
                if isinstance(item, Message):
                    received.add(item)
                else:
                    sent -= set(proofs.get(needed_by(plan, item), ()))
                    if item.kind in "BI":
                        received -= {
                            Message(False, item.stage - 1, item.microbatch),
                            Message(True, item.stage + 1, item.microbatch),
                        }
                    sent |= {sent_by(plan, item)} - {None}
                peak = max(peak, len(received) + len(sent))
            most[rank].append(peak)
    for few, many in most.values():
        assert few == many <= 8 * pp  # 2 directions, 2 stages, pp alive, both ends


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "schedule, chunks",
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 2), ("zbv", 2)],
)
def test_receives_are_posted_where_torch_posts_them(schedule, chunks, pp):
    plan = build_plan(schedule, pp, 4 * pp, chunks)
    lowered = {
        rank: torchs._add_reduce_grad(torchs._add_unshard_reshard(actions), 4 * pp)
        for rank, actions in torch_actions(plan).items()
    }
    theirs = torchs._add_send_recv(lowered, plan.owner, plan.num_stages)
    words = {"RECV_F": False, "RECV_B": True}
    for rank, order in enumerate(posted_receives(plan)):
        ours = done = 0
        posted = {}
        for item in order:
            if isinstance(item, Action):
                ours += 1
            else:
                posted[item] = ours
        for action in theirs[rank]:
            kind = action.computation_type.name
            if kind in words:
                source = action.stage_index + (1 if words[kind] else -1)
                at = posted.pop(Message(words[kind], source, action.microbatch_index))
                # Gathering parameters takes a turn there, of which this plan knows nothing.
                assert abs(at - done) <= 2
            done += kind in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")
        assert not posted
