"""The graph IR: data, op set, text form, verifier, interpreter. The rest imports `k3fuse.ir`."""

from k3fuse.ir import ops as _ops  # registers every op
from k3fuse.ir.graph import FUSED, Attr, Graph, Node, Origin, Value
from k3fuse.ir.interpreter import Environment, assemble, run, run_node, shard_tensor
from k3fuse.ir.op import Context, Op, TypeRuleError, all_ops, op_named
from k3fuse.ir.parser import parse_graph
from k3fuse.ir.printer import print_graph, print_node
from k3fuse.ir.rewriter import Rewriter, sort_nodes
from k3fuse.ir.state import state_roots
from k3fuse.ir.verifier import verify

del _ops

__all__ = [
    "FUSED",
    "Attr",
    "Context",
    "Environment",
    "Graph",
    "Node",
    "Op",
    "Origin",
    "Rewriter",
    "TypeRuleError",
    "Value",
    "all_ops",
    "assemble",
    "op_named",
    "parse_graph",
    "print_graph",
    "print_node",
    "run",
    "run_node",
    "shard_tensor",
    "sort_nodes",
    "state_roots",
    "verify",
]
