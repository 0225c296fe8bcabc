from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3fuse.compiler import buckets_of, compile_bucket
from k3fuse.errors import ParseError
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.schedule.edges import Edge
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.model import (
    Access,
    Action,
    ActionKind,
    MailboxRule,
    Schedule,
    ScheduledLaunch,
    Storage,
)
from k3fuse.schedule.text import parse_schedule, parse_schedules, print_schedule

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/schedules").glob("*.schedule"))

TEXT = """\
schedule demo {ranks=2, target="h200"}
  storage x in arena at 0 size 256
  mailbox ring {stages=3, rearm=2, uses=1, space="multicast"}
  launch a on main {grid=132, cluster=2, smem=96, smem_parts={"rows": 64, "scales": 32}, spins=true}
    trigger
    write activation x
    fence
    publish ring use 0 via multimem
  launch b on main after pdl:a event:c {host_metadata=true}
    read weight w
    wait
    poll ring use 0
    read activation x via tma
    rearm ring use 0
    barrier end
    check flag against epoch
  output x
"""


def test_round_trip_of_text() -> None:
    assert print_schedule(parse_schedule(TEXT)) == TEXT


def test_comments_and_indentation_are_for_the_reader() -> None:
    noisy = "# a file\n\n" + TEXT.replace("\n    ", "\n\t").replace("trigger\n", "trigger # soon\n")
    assert parse_schedule(noisy) == parse_schedule(TEXT)


def test_what_is_left_out_has_its_default() -> None:
    schedule = parse_schedule("schedule s\nlaunch a on main\nread x\nwrite host\n")
    assert (schedule.ranks, schedule.target) == (2, "")
    program = (Action("read", "x"), Action("write", "host"))
    assert schedule.launches == (ScheduledLaunch("a", "main", (), program),)


def test_several_schedules_in_a_file() -> None:
    found = parse_schedules(TEXT + TEXT.replace("demo", "second"))
    assert [schedule.name for schedule in found] == ["demo", "second"]
    assert found[0].launches == found[1].launches
    with pytest.raises(ParseError, match="2 schedules where one is expected"):
        parse_schedule(TEXT + TEXT)


@pytest.mark.parametrize("model", ["kimi-k3-tiny", "kimi-linear-tiny"])
def test_round_trip_of_a_plan(model: str) -> None:
    options = CompileOptions(target="gb300", tp=2, batches=(1,))
    module = family_of(model).build(builtin_config(model), "meta")
    plan = compile_bucket(module, model, buckets_of(options)[0], options).plan
    schedule = schedule_of(plan)
    assert parse_schedule(print_schedule(schedule)) == schedule


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_schedules(path: Path) -> None:
    assert all(
        parse_schedule(print_schedule(schedule)) == schedule
        for schedule in parse_schedules(path.read_text(), str(path))
    )


names = st.text("abcXYZ019_.-%/", min_size=1, max_size=6).filter(
    lambda name: name not in {"use", "via", "against"}
)
counts = st.integers(1, 300)
accesses = st.sampled_from(("weight", "activation", "state", "host"))
vias = st.sampled_from(("generic", "tma", "multimem"))


def data_action(kind: ActionKind, access: Access, target: str, via: str) -> Action:
    return Action(kind, target, access, 0, via)


def ring_action(kind: ActionKind, target: str, use: int, via: str) -> Action:
    return Action(kind, target, "mailbox", use, via)


