"""What a decode step of a Kimi model reads, carries and returns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Mode = Literal["commit", "verify"]
"""commit: the rows are decided and advance the state. verify: they are drafts, only journalled."""


class KdaState(NamedTuple):
    """What a KDA layer carries for each slot, and the rows of the last verify."""

    conv: torch.Tensor  # [slots, 3, P, W-1], past inputs of q, k, v, oldest first
    recurrent: torch.Tensor  # [slots, H, V, K] float32
    journal_qkv: torch.Tensor  # [slots, rows, 3, P]
    journal_f: torch.Tensor  # [slots, rows, P]
    journal_b: torch.Tensor  # [slots, rows, H]


class MlaState(NamedTuple):
    """The paged latent cache of an MLA layer, shared by all requests."""

    cache: torch.Tensor  # [pages, page_size, kv_lora + rope]


LayerState = KdaState | MlaState
DecodeState = list[LayerState]
"""One entry a layer."""


class StepInputs(NamedTuple):
    """One step of R requests with M = R * rows_per_request rows, a request's rows contiguous."""

    tokens: torch.Tensor  # [M] int64
    lengths: torch.Tensor  # [R] int32, tokens that the state already holds
    block_table: torch.Tensor  # [R, max_pages] int32, pages of the MLA caches
    slots: torch.Tensor  # [R] int32, row of the KDA states; -1 for padding


class StepOutputs(NamedTuple):
    """What a step gives; hidden is the row that enters the LM head, after the final norm."""

    logits: torch.Tensor  # [M, V] float32
    tokens: torch.Tensor  # [M] int64, greedy
    hidden: torch.Tensor  # [M, hidden]
    state: DecodeState


class Step(NamedTuple):
    """What every layer needs to know of a step, as in `StepInputs`."""

    lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    rows_per_request: int
    mode: Mode
