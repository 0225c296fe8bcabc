from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from k3fuse.compiler import buckets_of, compile_bucket
from k3fuse.errors import InputError
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.runtime.plan import Plan
from k3fuse.schedule.compare import compare_ranks
from k3fuse.schedule.text import parse_schedule


def test_every_way_in_which_ranks_can_differ() -> None:
    text = """
    schedule s {ranks=2}
      mailbox ring {stages=3, rearm=2, uses=1}
      launch a on main
        read weight w
      launch b on main after pdl:a
    """
    first = parse_schedule(text)
    for old, new, message in (
        ("rearm=2", "rearm=1", "mailbox ring rearm 2 vs 1"),
        ("ranks=2", "ranks=4", "ranks 2 vs 4"),
        ("read weight w", "", "launch a program (Action(kind='read'"),
        ("after pdl:a", "after full:a", "launch b after (pdl:a) vs (full:a)"),
        ("launch b", "launch c", "launch b on one rank only"),
    ):
        found = compare_ranks([first, first, parse_schedule(text.replace(old, new))])
        assert any(f.message.startswith(message) for f in found), found
        assert all(f.message.endswith("(ranks 0 and 2)") for f in found)
    a, b = first.launches
    swapped = compare_ranks([first, replace(first, launches=(b, a))])
    assert [str(f) for f in swapped] == ["plan differs: launch order (ranks 0 and 1)"]


def test_ranks_with_different_plans() -> None:
    options = CompileOptions(target="gb300", tp=2, batches=(1,))
    model = family_of("kimi-linear-tiny").build(builtin_config("kimi-linear-tiny"), "meta")
    plan = compile_bucket(model, "kimi-linear-tiny", buckets_of(options)[0], options).plan
    launch = plan.launches[3]
    operand = replace(launch.operands[0], offset=4096)
    changed = replace(launch, trigger="never", operands=(operand, *launch.operands[1:]))
    launches = tuple(changed if x is launch else x for x in plan.launches)
    found = [f.message for f in compare_ranks([plan, replace(plan, launches=launches)])]
    assert found == [
        f"launch {launch.name} trigger {launch.trigger} vs never (ranks 0 and 1)",
        f"launch {launch.name} operand {operand.value} offset {launch.operands[0].offset} vs 4096 "
        "(ranks 0 and 1)",
    ]
    with pytest.raises(InputError, match="all ranks must give"):
        compare_ranks(cast("list[Plan]", [plan, parse_schedule("schedule s")]))
