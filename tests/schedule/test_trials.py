"""Faults that this field has shipped, each as a small schedule with the answer that is right."""

from __future__ import annotations

import pytest

from k3fuse.errors import InputError
from k3fuse.schedule.compare import compare_ranks
from k3fuse.schedule.finding import Proof
from k3fuse.schedule.proof import prove
from k3fuse.schedule.text import parse_schedule, parse_schedules


def proof_of(text: str) -> Proof:
    return prove(parse_schedule(text))


def accepted(text: str) -> None:
    proof = proof_of(text)
    assert proof.verdict == "ACCEPT", proof


def rejected(text: str, *words: str) -> Proof:
    """REJECT, with one finding that has all the words."""
    proof = proof_of(text)
    assert proof.verdict == "REJECT"
    found = [str(finding) for finding in proof.findings]
    assert any(all(word in line for word in words) for line in found), found
    return proof


# --- mailbox stages, sentinels, replays


def all_reduce(rule: str, *, end_barrier: bool = False) -> str:
    """One use of a ring a step: A publishes N, reads N, and cleans as the rule says."""
    return f"""
    schedule mailbox {{ranks=2}}
      mailbox ring {{{rule}, uses=1}}
      launch reduce on main
        publish ring use 0
        poll ring use 0
        {"rearm ring use 0" if "rearm=0" not in rule else ""}
        {"barrier end" if end_barrier else ""}
    """


def test_three_stages_that_clean_the_next_one() -> None:
    """The stage that is cleaned may hold what a faster peer has published already."""
    proof = rejected(
        all_reduce("stages=3, rearm=1"),
        "rank 1 @reduce: rearm ring use 0 may run after step 1 rank 0 @reduce: publish ring",
        "wipe it: the reader then waits for ever",
    )
    assert {finding.kind for finding in proof.findings} == {"mailbox re-arm"}


def test_three_stages_that_clean_the_one_after_next() -> None:
    accepted(all_reduce("stages=3, rearm=2"))


@pytest.mark.parametrize("rearm", [1, 2])
def test_two_stages_without_end_barrier(rearm: int) -> None:
    rejected(all_reduce(f"stages=2, rearm={rearm}"), "mailbox re-arm", "@reduce", "ring")


@pytest.mark.parametrize("rearm", [0, 1])
def test_one_stage_with_end_barrier(rearm: int) -> None:
    accepted(all_reduce(f"stages=1, rearm={rearm}", end_barrier=True))


@pytest.mark.parametrize("rearm", [0, 1])
def test_one_stage_without_end_barrier(rearm: int) -> None:
    rejected(all_reduce(f"stages=1, rearm={rearm}"), "@reduce", "ring")


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 5])
def test_which_stage_may_be_cleaned(stages: int, ahead: int) -> None:
    """Safe are stages that no peer can have reached, other than the one that is being read."""
    text = all_reduce(f"stages={stages}, rearm={ahead}")
    assert (proof_of(text).verdict == "ACCEPT") == (ahead % stages not in (0, 1))


def test_plain_stores_to_a_multicast_address() -> None:
    text = """
    schedule multicast {ranks=2}
      mailbox ring {stages=3, rearm=2, uses=1, space="multicast"}
      launch reduce on main
        publish ring use 0 VIA
        poll ring use 0
        rearm ring use 0
    """
    rejected(text.replace("VIA", ""), "store class", "@reduce", "multicast mailbox ring")
    accepted(text.replace("VIA", "via multimem"))
    rejected(text.replace("VIA", "via multimem").replace("multicast", "peer"), "@reduce", "ring")


def test_plain_stores_to_a_multicast_buffer() -> None:
    text = """
    schedule multicast
      storage image in multicast at 0 size 256
      launch send on main
        write activation image VIA
    """
    rejected(text.replace("VIA", "via generic"), "@send", "multicast object image by generic")
    accepted(text.replace("VIA", "via multimem"))


