"""Split the model over the ranks as the stock engines do, with every collective explicit."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from k3fuse.errors import InputError
from k3fuse.ir import Attr, Context, Node, TypeRuleError, Value, op_named
from k3fuse.ir.ops.kda import COMMIT_SHARD_DIMS, STEP_SHARD_DIMS
from k3fuse.ir.ops.moe import EXPERT_SHARD_DIMS
from k3fuse.passes.base import Edit, Pass
from k3fuse.tensor_type import DType, shard

_GATED = ("situ_mul", "silu_mul", "sigmoid_mul", "mul", "silu", "sigmoid")
_BY_HEAD: dict[str, tuple[int | None, ...]] = {
    "kda_step": STEP_SHARD_DIMS[:13],
    "kda_verify": STEP_SHARD_DIMS,
    "kda_commit": COMMIT_SHARD_DIMS,
    "mla_absorb_query": (None, 0),  # the query comes sharded from its projection
    "mla_value": (None, 0),
    "mla_attend": (None, None, 0),
    "moe_experts": (None, None, None, *EXPERT_SHARD_DIMS),
    "embedding": (None, 0),
}
"""Dimension in which a static or state operand of an op is cut; None: as it comes."""


class ShardStock(Pass):
    """Give every weight and state its placement, insert all-reduces and gathers.

    Before:
        %q = linear(%x, %wq)
        %o = ... heads ...
        %y = linear(%o, %wo)
    After (wq cut by rows, wo by columns):
        %q: bf16[M,12288]@S(1) = linear(%x, %wq)
        %y.partial: f32[M,7168]@P = linear(%o, %wo) {out="f32"}
        %y: bf16[M,7168] = all_reduce(%y.partial) {out="bf16"}

    Heads, expert and MLP widths and the vocabulary are cut; what feeds a norm or a router stays
    whole. The sum of an up-projection and a partial sum is formed by column shards and gathered
    (the latent tail of the stock engines), and sums of two all-reduces share one. The result is
    what reports call "stock": one launch an op. Order: after absorb-mla, before
    all passes that move bytes between ranks. (K3 spec 3)
    """

    name: ClassVar[str] = "shard-stock"
    required: ClassVar[bool] = True

    def rewrite(self, edit: Edit) -> None:
        if edit.graph.tp == 1:
            return
        wants = _Wants(edit)
        for node in list(edit.graph.leaves()):
            try:
                _shard_node(edit, node, wants)
            except TypeRuleError as error:
                site = node.origins[0].site if node.origins else node.op
                raise InputError(f"--tp {edit.graph.tp} does not fit {site}: {error}") from None
        for node in list(edit.graph.leaves()):
            if node.op == "add":
                _tail(edit, node)


class _Wants:
    """Whether everybody who reads a value would take it cut along its last dimension."""

    def __init__(self, edit: Edit) -> None:
        self._outputs = {id(v) for v in edit.graph.outputs}
        self._known: dict[int, bool] = {}

    def __call__(self, value: Value) -> bool:
        if id(value) not in self._known:
            self._known[id(value)] = bool(value.uses) and all(
                self._taken(node, index) for node, index in value.uses
            )
        return self._known[id(value)]

    def _taken(self, node: Node, index: int) -> bool:
        if node.op in ("kda_step", "kda_verify"):
            return STEP_SHARD_DIMS[index] is not None
        if node.op in ("mla_absorb_query", "mla_attend"):
            return index == 0
        if node.op == "argmax":
            return True  # of gathered logits; cutting the LM head saves more than the gather costs
        if node.op == "gated_rms_norm":
            return index < 2
        if node.op in _GATED:
            return self(node.result)
        # A row-parallel linear takes shards, but not one that must itself be column parallel.
        return node.op == "linear" and index == 0 and not self(node.result)


def _shard_node(edit: Edit, node: Node, wants: _Wants) -> None:
    if node.op in _BY_HEAD:
        # bf16 experts have no scales, so there are fewer operands than rows in the table
        for index, (value, dim) in enumerate(zip(node.operands, _BY_HEAD[node.op], strict=False)):
            if dim is not None and value.type.placement.is_replicate:
                _cut(edit, node, index, dim)
    elif node.op == "linear":
        x = node.operands[0].type.placement
        if x.is_shard:
            _cut(edit, node, 1, 1)
        elif wants(node.result):
            _cut(edit, node, 1, 0)
    elif node.op == "argmax" and node.operands[0].type.placement.is_shard:
        _gather_logits(edit, node)
    reduced = [r for r in node.results if r.type.placement.is_partial]  # by an earlier run
    _infer(edit, node)
    for result in node.results:
        if result.type.placement.is_partial and result not in reduced:
            _all_reduce(edit, node, result)


def _infer(edit: Edit, node: Node) -> None:
    types = op_named(node.op).infer(
        [v.type for v in node.operands], node.attrs, Context(edit.graph.tp)
    )
    for result, type_ in zip(node.results, types, strict=True):
        edit.retype(result, type_)


def _cut(edit: Edit, node: Node, index: int, dim: int) -> None:
    """Cut an operand: a weight or state at its source, a derived static value behind it."""
    value = node.operands[index]
    placed = value.type.at(shard(dim))
    if value.type == placed:
        return
    size = placed.shape[dim]
    if not isinstance(size, int) or size % edit.graph.tp:
        raise TypeRuleError(
            f"dimension {dim} of %{value.name}: {value.type} does not divide by {edit.graph.tp} "
            "ranks"
        )
    if _cut_source(edit, value, dim):
        return
    new = edit.make(
        "take_shard",
        [value],
        {"dim": dim},
        name=f"{value.name}.shard",
        origins=node.origins,
        role="made",
    )
    edit.insert_before(node, new)
    edit.set_operand(node, index, new.result)


def _cut_source(edit: Edit, value: Value, dim: int) -> bool:
    """Cut the weight or state that `value` is a static view of; False when a view is in the way."""
    if value.kind in ("weight", "state"):
        edit.retype(value, value.type.at(shard(dim)))
        return True
    producer = value.producer
    if producer is None or producer.op not in ("view", "slice"):
        return False
    source = producer.operands[0]
    if producer.op == "view":
        source_dim = _same_blocks(source, value, dim, edit.graph.tp)
    else:
        source_dim = None if producer.attrs["dim"] == dim else dim
    if source_dim is None or not _cut_source(edit, source, source_dim):
        return False
    for user in source.users():
        _infer(edit, user)
    return value.type.placement == shard(dim)


def _same_blocks(source: Value, view: Value, dim: int, tp: int) -> int | None:
    """The dimension whose blocks are those of dimension `dim` of a view, if there is one."""
    for candidate, size in enumerate(source.type.shape):
        if not isinstance(size, int) or size % tp:
            continue
        cut = source.type.at(shard(candidate))
        with contextlib.suppress(TypeRuleError):
            (type_,) = op_named("view").infer([cut], {"shape": view.type.shape}, Context(tp))
            if type_.placement == shard(dim):
                return candidate
    return None


def _all_reduce(edit: Edit, node: Node, result: Value) -> None:
    """Sum a partial result over the ranks; terms of a matrix product stay f32 until then."""
    wanted = result.type.dtype
    if node.op in ("linear", "moe_experts") and wanted.itemsize < DType.F32.itemsize:
        edit.set_attr(node, "out", "f32")
        _infer(edit, node)
    rounds = wanted != result.type.dtype
    _after(edit, node, result, "all_reduce", {"out": wanted.value} if rounds else {})


def _after(edit: Edit, node: Node, result: Value, op: str, attrs: dict[str, Attr]) -> Value:
    """Insert a collective behind a result; everybody reads what it gives."""
    name = result.name
    result.name = edit.unique(f"{name}.local")
    new = edit.make(op, [result], attrs, name=f"{name}.whole", origins=node.origins, role="made")
    edit.insert_after(node, new)
    edit.replace_uses(result, new.result, keep=[new])
    new.result.name = name
    return new.result


def _gather_logits(edit: Edit, node: Node) -> None:
    logits = node.operands[0]
    assert logits.producer is not None
    _after(edit, logits.producer, logits, "all_gather", {"dim": 1})


def _reduced(value: Value) -> Node | None:
    """The all-reduce that made a value which nobody else reads."""
    node = value.producer
    return node if node is not None and node.op == "all_reduce" and len(value.uses) == 1 else None


def _tail(edit: Edit, node: Node) -> None:
    a, b = node.operands
    first, second = _reduced(a), _reduced(b)
    if first is not None and second is not None:
        _share_all_reduce(edit, node, first, second)
    elif first is not None or second is not None:
        reduce = first or second
        assert reduce is not None
        other = b if reduce is first else a
        linear = other.producer
        if linear is None or linear.op != "linear" or len(other.uses) > 1:
            return  # an ordinary residual add
        width = other.type.shape[1]
        if not linear.operands[1].type.placement.is_replicate:
            return
        if not isinstance(width, int) or width % edit.graph.tp:
            edit.refuse(node, f"width {width} does not divide by {edit.graph.tp} ranks", other)
            return
        _column_tail(edit, node, reduce, linear)


def _share_all_reduce(edit: Edit, node: Node, first: Node, second: Node) -> None:
    for index, reduce in enumerate((first, second)):
        edit.set_operand(node, index, reduce.operands[0])
        edit.erase(reduce)
    _infer(edit, node)
    users = node.result.users()
    if len(users) == 1 and users[0].op == "cast":  # the sum is rounded where the reduce ends
        cast, attrs = users[0], {"out": users[0].attrs["dtype"]}
        whole = _after(edit, node, node.result, "all_reduce", attrs)
        node.origins = tuple(dict.fromkeys((*node.origins, *cast.origins)))
        edit.replace_uses(cast.result, whole)
        edit.erase(cast)
    else:
        _after(edit, node, node.result, "all_reduce", dict(first.attrs))


def _column_tail(edit: Edit, node: Node, reduce: Node, linear: Node) -> None:
    edit.retype(linear.operands[1], linear.operands[1].type.at(shard(0)))
    _infer(edit, linear)
    partial = reduce.operands[0]
    scattered = edit.make(
        "reduce_scatter",
        [partial],
        {"dim": 1, **reduce.attrs},
        name=f"{reduce.result.name}.shard",
        origins=reduce.origins,
    )
    edit.insert_before(reduce, scattered)
    edit.replace_uses(reduce.result, scattered.result)
    edit.erase(reduce)
    _infer(edit, node)
    _after(edit, node, node.result, "all_gather", {"dim": 1})
