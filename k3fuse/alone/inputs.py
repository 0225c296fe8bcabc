"""Random values for all that a program reads, spread as they are in a model.

Caches hold NaN where no row may look; ids, slots and pages are random but possible; logits that
come from outside lie on a grid, so that equal ones occur and near ones do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from k3fuse.kernels.program import Program, Step
from k3fuse.tensor_type import DType

CODE_RMS = 2.93  # root mean square of the MXFP4 codes


def outside(program: Program) -> list[int]:
    """Values that no step makes."""
    made = {r for step in program.steps for r in step.results}
    return [i for i, v in enumerate(program.values) if i not in made and v.root == i]


def rows_per_request(program: Program) -> int:
    """Rows of a request, 1 where nothing says otherwise."""
    found = [step.attribute("rows_per_request") for step in program.steps]
    return max((int(rows) for rows in found if rows is not None), default=1)


def draw(
    program: Program, device: str, *, keep: dict[int, Tensor] | None = None
) -> dict[int, Tensor]:
    """A tensor for each value from outside; those in `keep` are taken as they are."""
    return _Drawer(program, device).all(keep or {})


class _Drawer:
    def __init__(self, program: Program, device: str) -> None:
        self.program = program
        self.device = device
        self.rows = rows_per_request(program)
        self.use: dict[int, tuple[Step, int]] = {}
        for step in program.steps:
            for position, value in enumerate(step.operands):
                self.use.setdefault(self._origin(value), (step, position))
                if self.use[self._origin(value)][0].op == "receive":
                    self.use[self._origin(value)] = (step, position)

    def _origin(self, value: int) -> int:
        """Past receives, and from versions of a state to its root."""
        step = self.program.producer(value)
        if step is not None and step.op == "receive":
            return self._origin(step.operands[0])
        return self.program.values[value].root

    def all(self, keep: dict[int, Tensor]) -> dict[int, Tensor]:
        found = dict(keep)
        values = [v for v in outside(self.program) if v not in found]
        late = [v for v in values if self._special(v) == "cache"]
        for value in [*(v for v in values if v not in late), *late]:
            held = self.program.values[value]
            made = self._one(value, found)
            assert tuple(made.shape) == held.shape, (value, held, made.shape)
            dtype = DType(held.dtype).to_torch()
            made = made.to(dtype)
            if held.place == "mailbox" and dtype.is_floating_point:
                made = made + 0.0  # -0.0 does not travel
            found[value] = made.contiguous()
        return found

    def _special(self, value: int) -> str:
        """ "cache" for the paged cache, whose content depends on the requests."""
        if value not in self.use:
            return ""
        step, position = self.use[value]
        cache = {"mla_append": 0, "mla_attend_latent": 1}.get(step.op)
        return "cache" if cache == position else ""

    def _one(self, value: int, found: dict[int, Tensor]) -> Tensor:
        if value not in self.use:  # read by nothing, such as a state that is only written
            return self._normal(value)
        step, position = self.use[value]
        if self._special(value) == "cache":
            return self._cache(value, found)
        make = _BY_OP.get((step.op, position))
        if make is not None:
            return make(self, value, step)
        held = self.program.values[value]
        if held.dtype in ("i32", "i64"):
            return torch.zeros(held.shape, dtype=torch.int64, device=self.device)
        if held.dtype == "u8":
            return torch.empty(held.shape, dtype=torch.uint8, device=self.device).random_(0, 256)
        scale = held.shape[0] ** -0.5 if held.place == "mailbox" and len(held.shape) == 3 else 1.0
        return self._normal(value, scale)

    def _normal(self, value: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        held = self.program.values[value]
        dtype = DType(held.dtype).to_torch()
        made = torch.empty(held.shape, dtype=dtype, device=self.device)
        return made.normal_(mean, scale)

    # -- distributions -------------------------------------------------------------------------
    def matrix(self, value: int, step: Step) -> Tensor:
        """A weight over its last dimension."""
        return self._normal(value, self.program.values[value].shape[-1] ** -0.5)

    def over_middle(self, value: int, step: Step) -> Tensor:
        """W_UK [heads, nope, kv_lora], summed over nope."""
        return self._normal(value, self.program.values[value].shape[1] ** -0.5)

    def unit(self, value: int, step: Step) -> Tensor:
        return self._normal(value)

    def half(self, value: int, step: Step) -> Tensor:
        return self._normal(value, 0.5)

    def tenth(self, value: int, step: Step) -> Tensor:
        return self._normal(value, 0.1)

    def norm_weight(self, value: int, step: Step) -> Tensor:
        return self._normal(value, 0.1, 1.0)

    def query(self, value: int, step: Step) -> Tensor:
        """A folded AttnRes query: scores of about 1."""
        return self._normal(value, self.program.values[value].shape[-1] ** -0.5)

    def denominator(self, value: int, step: Step) -> Tensor:
        return self._uniform(value, 1.0, 6.0)

    def _uniform(self, value: int, low: float, high: float) -> Tensor:
        shape = self.program.values[value].shape
        return torch.rand(shape, device=self.device) * (high - low) + low

    def grid(self, value: int, step: Step) -> Tensor:
        """Logits on a grid of 1/64: equal ones occur, near ones do not."""
        return (self._normal(value) * 64).round() / 64

    def coarse_grid(self, value: int, step: Step) -> Tensor:
        """Candidates of ranks, so few values that ties are common."""
        return (self._normal(value) * 2).round() / 2

    def bias(self, value: int, step: Step) -> Tensor:
        return (self._normal(value, 0.1) * 16).round() / 16

    def expert_ids(self, value: int, step: Step) -> Tensor:
        """Different experts in each row."""
        rows, chosen = self.program.values[value].shape
        experts = self.program.values[step.operands[3]].shape[0]
        return torch.rand(rows, experts, device=self.device).argsort(-1)[:, :chosen]

    def expert_weights(self, value: int, step: Step) -> Tensor:
        made = self._uniform(value, 0.1, 1.0)
        return made / made.sum(-1, keepdim=True)

    def scales(self, value: int, step: Step) -> Tensor:
        """Scale bytes that make rows of the weight about as long as 1."""
        held = self.program.values[value]
        middle = round(127 - math.log2(CODE_RMS * (held.shape[-1] * 32) ** 0.5))
        made = torch.empty(held.shape, dtype=torch.uint8, device=self.device)
        return made.random_(middle - 3, middle + 3)

    def token_ids(self, value: int, step: Step) -> Tensor:
        table = self.program.values[step.operands[1]]
        vocabulary = table.shape[0] * (self.program.tp if step.attribute("sharded") else 1)
        shape = self.program.values[value].shape
        return torch.randint(0, vocabulary, shape, device=self.device)

    def candidate_ids(self, value: int, step: Step) -> Tensor:
        """Ids of ranks in order, as the shards of a vocabulary are."""
        rows, ranks = self.program.values[value].shape
        base = torch.arange(ranks, device=self.device) * 10240
        return base + torch.randint(0, 10240, (rows, ranks), device=self.device)

    def state_slots(self, value: int, step: Step) -> Tensor:
        """Different slots; of three requests or more, some are padding."""
        requests = self.program.values[value].shape[0]
        states = {"kda_step": 10, "kda_verify": 10, "kda_commit": 8}.get(step.op)
        count = requests
        if states is not None:
            count = self.program.values[step.operands[states]].shape[0]
        assert count >= requests, "fewer slots than requests"
        slots = torch.randperm(count)[:requests]
        if requests >= 3:
            slots[torch.randperm(requests)[: max(1, requests // 8)]] = -1
        return slots.to(self.device)

    def cached_lengths(self, value: int, step: Step) -> Tensor:
        """Tokens in the cache: an empty one, a full one, and others between."""
        requests = self.program.values[value].shape[0]
        most = self._capacity(step) - self.rows
        lengths = torch.randint(0, most + 1, (requests,))
        lengths[0] = most
        if requests >= 2:
            lengths[-1] = 0
        return lengths.to(self.device)

    def accepted_rows(self, value: int, step: Step) -> Tensor:
        rows = self.program.values[step.operands[0]].shape[1]
        return torch.randint(0, rows + 1, self.program.values[value].shape, device=self.device)

    def _capacity(self, step: Step) -> int:
        cache, table = _CACHE_AND_TABLE[step.op]
        page_size = self.program.values[step.operands[cache]].shape[1]
        return self.program.values[step.operands[table]].shape[1] * page_size

    def page_table(self, value: int, step: Step) -> Tensor:
        """Every page to at most one request, in no order."""
        requests, most = self.program.values[value].shape
        cache = self.program.values[step.operands[_CACHE_AND_TABLE[step.op][0]]]
        pages = torch.randperm(cache.shape[0])
        assert len(pages) >= requests * most, "fewer pages than requests may need"
        return pages[: requests * most].view(requests, most).to(self.device)

    def _cache(self, value: int, found: dict[int, Tensor]) -> Tensor:
        """Rows of live requests up to those of this step; NaN in all other places."""
        step, _ = self.use[value]
        table, lengths, slots = (found[v] for v in step.operands[-3:])
        cache = self._normal(value)
        pages, page_size, width = self.program.values[value].shape
        positions = torch.arange(self._capacity(step), device=self.device)
        seen = positions < lengths[:, None] + self.rows
        seen &= (slots >= 0)[:, None]
        place = table.long().repeat_interleave(page_size, 1) * page_size + positions % page_size
        keep = torch.zeros(pages * page_size, dtype=torch.bool, device=self.device)
        keep[place[seen]] = True
        flat = cache.view(pages * page_size, width)
        flat.masked_fill_(~keep[:, None], torch.nan)
        return cache


_CACHE_AND_TABLE = {"mla_append": (0, 3), "mla_attend_latent": (1, 2)}

_Make = Callable[[_Drawer, int, Step], Tensor]


def _expert_weight(drawer: _Drawer, value: int, step: Step) -> Tensor:
    """Random bytes for packed codes."""
    held = drawer.program.values[value]
    if held.dtype == "u8":
        return torch.empty(held.shape, dtype=torch.uint8, device=drawer.device).random_(0, 256)
    return drawer.matrix(value, step)


_KDA_STEP: dict[int, _Make] = {
    **dict.fromkeys(range(5, 8), _Drawer.half),  # convolution taps
    8: _Drawer.half,  # a_log
    11: _Drawer.half,  # recurrent state
    12: _Drawer.state_slots,
}
_KDA_COMMIT: dict[int, _Make] = {
    **dict.fromkeys(range(3, 6), _Drawer.half),
    6: _Drawer.half,
    9: _Drawer.half,
    10: _Drawer.state_slots,
    11: _Drawer.accepted_rows,
}

_BY_OP: dict[tuple[str, int], _Make] = {
    ("linear", 1): _Drawer.matrix,
    ("mla_value", 1): _Drawer.matrix,
    ("mla_absorb_query", 1): _Drawer.over_middle,
    ("rms_norm", 1): _Drawer.norm_weight,
    ("gated_rms_norm", 2): _Drawer.norm_weight,
    ("attn_res_blocks", 0): _Drawer.query,
    ("attn_res_merge", 0): _Drawer.query,
    ("attn_res_merge", 2): _Drawer.denominator,
    ("route_topk", 0): _Drawer.grid,
    ("route_topk", 1): _Drawer.bias,
    ("argmax", 0): _Drawer.grid,
    ("argmax_local", 0): _Drawer.grid,
    ("argmax_pick", 0): _Drawer.coarse_grid,
    ("argmax_pick", 1): _Drawer.candidate_ids,
    ("embedding", 0): _Drawer.token_ids,
    ("moe_experts", 1): _Drawer.expert_ids,
    ("moe_experts", 2): _Drawer.expert_weights,
    ("mla_append", 3): _Drawer.page_table,
    ("mla_append", 4): _Drawer.cached_lengths,
    ("mla_append", 5): _Drawer.state_slots,
    ("mla_attend_latent", 2): _Drawer.page_table,
    ("mla_attend_latent", 3): _Drawer.cached_lengths,
    ("mla_attend_latent", 4): _Drawer.state_slots,
    **{("kda_step", i): make for i, make in _KDA_STEP.items()},
    **{("kda_verify", i): make for i, make in _KDA_STEP.items()},
    **{("kda_commit", i): make for i, make in _KDA_COMMIT.items()},
    **{("moe_experts", i): _expert_weight for i in (3, 4, 5)},
    **{("moe_experts", i): _Drawer.scales for i in (6, 7, 8)},
}
"""How to draw what an op reads at an operand's position; all else is normal."""
