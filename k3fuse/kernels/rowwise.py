"""Stages over rows: elementwise work (`point`), and norms or merges over whole rows (`row`).

A row stage keeps a row in the registers of a CTA, or of a cluster of CTAs when it is a launch of
its own: bound by latency, not bandwidth, so that as many loads as possible are in flight at once.
"""

from __future__ import annotations

from k3fuse.kernels.family import StagePlan, require
from k3fuse.kernels.program import ITEMSIZE, Program
from k3fuse.kernels.stages import POINTWISE, PUSHES, Stage
from k3fuse.target import Target

MAX_THREADS = 512
MAX_ELEMENTS = 32
"""Elements of a thread: registers hold a row between its passes."""

SLOT_BYTES = 128
"""Terms of a sum over ranks that a thread has on their way at once, so that they are one trip to
the L2 and not several."""


BOARDS_BYTES = 2048
"""Of the partial sums of a row: two boards, of two sums over up to 128 warps of a cluster."""

BARRIERS_BYTES = 32
"""Of a row that a cluster shares and all its CTAs keep: one a board, and one of the row."""

PRIVATE_CLUSTER = 2
"""CTAs that share the work of a private row: SMs come in pairs, so that all are in use. 46 MB
behind a row at M=1 take 13.7 us, 14.1 where every CTA does all of it; 13 MB 6.0 and 6.7."""


def width_of(program: Program, stage: Stage) -> int:
    """Columns that a thread handles at once: a vector of at most 16 bytes of bfloat16 that no
    value of the stage cuts."""
    sizes: list[int] = []
    for i in stage.steps:
        step = program.steps[i]
        for value in (*step.operands, *step.results):
            held = program.values[value]
            if held.dtype in ("bf16", "f32") and len(held.shape) > 1:
                sizes.append(held.shape[-1])
        if step.op == "slice":
            sizes.append(int(step.attribute("start") or 0))
        if step.op == "push_chunks":
            sizes.append(program.values[step.operands[0]].width // program.tp)
        for operand in step.operands:
            sizes += _lazy_sizes(program, operand)
    most = min([8, *(_slot_width(program, i) for i in _with_lazy(program, stage))])
    return next(w for w in (8, 4, 2, 1) if w <= most and all(size % w == 0 for size in sizes))


def _with_lazy(program: Program, stage: Stage) -> set[int]:
    """The stage's steps, and those evaluated where it reads."""
    found, todo = set(stage.steps), list(stage.steps)
    for i in todo:
        for operand in program.steps[i].operands:
            for j, step in enumerate(program.steps):
                if operand in step.results and step.op in POINTWISE and j not in found:
                    found.add(j)
                    todo.append(j)
    return found


def _slot_width(program: Program, step: int) -> int:
    """Columns at once of a sum over ranks."""
    if program.steps[step].op != "sum_slots":
        return 8
    held = program.values[program.steps[step].operands[0]]
    most = SLOT_BYTES // (held.rows * ITEMSIZE[held.dtype])
    return next((w for w in (8, 4, 2) if w <= most), 2)


def _lazy_sizes(program: Program, value: int) -> list[int]:
    """The same for what is evaluated on the way."""
    step = program.producer(value)
    if step is None or step.op not in ("slice", "sum_slots", "receive", "add", "embedding"):
        return []
    found = [int(step.attribute("start") or 0)] if step.op == "slice" else []
    for operand in step.operands:
        held = program.values[operand]
        if held.dtype in ("bf16", "f32") and len(held.shape) > 1:
            found.append(held.shape[-1])
        found += _lazy_sizes(program, operand)
    return found


def shape_of(program: Program, stage: Stage) -> tuple[int, int]:
    """Rows and columns that the stage goes over."""
    steps = [program.steps[i] for i in stage.steps]
    made = [step.results[0] for step in steps if step.op not in PUSHES]
    held = program.values[made[-1] if made else steps[0].operands[0]]
    return held.rows, held.width


def plan_point(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Elementwise steps on vectors of neighbouring columns, spread over all threads."""
    rows, columns = shape_of(program, stage)
    for i in stage.steps:
        for value in program.steps[i].results:
            dtype = program.values[value].dtype
            require(dtype in ("bf16", "f32"), f"elementwise work on {dtype}")
    require(rows * columns < 2**31, "counts elements in 32 bits")
    vectors = rows * columns // width_of(program, stage)
    return StagePlan(items=-(-vectors // 128), threads=128)


def plan_row(program: Program, stage: Stage, target: Target) -> StagePlan:
    """Rows one by one, each by a whole CTA (or cluster)."""
    rows, columns = shape_of(program, stage)
    most = MAX_THREADS * MAX_ELEMENTS
    require(columns <= most, f"rows of {columns}: {most} fit the registers of a CTA")
    width = width_of(program, stage)
    shared = stage.private and width > 1 and columns % (PRIVATE_CLUSTER * width) == 0
    return StagePlan(
        items=rows,
        threads=threads_of(program, stage, 1),
        cluster=PRIVATE_CLUSTER if shared else 1,
        smem=BOARDS_BYTES + BARRIERS_BYTES,
    )


def cluster_of(program: Program, stage: Stage, most: int) -> int:
    """CTAs that share a row of a launch of its own: at least 512 columns each."""
    _, columns = shape_of(program, stage)
    width = width_of(program, stage)
    return next(
        c
        for c in (8, 4, 2, 1)
        if c == 1 or (columns >= 512 * c and columns % (c * width) == 0 and c <= most)
    )


def threads_of(program: Program, stage: Stage, cluster: int) -> int:
    """Threads of a CTA that holds its share of a row."""
    _, columns = shape_of(program, stage)
    vectors = -(-columns // (width_of(program, stage) * cluster))
    share = -(-vectors // -(-vectors // MAX_THREADS))  # of a thread each, none idle
    return max(64, -(-share // 32) * 32)