def test_a_payload_that_looks_empty() -> None:
    text = all_reduce("stages=3, rearm=2, payload_excludes_sentinel=false")
    rejected(text, "sentinel", "mailbox ring", "negative_zero")


def test_cleaning_on_each_call_instead_of_once() -> None:
    """The second cleaning of a stage wipes what a peer has sent since the first."""
    launches = "".join(
        f"""
      launch reduce{use} on main {f"after full:reduce{use - 1}" if use else ""}
        publish ring use {use}
        poll ring use {use}
        rearm ring use {use}"""
        for use in range(3)
    )
    text = f"""
    schedule twice {{ranks=2}}
      mailbox ring {{stages=3, rearm=2, uses=3}}{launches}
      launch again on side after event:reduce0
        AGAIN
      launch end on main after full:reduce2 event:again
    """
    accepted(text.replace("AGAIN", ""))
    rejected(text.replace("AGAIN", "rearm ring use 0"), "@again: rearm ring", "@reduce2", "wipe")


@pytest.mark.parametrize("against", ["gridid", "constant"])
def test_a_flag_that_repeats_at_replay(against: str) -> None:
    text = "schedule s\n launch moe on main\n  check ready against {}"
    rejected(text.format(against), "stale flag", "@moe", "ready", against)
    accepted(text.format("epoch"))
    accepted(text.format("counter"))


def two_reduces(rule: str, *, barrier: bool = False) -> str:
    one = """
      launch {name} on main {after}
        publish buffer use {use}
        poll buffer use {use}
        {rearm}
        {barrier}"""
    words = {
        "rearm": "" if "rearm=0" in rule else "rearm buffer use {use}",
        "barrier": "barrier end" if barrier else "",
    }
    launches = [
        one.format(name=name, after=after, use=use, **words).replace("{use}", str(use))
        for use, (name, after) in enumerate([("first", ""), ("second", "after full:first")])
    ]
    head = f"schedule pair {{ranks=2}}\n mailbox buffer {{{rule}, uses=2}}"
    return head + "".join(launches)


def test_two_reduces_in_one_buffer() -> None:
    rejected(two_reduces("stages=1, rearm=0"), "mailbox overwrite", "@first", "@second", "buffer")
    rejected(two_reduces("stages=1, rearm=1"), "@first", "@second", "buffer")
    accepted(two_reduces("stages=1, rearm=0", barrier=True))
    accepted(two_reduces("stages=1, rearm=1", barrier=True))
    accepted(two_reduces("stages=3, rearm=2"))
    rejected(two_reduces("stages=3, rearm=1"), "mailbox re-arm", "@first", "@second", "buffer")


def test_two_protocols_that_share_a_counter() -> None:
    text = """
    schedule counters
      mailbox one_shot {{stages=3, rearm=2, uses=1, control="{}"}}
      mailbox two_shot {{stages=3, rearm=2, uses=1, control="{}"}}
      launch reduce on main
        publish one_shot use 0
        poll one_shot use 0
        rearm one_shot use 0
        publish two_shot use 0
        poll two_shot use 0
        rearm two_shot use 0
    """
    rejected(text.format("word", "word"), "shared control word", "one_shot", "two_shot", "word")
    accepted(text.format("a", "b"))


def test_launches_that_may_meet_at_one_barrier() -> None:
    text = """
    schedule barriers
      launch a on main
        barrier end
      launch b on side EDGE
        barrier end
      launch c on main after full:a event:b
    """
    rejected(text.replace("EDGE", ""), "shared control word", "@a", "@b", "end")
    accepted(text.replace("EDGE", "after event:a"))


def test_a_host_value_read_at_launch() -> None:
    text = "schedule s\n launch kda on main {{host_metadata={}}}\n  read host lengths"
    rejected(text.format("true"), "host value", "@kda")
    accepted(text.format("false"))  # the lengths are read on the device


# --- side streams

STAGE = """
schedule {name}
  launch moe on main
    read weight w
  launch prefetch_17 on prefetch after event:moe
    read weight next
  launch tail on main after pdl:moe {join}
    wait
"""


