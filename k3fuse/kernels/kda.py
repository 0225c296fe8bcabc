"""Stages of Kimi delta attention: the delta rule, its conv windows and journals, the head norm.

The rule treats every value row of a head's state S[v, k] alone, so a head is cut into slices of
value rows, one item each. An item brings its slice of S into registers once, runs the rows of the
request and writes S back once. What all slices of a head need (q, k, decay) each computes for
itself, in shared memory. Bound by the bytes of S, read and (but for a verify) written.

The slices of a head read the conv windows that the step replaces, so a following stage replaces
them, behind the barrier that the head norm needs anyway. A commit has no such stage behind it: its
items are whole heads, and the CTA that read a window replaces it.

A decode step of few requests is one stage instead: a cluster of CTAs does a head from the
projection of its decay to its norm, and no barrier of the grid is needed.

Where other stages stand before the rule, S and the windows are asked into the L2 before the barrier
between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import Program, Step
from k3fuse.kernels.stages import Stage
from k3fuse.target import Target

TAPS = 4
"""Width of the short convolution: three past inputs and the present one."""
LANES = 8
"""Lanes that share a value row; each holds every eighth float4 of it."""
SLICES = (16, 32, 64, 128)
"""Value rows of an item, to choose from."""
LONGEST = 64
"""Most value rows where CTAs take several items: the next slice is asked for meanwhile."""
PIECE = 1024
"""Bytes that a thread asks into the L2 at once, line by line."""
THREADS = 256
COMMIT_THREADS = 512


@dataclass(frozen=True)
class RuleOptions:
    """rows: most rows of a request. slice: value rows of an item. threads: those that hold S."""

    requests: int
    heads: int
    head_dim: int
    rows: int
    slice: int
    threads: int
    lower_bound: float | None

    @property
    def items(self) -> int:
        """(request, head, slice), slices of a head next to one another."""
        return self.requests * self.heads * (self.head_dim // self.slice)

    @property
    def row_bytes(self) -> int:
        """q, k, decay, the slice's v, and beta of one row in shared memory, float32."""
        return 4 * (3 * self.head_dim + self.slice + 4)

    @property
    def board_bytes(self) -> int:
        """All rows of an item."""
        return self.rows * self.row_bytes

    @property
    def table_bytes(self) -> int:
        """Slot and count of rows of each request."""
        return -(-8 * self.requests // 16) * 16


@dataclass(frozen=True)
class WindowOptions:
    """Windows or journals of all requests: vectors of neighbouring channels."""

    requests: int
    heads: int
    head_dim: int
    rows: int


@dataclass(frozen=True)
class FetchOptions:
    """pieces: of 1 KiB, of one request's S and of its windows; none where they outgrow the L2."""

    requests: int
    state_pieces: int
    window_pieces: int


@dataclass(frozen=True)
class HeadNormOptions:
    """One head of one row a warp."""

    rows: int
    heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class HeadsOptions:
    """rule: with one row a request. lanes: 16-byte words of a row of the decay's projection."""

    rule: RuleOptions
    lanes: int
    eps: float


def plan_heads(program: Program, stage: Stage, target: Target) -> StagePlan:
    """A head of a request by a cluster of CTAs, a slice of the value rows each, all at once."""
    linear, step, norm = (program.steps[i] for i in stage.steps)
    require(step.op == "kda_step", f"{step.op} keeps its rows")
    options = _options(program, step)
    require(options.rows == 1, f"{options.rows} rows a request")
    fitting = [s for s in SLICES if s <= options.head_dim and options.head_dim // s <= LANES]
    few = [s for s in fitting if _cut(options, s).items <= target.sm_count * 7 // 8]
    require(bool(few), f"{options.requests} requests of {options.heads} heads do not fit at once")
    rule = _cut(options, few[0])
    x, weight = (program.values[v] for v in linear.operands)
    made = program.values[linear.results[0]]
    require(
        x.dtype == weight.dtype == made.dtype == "bf16" and x.width % 8 == 0,
        f"the decay's projection of {x.dtype} by {weight.dtype}",
    )
    lanes = x.width // 8
    require(lanes in (1, 2, 4, 8, 16, 32), f"the decay's projection of {x.width} columns")
    _, gate, scale = (program.values[v] for v in norm.operands)
    require(gate.dtype == "bf16" and scale.shape[0] == options.head_dim, "norm of heads")
    return StagePlan(
        items=rule.items,
        threads=rule.threads,
        smem=rule.board_bytes + 8 * options.head_dim,
        options=HeadsOptions(rule, lanes, _number(norm, "eps")),
        cluster=options.head_dim // rule.slice,
    )


def plan_kda(program: Program, stage: Stage, target: Target) -> StagePlan:
    """kda_step and kda_verify: the smallest slices that all SMs take at once, else long ones."""
    step = program.steps[stage.steps[0]]
    options = _options(program, step)
    busy = target.sm_count * 7 // 8
    fitting = [s for s in SLICES if s <= options.head_dim]
    few = [s for s in fitting if _cut(options, s).items <= busy]
    chosen = few[0] if few else max(s for s in fitting if s <= LONGEST)
    return _rule_plan(_cut(options, chosen))


def plan_fetch(program: Program, stage: Stage, target: Target) -> StagePlan:
    """S and the conv windows into the L2, ahead of the barrier that the delta rule waits for."""
    options = _options(program, program.steps[stage.steps[0]])
    channels = options.heads * options.head_dim
    state, window = 4 * channels * options.head_dim, 6 * 3 * channels
    if options.requests * state > target.l2_bytes // 2:
        state = 0
    pieces = FetchOptions(options.requests, state // PIECE, -(-window // PIECE))
    units = options.requests * (pieces.state_pieces + pieces.window_pieces)
    return StagePlan(items=-(-units // 32), threads=64, options=pieces)


def plan_commit(program: Program, stage: Stage, target: Target) -> StagePlan:
    """kda_commit: whole heads, so that no other CTA reads the windows that one replaces."""
    step = program.steps[stage.steps[0]]
    options = _options(program, step)
    return _rule_plan(_cut(options, options.head_dim, COMMIT_THREADS))


def plan_window(program: Program, stage: Stage, target: Target) -> StagePlan:
    """The conv windows after a kda_step: read 6 and write 6 bytes a channel."""
    options = _options(program, program.steps[stage.steps[0]])
    units = options.requests * 3 * options.heads * options.head_dim // 4
    return StagePlan(items=-(-units // 64), threads=64, options=_window(options))


def plan_journal(program: Program, stage: Stage, target: Target) -> StagePlan:
    """The inputs of a kda_verify into the journals, 16 bytes a thread at once."""
    step = program.steps[stage.steps[0]]
    options = _options(program, step)
    require(
        all(program.values[v].dtype == "bf16" for v in step.operands[13:16]),
        "journals are not bfloat16",
    )
    units = options.requests * options.rows * 4 * options.heads * options.head_dim // 8
    return StagePlan(items=-(-units // 128), threads=128, options=_window(options))


def plan_head_norm(program: Program, stage: Stage, target: Target) -> StagePlan:
    """gated_rms_norm: warps take (row, head) in turn, spread over the CTAs first."""
    step = program.steps[stage.steps[0]]
    o, gate, weight = (program.values[v] for v in step.operands)
    head_dim = weight.shape[0]
    require(head_dim in (32, 64, 128), f"heads of {head_dim}")
    require(o.dtype == "f32" and gate.dtype == "bf16", f"norm of {o.dtype} gated by {gate.dtype}")
    require(o.width % head_dim == 0, f"{o.width} columns are not heads of {head_dim}")
    options = HeadNormOptions(o.rows, o.width // head_dim, head_dim, _number(step, "eps"))
    return StagePlan(items=-(-options.rows * options.heads // 4), threads=128, options=options)


def _options(program: Program, step: Step) -> RuleOptions:
    """Sizes of a step, verify or commit after checking what the device code takes for granted."""
    values = [program.values[v] for v in step.operands]
    commit = step.op == "kda_commit"
    inputs, weights = values[: 3 if commit else 5], values[3:8] if commit else values[5:10]
    conv, recurrent, slots = values[8:11] if commit else values[10:13]
    head_dim = int(_number(step, "head_dim"))
    require(head_dim in (32, 64, 128), f"heads of {head_dim}")
    require(all(v.dtype == "bf16" for v in inputs), "inputs of the delta rule are not bfloat16")
    require(all(v.dtype in ("f32", "bf16") for v in weights), "weights of the delta rule")
    require(weights[0].shape[-1] == TAPS, f"convolution of {weights[0].shape[-1]} taps")
    require(len({v.dtype for v in weights[:3]}) == 1, "convolutions differ in dtype")
    require(
        conv.dtype == "bf16" and recurrent.dtype == "f32",
        f"conv state {conv.dtype}, recurrent state {recurrent.dtype}",
    )
    require(recurrent.shape[2:] == (head_dim, head_dim), f"state {recurrent.shape}")
    require(slots.dtype == "i32", f"slots {slots.dtype}")
    requests = slots.shape[0]
    rows = values[0].shape[1] if commit else int(_number(step, "rows_per_request"))
    require(commit or values[0].rows == requests * rows, "rows are not those of the requests")
    bound = step.attribute("gate_lower_bound")
    return RuleOptions(
        requests=requests,
        heads=recurrent.shape[1],
        head_dim=head_dim,
        rows=rows,
        slice=head_dim,
        threads=THREADS,
        lower_bound=None if bound is None else float(bound),
    )


def _cut(options: RuleOptions, size: int, most: int = THREADS) -> RuleOptions:
    """The same with slices of `size` value rows."""
    return RuleOptions(
        requests=options.requests,
        heads=options.heads,
        head_dim=options.head_dim,
        rows=options.rows,
        slice=size,
        threads=min(most, size * LANES),
        lower_bound=options.lower_bound,
    )


def _rule_plan(options: RuleOptions) -> StagePlan:
    """Two boards: the next item is prepared while slow warps still read the last one."""
    return StagePlan(
        items=options.items,
        threads=options.threads,
        smem=options.table_bytes + 2 * options.board_bytes,
        options=options,
    )


def _window(options: RuleOptions) -> WindowOptions:
    return WindowOptions(options.requests, options.heads, options.head_dim, options.rows)


def _number(step: Step, name: str) -> float:
    value = step.attribute(name)
    require(isinstance(value, (int, float)), f"{step.op} has no {name}")
    assert isinstance(value, (int, float))
    return value
