"""The proof against a simulator that runs small schedules in random orders, and its own rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from k3fuse.schedule.edges import Edge
from k3fuse.schedule.finding import Finding
from k3fuse.schedule.model import Action, MailboxRule, Schedule, ScheduledLaunch, Storage
from k3fuse.schedule.proof import prove_order
from k3fuse.schedule.text import parse_schedule
from tests.schedule.simulator import conflict

# x and y share bytes; z lies alone.
STORAGES = (Storage("x", "arena", 0, 2), Storage("y", "arena", 1, 2), Storage("z", "arena", 3, 1))
RING = MailboxRule("ring", 3, 2, 2)
LOCAL = {"read before wait", "nothing written", "launch order", "mailbox"}


@st.composite
def schedules(draw: st.DrawFn, *, ranks: int = 1, ring: bool = False) -> Schedule:
    """Up to four launches on two streams with random edges back, programs and triggers."""
    launches: list[ScheduledLaunch] = []
    for index in range(draw(st.integers(2, 4))):
        after: list[Edge] = []
        for source in range(index):
            kind = draw(st.sampled_from(["pdl", "pdl", "full", "event", ""]))
            if kind and (source == index - 1 or draw(st.booleans())):
                after.append(Edge(kind, f"l{source}"))
        access = st.builds(
            Action,
            st.sampled_from(("read", "write")),
            st.sampled_from("xyz"),
            st.sampled_from(("activation", "activation", "state")),
        )
        program = draw(st.lists(access, max_size=2))
        if ring and index < RING.uses:
            exchange = [Action(k, "ring", "mailbox", index) for k in ("publish", "poll", "rearm")]
            program += exchange
        for kind in ("wait", "trigger"):
            if draw(st.integers(0, 3)):
                program.insert(draw(st.integers(0, len(program))), Action(kind))
        stream = "main" if index == 0 else draw(st.sampled_from(("main", "main", "side")))
        launches.append(ScheduledLaunch(f"l{index}", stream, tuple(after), tuple(program)))
    return Schedule("random", "", ranks, tuple(launches), STORAGES, (RING,) * ring)


def findings(schedule: Schedule) -> list[Finding]:
    return prove_order(schedule).findings


def races(schedule: Schedule) -> list[Finding]:
    return [finding for finding in findings(schedule) if finding.kind != "unjoined"]


@given(schedules(), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_no_order_of_an_accepted_schedule_has_a_conflict(schedule: Schedule, seed: int) -> None:
    if not races(schedule):
        for offset in range(10):
            assert conflict(schedule, random.Random(seed + offset)) == ""


@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_finds_what_the_proof_rejects(seed: int) -> None:
    """So that agreement means something: a missing wait shows in a few random orders."""
    text = """
    schedule s {ranks=1}
      launch a on main
        trigger
        write activation x
      launch b on main after pdl:a
        read activation x
    """
    schedule = parse_schedule(text)
    assert [f.kind for f in findings(schedule)] == ["read after write"] * 2
    orders = range(100 * seed, 100 * seed + 30)
    assert any(conflict(schedule, random.Random(order)) for order in orders)


def more_ordered(schedule: Schedule, draw: st.DataObject) -> Schedule:
    """The schedule with one edge more, or with one wait further up in its launch."""
    launches = list(schedule.launches)
    index = draw.draw(st.integers(1, len(launches) - 1))
    launch = launches[index]
    at = next((i for i, a in enumerate(launch.program) if a.kind == "wait"), 0)
    if at and draw.draw(st.booleans()):
        program = list(launch.program)
        program.insert(draw.draw(st.integers(0, at - 1)), program.pop(at))
        launches[index] = replace(launch, program=tuple(program))
    else:
        kind = draw.draw(st.sampled_from(("pdl", "full", "event")))
        edge = Edge(kind, f"l{draw.draw(st.integers(0, index - 1))}")
        launches[index] = replace(launch, after=(*launch.after, edge))
    return replace(schedule, launches=tuple(launches))


@given(schedules(), st.data())
@settings(max_examples=200, deadline=None)
def test_more_order_adds_no_finding(schedule: Schedule, data: st.DataObject) -> None:
    before = findings(schedule)
    assume(not LOCAL & {finding.kind for finding in before})
    after = findings(more_ordered(schedule, data))
    assert {str(f).split(" (")[0] for f in after} <= {str(f).split(" (")[0] for f in before}


@given(schedules(ranks=2, ring=True), st.data())
@settings(max_examples=100, deadline=None)
def test_more_order_adds_no_finding_but_a_deadlock(schedule: Schedule, data: st.DataObject) -> None:
    """With polls, more order can be too much: a launch may then wait for what it holds up."""
    before = findings(schedule)
    assume(not LOCAL & {finding.kind for finding in before})
    after = findings(more_ordered(schedule, data))
    assert {f.kind for f in after} <= {f.kind for f in before} | {"deadlock"}


def test_a_wait_that_makes_a_deadlock() -> None:
    """Why a wait further up is not always better: here the launch that sends must not wait."""
    text = """
    schedule s {ranks=2}
      mailbox ring {stages=3, rearm=2, uses=1}
      launch reader on main
        trigger
        poll ring use 0
        rearm ring use 0
      launch sender on main after pdl:reader
        FIRST
        publish ring use 0
        LAST
    """
    late = text.replace("FIRST", "").replace("LAST", "wait")
    assert prove_order(parse_schedule(late)).proved
    (found,) = findings(parse_schedule(text.replace("FIRST", "wait").replace("LAST", "")))
    assert found.kind == "deadlock"
    assert all(word in found.message for word in ("@reader: poll ring", "@sender: wait"))


def test_a_trigger_is_known_only_where_it_is_stated() -> None:
    text = "schedule s\n launch a on main\n{}\n launch b on main after pdl:a\n  read y"
    for program, kinds in (
        ("write y", {"read after write"}),
        ("write y\nwrite z\ntrigger", set[str]()),
        ("write y\ntrigger\nwrite z", {"read after write"}),
    ):
        assert {f.kind for f in findings(parse_schedule(text.format(program)))} == kinds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launch a on main\n launch a on main", "name: two launches are called @a"),
        ("launch a on main after pdl:b", "unknown launch: @a follows @b, not there"),
        (
            "launch a on main after event:b\n launch b on side",
            "launch order: @a follows @b, which is launched after it: list launches in the order "
            "in which they are issued",
        ),
        ("launch a on main\n poll r use 0", "unknown mailbox: @a uses r, not there"),
        (
            "mailbox r {stages=3, rearm=2, uses=1}\n launch a on main\n poll r use 1",
            "mailbox: @a: poll of use 1 of r, which has 1 a step",
        ),
        (
            "launch a on main\n read activation x",
            "nothing written: @a reads x, which no launch writes",
        ),
    ],
)
def test_rules_of_one_launch(text: str, message: str) -> None:
    if "two launches" in message:  # the parser refuses it sooner
        launch = ScheduledLaunch("a", "main", (), ())
        schedule = Schedule("s", "", 1, (launch, launch))
    else:
        schedule = parse_schedule(f"schedule s {{ranks=1}}\n {text}")
    assert message in map(str, findings(schedule))


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        ("write activation y", "overwritten"),
        ("write activation z", None),
    ],
)
def test_bytes_that_another_object_takes(between: str, kind: str | None) -> None:
    text = f"""
    schedule s {{ranks=1}}
      storage x in arena at 0 size 2
      storage y in arena at 1 size 2
      storage z in arena at 3 size 1
      launch a on main
        write activation x
      launch b on main after full:a
        {between}
      launch c on main after full:b
        read activation x
      output x
    """
    found = findings(parse_schedule(text))
    assert {f.kind for f in found} == ({kind} if kind else set())
    if kind:
        assert any("@c: read x" in str(f) and "@b: write y" in str(f) for f in found)
        assert any("output x" in str(f) for f in found)


def test_a_weight_whose_bytes_are_taken() -> None:
    text = """
    schedule s {ranks=1}
      storage w in arena at 0 size 2
      storage y in arena at 1 size 2
      launch a on main
        read weight w
      launch b on main after full:a
        write activation y
    """
    (found,) = findings(parse_schedule(text))
    assert str(found) == (
        "overwritten: step 1 rank 0 @a: read w: step 0 rank 0 @b: write y has taken its bytes in "
        "between"
    )


def test_a_poll_of_a_stage_not_yet_emptied() -> None:
    """The reader starts beside the launch that still cleans its stage, and takes old words."""
    text = """
    schedule s {ranks=2}
      mailbox ring {stages=2, rearm=1, uses=2}
      launch first on main
        publish ring use 0
        poll ring use 0
        barrier all
      launch clean on side after event:first
        rearm ring use 0
      launch send on main after full:first event:clean
        publish ring use 1
      launch second on early after event:first
        poll ring use 1
        rearm ring use 1
        barrier end
      launch last on main after full:send event:second
    """
    found = findings(parse_schedule(text))
    assert {f.kind for f in found} >= {"stale value"}
    assert any("@second: poll ring" in str(f) and "@clean: rearm" in str(f) for f in found)