def test_a_prefetch_that_is_never_joined() -> None:
    proof = rejected(STAGE.format(name="s", join=""), "unjoined: prefetch_17")
    assert len(proof.findings) == 1
    accepted(STAGE.format(name="s", join="event:prefetch_17"))


def test_a_prefetch_that_only_the_last_stage_joins() -> None:
    stages = [STAGE.format(name=f"stage{i}", join="event:prefetch_17" * (i == 2)) for i in range(3)]
    proofs = [prove(schedule) for schedule in parse_schedules("".join(stages))]
    assert [(p.schedule, p.verdict) for p in proofs] == [
        ("stage0", "REJECT"),
        ("stage1", "REJECT"),
        ("stage2", "ACCEPT"),
    ]
    assert all(str(p.findings[0]).startswith("unjoined: prefetch_17") for p in proofs[:2])


def test_a_step_of_side_streams_only() -> None:
    rejected("schedule s\n launch alone on side\n  read weight w", "unjoined: alone")


# --- programmatic dependent launch


@pytest.mark.parametrize("trigger", ["", "trigger"])
def test_a_dependent_launch_that_never_waits(trigger: str) -> None:
    """An early trigger, or one that nobody states: either way the read may come first."""
    text = f"""
    schedule pdl
      launch a on main
        {trigger}
        write activation y
      launch b on main after pdl:a
        WAIT
        read activation y
    """
    rejected(text.replace("WAIT", ""), "read after write", "@b", "read y", "@a", "b never waits")
    accepted(text.replace("WAIT", "wait"))


@pytest.mark.parametrize(
    ("early", "late", "culprit"),
    [
        ("weight gamma", "activation residual", None),
        ("weight gamma|activation residual", "activation residual", "residual"),
        ("weight gamma|activation scale", "activation residual", "scale"),
        ("weight updated", "activation residual", "updated"),
    ],
)
def test_loads_above_the_wait(early: str, late: str, culprit: str | None) -> None:
    reads = "\n".join(f"  read {name}" for name in early.split("|"))
    text = f"""
    schedule hoisted
      launch before on main
        trigger
        write activation residual
        write activation scale
        write weight updated
      launch norm on main after pdl:before
      {reads}
        wait
        read {late}
    """
    if culprit is None:
        accepted(text)
    else:
        rejected(text, "read before wait", "@norm", culprit)


def test_a_weight_that_shares_bytes_with_what_the_step_writes() -> None:
    text = """
    schedule alias
      storage w in arena at 0 size 256
      storage y in arena at OFFSET size 256
      launch a on main
        write activation y
      launch b on main after pdl:a
        read weight w
        wait
        read activation y
    """
    rejected(text.replace("OFFSET", "128"), "read before wait", "@b", "w")
    accepted(text.replace("OFFSET", "256"))


def test_bulk_copies_of_plain_stores() -> None:
    text = """
    schedule proxies
      launch producer on main
        write activation y
        FENCE
        trigger
      launch consumer on main after pdl:producer
        wait
        read activation y VIA
    """
    bulk = text.replace("VIA", "via tma")
    rejected(bulk.replace("FENCE", ""), "proxy fence", "@consumer", "@producer", "read y")
    accepted(bulk.replace("FENCE", "fence"))
    accepted(text.replace("FENCE", "").replace("VIA", ""))
    accepted(bulk.replace("FENCE", "").replace("pdl:", "full:"))  # a whole launch boundary


def test_a_trigger_before_the_store() -> None:
    """A trigger makes nothing visible; only the one at the end comes with completion."""
    text = """
    schedule one_shot
      launch p on main
        PROGRAM
      launch c on main after pdl:p
        read activation y
    """
    early = "trigger\nwrite activation y"
    middle = "write activation y\ntrigger\nwrite activation z"
    for program in (early, middle):
        rejected(text.replace("PROGRAM", program), "read after write", "@c", "read y", "@p")
    accepted(text.replace("PROGRAM", "write activation y\ntrigger"))


