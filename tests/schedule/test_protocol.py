from __future__ import annotations

import dataclasses

import pytest

from k3fuse.errors import VerifyError
from k3fuse.schedule.edges import parse_edge
from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch
from k3fuse.schedule.protocol import (
    Op,
    Protocol,
    Ring,
    check_mailboxes,
    check_protocol,
    one_shot,
    two_shot,
)
from k3fuse.schedule.protocol_states import Explorer


@pytest.mark.parametrize(
    ("stages", "rearm", "end_barrier", "verdict"),
    [
        (3, 1, False, "REJECT"),
        (3, 2, False, "ACCEPT"),
        (3, 3, False, "REJECT"),
        (2, 1, False, "REJECT"),
        (2, 2, False, "REJECT"),
        (4, 1, False, "REJECT"),
        (4, 2, False, "ACCEPT"),
        (4, 3, False, "ACCEPT"),
        (1, 1, False, "REJECT"),
        (1, 1, True, "ACCEPT"),
        (1, 0, False, "REJECT"),
        (1, 0, True, "ACCEPT"),
        (2, 0, False, "ACCEPT"),
    ],
)
def test_stages_and_rearm_rule(stages: int, rearm: int, end_barrier: bool, verdict: str) -> None:
    for ranks in (2, 3):
        found = check_protocol(one_shot(ranks, stages, rearm, end_barrier=end_barrier))
        assert found.verdict == verdict, found
        assert bool(found.counterexample) == (verdict == "REJECT")


def test_cleaning_the_next_stage_wipes_what_a_faster_peer_sent() -> None:
    found = check_protocol(one_shot(2, 3, 1))
    assert (found.kind, found.verdict) == ("lost value", "REJECT")
    published, cleaned, waits = (
        next(i for i, line in enumerate(found.counterexample) if text in line)
        for text in (
            "rank 0: publish use 1 -> rank 1 stage 1",
            "rank 1: re-arm stage 1, the word of rank 0",
            "rank 1: wait for ever for use 1 from rank 0",
        )
    )
    assert published < cleaned < waits == len(found.counterexample) - 1
    assert found.counterexample[0].startswith("1. ")
    assert len(found.counterexample) == 12  # a shortest one


def test_a_payload_that_may_equal_the_empty_pattern_is_waited_for() -> None:
    found = check_protocol(one_shot(2, 3, 2, payload_excludes_sentinel=False))
    assert (found.verdict, found.kind) == ("REJECT", "sentinel")
    assert "wait for ever for use 0" in found.counterexample[-1]


def test_one_stage_without_a_barrier_is_overwritten_while_it_is_read() -> None:
    found = check_protocol(one_shot(2, 1, 0))
    assert (found.verdict, found.kind) == ("REJECT", "overwrite")


def test_nobody_re_arms() -> None:
    rings = (Ring("box", 3, 2),)
    found = check_protocol(Protocol("lazy", 2, rings, ((Op("publish"),), (Op("poll"),))))
    assert (found.verdict, found.kind) == ("REJECT", "stale value")
    assert "take the words of use 0 for those of use 3" in found.counterexample[-1]


def test_nobody_publishes() -> None:
    found = check_protocol(Protocol("mute", 2, (Ring("box", 3, 2),), ((Op("poll"),),)))
    assert (found.verdict, found.kind) == ("REJECT", "deadlock")
    assert found.counterexample == (
        "1. rank 0: wait for ever for use 0",
        "2. rank 1: wait for ever for use 0",
    )


def test_publishing_in_the_launch_that_re_arms_needs_one_stage_more() -> None:
    """The re-arm of use g is then not ordered before the publish of use g + 1."""
    turn = ((Op("poll", 0, 0), Op("rearm", 0, 0), Op("publish", 0, 1)),)
    first = ((Op("publish", 0, 0),),)
    launches = (*first, *turn, (Op("poll", 0, 1), Op("rearm", 0, 1)))
    three = Protocol("chain", 2, (Ring("box", 3, 2),), launches, 2)
    four = dataclasses.replace(three, rings=(Ring("box", 4, 3),))
    assert check_protocol(three).kind == "lost value"
    assert check_protocol(four).verdict == "ACCEPT"


def test_two_shot() -> None:
    assert check_protocol(two_shot(2, 3, 2)).verdict == "ACCEPT"
    assert check_protocol(two_shot(2, 1, 1, end_barrier=True)).verdict == "ACCEPT"
    bad = check_protocol(two_shot(2, 3, 1))
    assert bad.kind == "lost value"
    assert "use 1 of push_chunks" in bad.counterexample[-1]


@pytest.mark.slow
def test_two_shot_of_three_ranks() -> None:
    assert check_protocol(two_shot(3, 3, 2)).verdict == "ACCEPT"


def test_making_safe_publishes_at_once_hides_nothing() -> None:
    for make in (one_shot, two_shot):
        for stages in (1, 2, 3, 4):
            for rearm in range(stages + 1):
                protocol = make(2, stages, rearm)
                reduced = Explorer(protocol).explore(10**5)
                whole = Explorer(protocol, reduce=False).explore(10**5)
                assert reduced.verdict == whole.verdict, protocol
                assert len(reduced.steps) >= len(whole.steps)


