"""The one ordered tuple of passes, and what each line of the order is for."""

from __future__ import annotations

from k3fuse.errors import InputError
from k3fuse.passes.absorb_mla import AbsorbMla
from k3fuse.passes.assign_streams import AssignStreams
from k3fuse.passes.base import Pass
from k3fuse.passes.canonicalize import Canonicalize
from k3fuse.passes.dce import Dce
from k3fuse.passes.form_launches import FormLaunches
from k3fuse.passes.fuse_comm import FuseComm
from k3fuse.passes.fuse_experts import FuseExperts, FuseSharedExpert
from k3fuse.passes.fuse_kda_core import FuseKdaCore
from k3fuse.passes.fuse_mla import FuseMlaQuery, FuseMlaValue
from k3fuse.passes.fuse_prologue import FusePrologue
from k3fuse.passes.group_attn_res import GroupAttnRes
from k3fuse.passes.insert_l2_prefetch import InsertL2Prefetch
from k3fuse.passes.insert_pdl import InsertPdl
from k3fuse.passes.keep_received import KeepReceived
from k3fuse.passes.lower_collectives import LowerCollectives
from k3fuse.passes.merge_projections import MergeProjections
from k3fuse.passes.shard_stock import ShardStock
from k3fuse.passes.split_argmax import SplitArgmax
from k3fuse.passes.split_attn_res import SplitAttnRes
from k3fuse.passes.split_replicated import SplitReplicated

STOCK = "shard-stock"
"""The graph after this pass is what reports call stock: one launch an op."""

PIPELINE: tuple[Pass, ...] = (
    Canonicalize(),
    Dce(),
    AbsorbMla(),  # before sharding: the absorbed ops are the ones split by heads
    ShardStock(),
    SplitReplicated(),  # from here on bytes move between ranks
    SplitArgmax(),
    SplitAttnRes(),
    MergeProjections(),  # after the splits: it merges shards
    FuseKdaCore(),
    FuseMlaQuery(),
    FuseMlaValue(),
    FuseExperts(),
    FuseSharedExpert(),  # joins the launch that fuse-experts made
    GroupAttnRes(),
    LowerCollectives(),  # after all passes that look for whole collectives
    FuseComm(),
    FusePrologue(),  # after fuse-comm: producers keep their epilogues
    KeepReceived(),  # when it is settled which launches read what
    FormLaunches(),
    InsertL2Prefetch(),
    AssignStreams(),
    InsertPdl(),
)


def pass_named(name: str) -> Pass:
    """The pass of that CLI name; InputError lists the names."""
    for item in PIPELINE:
        if item.name == name:
            return item
    known = ", ".join(p.name for p in PIPELINE)
    raise InputError(f"unknown pass '{name}'; passes in order: {known}")