actions = st.one_of(
    st.builds(data_action, st.sampled_from(("read", "write")), accesses, names, vias),
    st.builds(
        ring_action, st.sampled_from(("publish", "poll", "rearm")), names, st.integers(0, 9), vias
    ),
    st.builds(Action, st.sampled_from(("wait", "trigger", "fence", "barrier"))),
    st.builds(Action, st.just("barrier"), names),
    st.builds(Action, st.just("check"), names, via=st.sampled_from(("epoch", "gridid", "generic"))),
)
edges = st.builds(Edge, st.sampled_from(("pdl", "full", "event")), names)
launches = st.builds(
    ScheduledLaunch,
    names,
    names,
    st.lists(edges, max_size=2).map(tuple),
    st.lists(actions, max_size=5).map(tuple),
    grid=st.integers(0, 200),
    cluster=counts,
    threads=counts,
    smem=st.integers(0, 10**6),
    ctas_per_sm=counts,
    smem_parts=st.dictionaries(names, counts, max_size=2).map(lambda d: tuple(d.items())),
    spins=st.booleans(),
    host_metadata=st.booleans(),
)
mailboxes = st.builds(
    MailboxRule,
    names,
    counts,
    st.integers(0, 5),
    counts,
    space=st.sampled_from(("peer", "multicast")),
    payload_excludes_sentinel=st.booleans(),
    control=st.just("") | names,
    protocol=names,
)
storages = st.builds(Storage, names, names, st.integers(0, 2**40), st.integers(0, 2**40))


def by_name(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=3, unique_by=lambda x: getattr(x, "name")).map(tuple)  # noqa: B009


schedules = st.builds(
    Schedule,
    names,
    st.just("") | names,
    counts,
    by_name(launches),
    by_name(storages),
    by_name(mailboxes),
    st.lists(names, max_size=2).map(tuple),
)


@given(schedules)
@settings(max_examples=150, deadline=None)
def test_round_trip(schedule: Schedule) -> None:
    assert parse_schedule(print_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("schedule demo", "scheduel demo", 1, "expected 'schedule NAME"),
        ("schedule demo", "schedule two words", 1, "expected 'schedule NAME"),
        ("ranks=2", "ranks=0", 1, "ranks=0: expected at least 1"),
        ("ranks=2", "ranks=true", 1, "ranks=true: expected a number"),
        ("ranks=2", "rank=2", 1, "unknown 'rank': known here are ranks, target"),
        ("ranks=2", "ranks=2, ranks=2", 1, "'ranks' is there twice"),
        ("ranks=2", "ranks=two", 1, "'ranks' has no JSON value"),
        ("ranks=2, ", "ranks, ", 1, "unknown 'ranks, target'"),
        ("ranks=2, target=", "ranks ", 1, "expected NAME=VALUE"),
        ("at 0 size 256", "at 0", 2, "expected 'storage NAME in SPACE at OFFSET size BYTES'"),
        ("stages=3, ", "", 3, "expected 'mailbox NAME {stages=3, rearm=2, uses=1}'"),
        ("uses=1", "uses=0", 3, "uses=0: expected at least 1"),
        ("launch a on main", "launch a", 4, "expected 'launch NAME on STREAM"),
        ("grid=132", "grid=-1", 4, "grid=-1: expected at least 0"),
        ("spins=true", "spins=1", 4, "spins=1: expected true or false"),
        ('"scales": 32', '"scales": "32"', 4, "smem_parts: scales is no number of bytes"),
        ("write activation x", "write", 6, "expected 'write ACCESS NAME [via multimem]'"),
        ("write activation x", "stor activation x", 6, "is none of schedule, storage"),
        ("use 0 via multimem", "use one", 8, "use one: expected a number from 0"),
        ("use 0 via multimem", "on 0", 8, "expected 'publish MAILBOX use 0 [via multimem]'"),
        ("launch b", "launch a", 9, "launch a is there twice"),
        ("pdl:a", "pd:a", 9, "not an edge: 'pd:a'"),
        ("against epoch", "via epoch", 16, "expected 'check NAME against epoch'"),
        ("  output x", "  output", 17, "is none of schedule"),
    ],
)
def test_errors_name_file_and_line(old: str, new: str, line: int, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(ParseError) as caught:
        parse_schedule(TEXT.replace(old, new), "demo.schedule")
    assert str(caught.value).startswith(f"demo.schedule, line {line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no 'schedule NAME' line"),
        ("# nothing\n", "no 'schedule NAME' line"),
        ("launch a on main\n", "line 1: expected 'schedule NAME"),
        ("schedule s\nwait\n", "line 2: 'wait' stands before any launch"),
    ],
)
def test_texts_that_are_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_schedule(text)
