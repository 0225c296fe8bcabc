"""Decoder layers in plans and in IR text: what kind they are, and which lines are theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from k3fuse.errors import InputError
from k3fuse.runtime.plan import Launch, Plan
from k3fuse.schedule.roles import BULK_OPS

OUTSIDE = -1
"""The layer number of what lies before and after the decoder layers."""

_OP = re.compile(r"(?:= |^\s*)(\w+)\(")
_LAYER = re.compile(r"(?:^|[ .%@])layers\.(\d+)\b")


def launches_by_layer(plan: Plan) -> dict[int, list[Launch]]:
    """layer -> its launches in plan order, layers ascending (`OUTSIDE` first)."""
    found: dict[int, list[Launch]] = {}
    for launch in plan.launches:
        found.setdefault(launch.layer, []).append(launch)
    return dict(sorted(found.items()))


def require_layer(plan: Plan, layer: int) -> list[Launch]:
    """The launches of a layer; InputError names the flag and the layers there are."""
    layers = launches_by_layer(plan)
    if layer not in layers:
        decoder = [n for n in layers if n != OUTSIDE]
        known = f"{decoder[0]} to {decoder[-1]}" if decoder else "none"
        raise InputError(
            f"--layer {layer}: the plan has decoder layers {known}, "
            f"and {OUTSIDE} for embedding and head"
        )
    return layers[layer]


def layer_kinds(plan: Plan) -> dict[int, str]:
    """layer -> its kind by the ops it runs: "KDA+MoE", "MLA+dense", or "ends" (embedding, head)."""
    return {layer: _kind(layer, items) for layer, items in launches_by_layer(plan).items()}


def _kind(layer: int, launches: list[Launch]) -> str:
    if layer == OUTSIDE:
        return "ends"
    ops = {op for launch in launches for op in launch.ops}
    attention = [
        label
        for label, stem in (("KDA", "kda_"), ("MLA", "mla_"))
        if any(op.startswith(stem) for op in ops)
    ]
    if "kda_commit" in ops:
        return "KDA commit"
    return "+".join([*attention, "MoE" if "moe_experts" in ops else "dense"])


def representative_layers(plan: Plan) -> dict[int, str]:
    """Few layers that stand for all: first, last, the middle one of each kind, and the ends.

    layer -> label, in order; `OUTSIDE` comes last.
    """
    kinds = layer_kinds(plan)
    of_kind: dict[str, list[int]] = {}
    for layer, kind in kinds.items():
        of_kind.setdefault(kind, []).append(layer)
    decoder = [layer for layer in kinds if layer != OUTSIDE]
    chosen = {members[len(members) // 2] for members in of_kind.values()}
    chosen.update(decoder[:1] + decoder[-1:])
    labels: dict[int, str] = {}
    for layer in sorted(chosen - {OUTSIDE}):
        note = "first, " if layer == decoder[0] else "last, " if layer == decoder[-1] else ""
        count = len(of_kind[kinds[layer]])
        labels[layer] = f"layer {layer}: {note}{kinds[layer]} ({count} of {len(decoder)} layers)"
    if OUTSIDE in chosen:
        labels[OUTSIDE] = "embedding and head"
    return labels


def lines_by_layer(text: str) -> Mapping[int, list[str]]:
    """layer -> the lines of IR text that belong to it, in order, groups kept whole.

    A node or group belongs to the layer that it works for, as a launch does (`lowering.lower`); an
    input to the layer in its name. The head and the return line belong to none.
    """
    found: dict[int, list[str]] = {}
    for block in _blocks(text):
        found.setdefault(_layer_of_block(block), []).extend(block)
    return found


def layer_lines(text: str, layer: int) -> list[str]:
    """The lines of IR text that belong to one layer."""
    return lines_by_layer(text).get(layer, [])


def _blocks(text: str) -> Iterator[list[str]]:
    """The top-level entries of a graph: one line each, or a whole group."""
    group: list[str] | None = None
    for line in text.splitlines():
        if group is not None:
            group.append(line)
            if line == "  }":
                yield group
                group = None
        elif line.startswith("  fused @"):
            group = [line]
        elif line.startswith("  ") and not line.startswith("  return"):
            yield [line]


def _layer_of_block(block: list[str]) -> int:
    leaves = [
        (op[1], max(map(int, _LAYER.findall(origins)), default=OUTSIDE))
        for line in block
        for call, found, origins in [line.rpartition(" from ")]
        if found and (op := _OP.search(call))
    ]
    if not leaves:
        named = [int(n) for n in _LAYER.findall(block[0])]
        state = re.match(r"  state %state\.(\d+)\.", block[0])
        return max(named) if named else int(state[1]) if state else OUTSIDE
    if all(op == "attn_res_blocks" for op, _ in leaves):
        return min((layer for _, layer in leaves if layer >= 0), default=OUTSIDE)
    bulk = [layer for op, layer in leaves if op in BULK_OPS]
    return bulk[-1] if bulk else min(layer for _, layer in leaves)
