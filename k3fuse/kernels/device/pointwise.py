"""Elementwise ops of a fused body, evaluated at neighbouring columns of one row.

The fused body is the source: nothing here knows which ops follow one another.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from k3fuse.kernels.device import instructions as ins
from k3fuse.kernels.launch import inlined
from k3fuse.kernels.program import ITEMSIZE
from k3fuse.kernels.stages import PUSHES

LOG2_E = 1.4426950408889634


class Pointwise:
    """Evaluates the elementwise steps of one stage."""

    def __init__(self, ctx, number):
        self.ctx = ctx
        self.program = ctx.program
        self.inline = inlined(ctx.config, number)
        self.stage = ctx.config.stages[number]

    def value(self, value, row, column, width, known):
        """Elements of a value as float32, rounded to its dtype; `known` holds those at hand."""
        if value in known:
            return known[value]
        if value in self.inline:
            step = self.program.producer(value)
            known[value] = rounded(
                self.apply(step, row, column, width, known), self.ctx.held(value).dtype
            )
        else:
            known[value] = self.ctx.load(value, row, column, width)
        return known[value]

    def apply(self, step, row, column, width, known):
        """The result of one elementwise step, not rounded."""
        op = step.op
        if op == "sum_slots":
            return self.ctx.sum_slots(step.operands[0], row, column, width)
        if op == "slice":
            start = step.attribute("start") if step.attribute("dim") == 1 else 0
            return self.value(step.operands[0], row, column + start, width, {})
        if op == "embedding":
            return self.embedding(step, row, column, width)
        parts = [self.value(v, row, column, width, known) for v in step.operands]
        if op in ("receive", "cast"):
            return parts[0]
        return [ELEMENTWISE[op](step, *elements) for elements in zip(*parts, strict=True)]

    def embedding(self, step, row, column, width):
        """A row of the table; zeros where another rank holds it."""
        tokens, table = step.operands
        held = self.ctx.held(table)
        token = cute.arch.load(cute.recast_ptr(self.ctx.address(tokens), dtype=Int64) + row, Int64)
        local = token
        if step.attribute("sharded"):
            local = token - Int64(self.ctx.given["rank"]) * held.rows
        mine = (local >= Int64(0)) & (local < Int64(held.rows))
        place = cutlass.select_(mine, local, Int64(0))
        at = (place * held.width + Int64(column)) * ITEMSIZE[held.dtype]
        words = ins.load_words(
            self.ctx.address(table) + at, width * ITEMSIZE[held.dtype], "global.L1::no_allocate"
        )
        from k3fuse.kernels.device.context import unpack

        values = unpack(words, held.dtype, width)
        return [cutlass.select_(mine, value, Float32(0.0)) for value in values]

    def steps_with(self, results):
        """The stage's steps that need some of the results, and what those need besides."""
        steps = [self.program.steps[i] for i in self.stage.steps]
        wanted, chosen = set(results), []
        for step in steps:
            if wanted & {*step.operands, *step.results}:
                chosen.append(step)
                if step.op not in PUSHES:
                    wanted.update(step.results)
        needed = {operand for step in chosen for operand in step.operands}
        for step in reversed(steps):
            inline = step.op not in PUSHES and step.results[0] in self.inline
            if inline and step not in chosen and step.results[0] in needed:
                chosen.append(step)
                needed.update(step.operands)
        return [step for step in steps if step in chosen]

    def finish(self, known, row, column, width, live=None, steps=None, spread=None):
        """After the stage's own results are in `known`: its elementwise steps and its stores.

        steps: those to do (None: all of the stage). spread: as in `Context.push`.
        """
        if steps is None:
            steps = [self.program.steps[i] for i in self.stage.steps]
        for step in steps:
            if step.op in PUSHES:
                if step.operands[0] not in self.made():
                    from k3fuse.kernels.device.context import pack

                    values = self.value(step.operands[0], row, column, width, known)
                    words = pack(values, self.ctx.held(step.operands[0]).dtype)
                    self.ctx.push(step, row, column, words, width, live, spread)
                continue
            for result in step.results:
                if result in self.inline or result in known:
                    values = self.value(result, row, column, width, known)
                    self.ctx.sink(result, row, column, values, live, spread)

    def made(self):
        """Values that this stage's steps make."""
        return {r for i in self.stage.steps for r in self.program.steps[i].results}


def rounded(values, dtype):
    """To the dtype of a value."""
    return ins.round_bf16(values) if dtype == "bf16" else values


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(x * Float32(-LOG2_E)))


def tanh(x):
    """2 sigmoid(2x) - 1 loses small values; below 1/16 the series is exact to rounding."""
    square = x * x
    series = x * (Float32(1.0) + square * (Float32(-1.0 / 3.0) + square * Float32(2.0 / 15.0)))
    far = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(
        Float32(1.0) + cute.arch.exp2(x * Float32(2.0 * LOG2_E))
    )
    return cutlass.select_(square < Float32(1.0 / 256.0), series, far)


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def situ(gate, up, beta, linear_beta):
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)."""
    g = tanh(gate * Float32(1.0 / beta)) * Float32(beta) * sigmoid(gate)
    return g * (tanh(up * Float32(1.0 / linear_beta)) * Float32(linear_beta))


ELEMENTWISE = {
    "add": lambda step, a, b: a + b,
    "mul": lambda step, a, b: a * b,
    "sigmoid": lambda step, x: sigmoid(x),
    "silu": lambda step, x: silu(x),
    "silu_mul": lambda step, gate, up: silu(gate) * up,
    "sigmoid_mul": lambda step, x, gate: x * sigmoid(gate),
    "situ_mul": lambda step, gate, up: situ(
        gate, up, step.attribute("beta"), step.attribute("linear_beta")
    ),
}


def make(ctx, number):
    """The stage of elementwise steps alone: every thread takes vectors in turn."""
    from k3fuse.kernels.rowwise import shape_of, width_of

    stage = ctx.config.stages[number]
    width = width_of(ctx.program, stage)
    rows, columns = shape_of(ctx.program, stage)
    vectors = columns // width
    work = Pointwise(ctx, number)

    @cute.jit
    def run():
        first = ctx.cta * ctx.threads + ctx.thread
        for i in cutlass.range(first, rows * vectors, ctx.ctas * ctx.threads, unroll=1):
            row = i // vectors
            work.finish({}, row, (i - row * vectors) * width, width)

    return None, run