def test_a_chain_through_a_launch_that_never_waits() -> None:
    text = """
    schedule chain
      launch a on main
        trigger
        write activation x
      launch b on main after pdl:a
        WAIT
        write activation y
      launch c on main after pdl:b
        wait
        read activation y
        read activation x
    """
    proof = rejected(text.replace("WAIT", ""), "read after write", "@c", "read x", "@a")
    assert all("read x" in str(finding) for finding in proof.findings)  # b to c is fine
    accepted(text.replace("WAIT", "wait"))


# --- launch plans


def test_ranks_with_different_grids() -> None:
    text = "schedule s\n launch reduce on main {{grid={}}}\n  barrier end"
    ranks = [parse_schedule(text.format(grid)) for grid in (32, 16)]
    (found,) = compare_ranks(ranks)
    assert str(found).startswith("plan differs: launch reduce grid 32 vs 16")
    assert compare_ranks([ranks[0], ranks[0]]) == []


def persistent(grid: int, target: str, side: str) -> str:
    return f"""
    schedule resident {{target="{target}"}}
      launch before on main {{grid=1}}
      {side}
      launch persistent on main after full:before {{grid={grid}, cluster=2, spins=true}}
        barrier grid
      launch end on main after full:persistent {"event:side" if side else ""} {{grid=1}}
    """


@pytest.mark.parametrize(
    ("target", "side", "largest"),
    [
        ("b200", "launch side on aux after event:before {grid=1}", 146),
        ("h200", "launch side on aux after event:before {grid=1}", 130),
        ("b200", "", 148),
        ("h200", "", 132),
    ],
)
def test_a_whole_grid_barrier_beside_a_side_stream(target: str, side: str, largest: int) -> None:
    fits = [n for n in range(120, 160) if proof_of(persistent(n, target, side)).proved]
    assert max(fits) == largest
    assert all(n % 2 == 0 for n in fits)
    words = ["co-residency", "@persistent", f"grid of {largest + 2}", f"fits is {largest}"]
    if side:
        words.append("@side holds 1")
    rejected(persistent(largest + 2, target, side), *words)


def test_a_persistent_launch_beside_a_prefetch_on_all_sms() -> None:
    side = "launch side on prefetch after event:before {grid=148}"
    text = persistent(148, "b200", side)
    rejected(text, "@persistent", "needs 148 SMs", "has 0 of 148", "@side holds 148")


@pytest.mark.parametrize("hidden", [3584, 7168, 8192])
def test_declared_shared_memory(hidden: int) -> None:
    parts = {"rows": 4 * hidden, "scales": hidden // 32, "barriers": 64}
    inside = ", ".join(f'"{name}": {size}' for name, size in parts.items())
    text = (
        'schedule s {{target="h200"}}\n launch moe on main {{grid=1, smem={}, smem_parts={{{}}}}}'
    )
    accepted(text.format(sum(parts.values()), inside))
    forgotten = sum(parts.values()) - parts["scales"]
    rejected(text.format(forgotten, inside), "shared memory", "@moe", f"scales {hidden // 32}")


def test_a_newer_architecture_with_less_shared_memory() -> None:
    text = 'schedule s {{target="{}"}}\n launch mega on main {{grid=1, smem={}}}'
    rejected(text.format("sm_120", 207 << 10), "@mega", "needs 207 KB, has 99")
    accepted(text.format("sm_120", 99 << 10))
    accepted(text.format("sm_103a", 207 << 10))
    with pytest.raises(InputError, match=r"unknown target 'sm_130'.*never guesses the nearest"):
        proof_of(text.format("sm_130", 207 << 10))


def test_a_schedule_beyond_the_limit_is_not_proven() -> None:
    schedule = parse_schedule("schedule s {ranks=1}\n launch a on main\n  read weight w")
    assert prove(schedule, limit=6).verdict == "ACCEPT"
    proof = prove(schedule, limit=5)
    assert proof.verdict == "NOT PROVEN"
    assert proof.not_proven == [
        "the schedule unrolls to 6 moments over 2 replays and 1 rank, the limit is 5"
    ]