def test_beyond_the_limit_nothing_is_proven() -> None:
    found = check_protocol(one_shot(2, 3, 2), limit=100)
    assert found.verdict == "NOT PROVEN"
    assert "more than 100 states" in found.reason


def test_a_use_that_is_read_again_with_the_next_one() -> None:
    """The re-arm behind the next use is that of its stage, while a block may still poll it."""
    launches = (
        (Op("publish"),),
        (Op("poll"), Op("rearm")),
        (Op("publish", 0, 1),),
        (Op("poll", 0, 1), Op("poll", 0, 0), Op("rearm", 0, 1)),
    )
    three = Protocol("again", 2, (Ring("box", 3, 2),), launches, 2)
    found = check_protocol(three)
    assert found.kind == "lost value"
    assert found.counterexample[-1].endswith("wait for ever for use 0 from rank 0")
    assert (
        check_protocol(dataclasses.replace(three, rings=(Ring("box", 4, 2),))).verdict == "ACCEPT"
    )


def test_too_many_uses_before_the_launches_repeat() -> None:
    launches = tuple((Op("publish", 0, use), Op("poll", 0, use)) for use in range(71))
    with pytest.raises(VerifyError, match="71 uses before the launches repeat"):
        check_protocol(Protocol("long", 2, (Ring("box", 3, 2),), launches, 71))


def exchange(uses: int, **rule: int | bool) -> Schedule:
    """Launches send<k> and take<k> in turn on one stream, `uses` times."""
    launches: list[ScheduledLaunch] = []
    for use in range(uses):
        for name, ops in (("send", ("publish",)), ("take", ("poll", "rearm"))):
            actions = [Action("trigger"), Action("wait")]
            actions += [Action(kind, "box", "mailbox", use) for kind in ops]  # pyright: ignore[reportArgumentType]
            after = (parse_edge(f"pdl:{launches[-1].name}"),) if launches else ()
            launches.append(ScheduledLaunch(f"{name}{use}", "main", after, tuple(actions)))
    box = MailboxRule("box", 3, 2, uses)
    box = dataclasses.replace(box, **rule)  # pyright: ignore[reportArgumentType]
    return Schedule("toy", "gb300", 2, tuple(launches), mailboxes=(box,))


@pytest.mark.parametrize("uses", [1, 2, 5, 9])
def test_the_rules_of_a_schedule(uses: int) -> None:
    good = check_mailboxes(exchange(uses))
    assert [r.verdict for r in good] == ["ACCEPT", "ACCEPT"]
    assert [r.protocol.ranks for r in good] == [2, 3]
    assert all(r.protocol.uses == 1 for r in good)  # one turn stands for all uses
    assert {r.verdict for r in check_mailboxes(exchange(uses, rearm=1))} == {"REJECT"}
    assert {r.verdict for r in check_mailboxes(exchange(uses, stages=2))} == {"REJECT"}
    bad = check_mailboxes(exchange(uses, payload_excludes_sentinel=False))
    assert {r.kind for r in bad} == {"sentinel"}


def test_equal_rules_are_checked_once() -> None:
    schedule = exchange(1)
    twin = dataclasses.replace(schedule.mailboxes[0], name="other")
    both = dataclasses.replace(
        schedule,
        mailboxes=(*schedule.mailboxes, twin),
        launches=(
            *schedule.launches,
            *(
                dataclasses.replace(
                    launch,
                    name=f"{launch.name}.other",
                    after=(parse_edge(f"full:{after}"),),
                    program=tuple(
                        dataclasses.replace(a, target="other") if a.target else a
                        for a in launch.program
                    ),
                )
                for launch, after in zip(schedule.launches, ("take0", "send0.other"), strict=True)
            ),
        ),
    )
    assert [r.protocol.name for r in check_mailboxes(both)] == ["box", "box"]


def test_launches_that_may_overlap_leave_it_open() -> None:
    schedule = exchange(2)
    send1 = schedule.launches[2]
    eager = dataclasses.replace(send1, program=tuple(a for a in send1.program if a.kind != "wait"))
    launches = tuple(eager if x is send1 else x for x in schedule.launches)
    found = check_mailboxes(dataclasses.replace(schedule, launches=launches))
    assert {r.verdict for r in found} == {"NOT PROVEN"}
    assert "@send1 may publish box before @take0 has ended" in found[0].reason


def test_a_barrier_at_the_end_of_the_reader_makes_one_stage_enough() -> None:
    schedule = exchange(2, stages=1, rearm=1)
    launches = tuple(
        dataclasses.replace(x, program=(*x.program, Action("barrier", "ranks", use=i)))
        if x.name.startswith("take")
        else x
        for i, x in enumerate(schedule.launches)
    )
    fixed = dataclasses.replace(schedule, launches=launches)
    assert {r.verdict for r in check_mailboxes(schedule)} == {"REJECT"}
    assert {r.verdict for r in check_mailboxes(fixed)} == {"ACCEPT"}
