"""How a program is cut into stages: work that all CTAs do before they go on to the next.

Elementwise ops are no stages of their own: what stands before a stage is evaluated where the stage
reads it, what follows a linear map or a row norm is done on its results in registers. Values that
pass between stages lie in scratch memory; a stage that reads what other CTAs wrote stands behind a
barrier of the grid (a higher level). A row stage, or the routing of few tokens, may instead be done
by every CTA for itself ("private"), with its result in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from k3fuse.kernels.program import Held, Program, Step

Kind = Literal[
    "point",
    "row",
    "linear",
    "value",
    "kda_fetch",
    "kda",
    "kda_heads",
    "kda_window",
    "kda_journal",
    "head_norm",
    "commit",
    "append",
    "absorb",
    "attend",
    "attend_merge",
    "blocks",
    "route",
    "experts_up",
    "experts_down",
    "argmax",
    "argmax_merge",
    "argmax_pick",
    "prefetch",
]

PUSHES = ("push_partial", "push_chunks", "push_gather")
POINTWISE = (
    "add",
    "mul",
    "sigmoid",
    "silu",
    "situ_mul",
    "silu_mul",
    "sigmoid_mul",
    "cast",
    "receive",
    "sum_slots",
    "slice",
    "embedding",
)
ROW = ("rms_norm", "attn_res_merge")
ANCHORS: dict[str, tuple[Kind, ...]] = {
    "linear": ("linear",),
    "mla_value": ("value",),
    "kda_step": ("kda_fetch", "kda", "kda_window"),
    "kda_verify": ("kda_fetch", "kda", "kda_journal"),
    "kda_commit": ("commit",),
    "gated_rms_norm": ("head_norm",),
    "mla_append": ("append",),
    "mla_absorb_query": ("absorb",),
    "mla_attend_latent": ("attend", "attend_merge"),
    "attn_res_blocks": ("blocks",),
    "route_topk": ("route",),
    "moe_experts": ("experts_up", "experts_down"),
    "argmax": ("argmax", "argmax_merge"),
    "argmax_local": ("argmax", "argmax_merge"),
    "argmax_pick": ("argmax_pick",),
    "l2_prefetch": ("prefetch",),
}
READS_MAILBOX = ("argmax_pick", "route_topk")
"""Anchors that poll a mailbox themselves; for all others a mailbox is received first."""
FEW_ROWS = 8
"""Rows that the experts may take from the mailbox themselves, and of which every CTA may do the
routing for itself."""
ARGMAX_COLUMNS = 32 * 1024
"""Columns of a row that one CTA goes through alone, 2 us; of longer rows every CTA takes a part,
and a barrier later `argmax_merge` compares the parts."""
TAKES_TAIL = ("linear", "value", "row", "point")
"""Kinds that can go on with elementwise ops on what they hold in registers."""


@dataclass(frozen=True)
class Stage:
    """steps: indices into the program's steps, in order. level: grid barriers before it.

    private: every CTA does all of it for itself and keeps the result in shared memory. beside:
    bytes of such results that the stage reads.
    """

    kind: Kind
    steps: tuple[int, ...]
    level: int = 0
    private: bool = False
    beside: int = 0


@dataclass
class _Open:
    kind: Kind
    steps: list[int]
    after: set[int] = field(default_factory=set[int])  # stages whose results it reads


def normalize(program: Program) -> Program:
    """The same program with a `receive` between a mailbox and an anchor that cannot poll."""
    values, steps = list(program.values), list[Step]()
    received: dict[int, int] = {}
    for step in program.steps:
        operands = list(step.operands)
        if step.op in ANCHORS and step.op not in READS_MAILBOX:
            for position, operand in enumerate(operands):
                held = values[operand]
                if held.place != "mailbox":
                    continue
                if operand not in received:
                    received[operand] = len(values)
                    values.append(Held(held.dtype, held.shape, "internal", len(values)))
                    steps.append(Step("receive", (), (operand,), (received[operand],)))
                operands[position] = received[operand]
        steps.append(replace(step, operands=tuple(operands)))
    return replace(program, values=tuple(values), steps=tuple(steps))


class _Cutter:
    def __init__(self, program: Program, private: bool) -> None:
        self.program = program
        self.private = private
        self.stages: list[_Open] = []
        self.home: dict[int, int] = {}  # value -> stage that makes it
        self.lazy: dict[int, int] = {}  # value -> step, evaluated where it is read

    def cut(self) -> list[_Open]:
        for index, step in enumerate(self.program.steps):
            if step.op in PUSHES:
                self._push(index, step)
            elif step.op in POINTWISE:
                self._pointwise(index, step)
            elif step.op in ROW:
                self._row(index, step)
            else:
                self._anchor(index, step)
        for value in self.program.written:
            if value in self.lazy:
                self._open("point", [self.lazy[value]])
        return self.stages

    def _sources(self, step: Step) -> set[int]:
        """Stages that a step reads from, through lazy values."""
        found: set[int] = set()
        for operand in step.operands:
            if operand in self.home:
                found.add(self.home[operand])
            elif operand in self.lazy:
                found |= self._sources(self.program.steps[self.lazy[operand]])
        return found

    def _claim(self, stage: int, steps: list[int]) -> None:
        """Make the steps, and lazy steps before them, part of a stage."""
        for index in steps:
            step = self.program.steps[index]
            self.stages[stage].after |= self._sources(step) - {stage}
            for operand in step.operands:
                if operand in self.lazy:
                    inner = self.lazy[operand]
                    written = operand in self.program.written
                    if written and operand not in self.home:
                        del self.lazy[operand]
                        self._claim(stage, [inner])
                        self._enter(stage, inner, first=True)
            self._enter(stage, index)

    def _enter(self, stage: int, index: int, *, first: bool = False) -> None:
        steps = self.stages[stage].steps
        if index not in steps:
            steps.insert(0, index) if first else steps.append(index)
        for result in self.program.steps[index].results:
            self.home[result] = stage
            self.lazy.pop(result, None)

    def _open(self, kind: Kind, steps: list[int]) -> int:
        self.stages.append(_Open(kind, []))
        self._claim(len(self.stages) - 1, steps)
        return len(self.stages) - 1

    def _push(self, index: int, step: Step) -> None:
        (operand,) = step.operands
        if operand in self.lazy:
            self._open("point", [self.lazy[operand]])
        if operand not in self.home:
            self._open("point", [index])
        else:
            self._enter(self.home[operand], index)

    def _pointwise(self, index: int, step: Step) -> None:
        sources = self._sources(step)
        tails = [s for s in sources if self.stages[s].kind in TAKES_TAIL]
        late = [s for s in sources if s not in tails]
        if not sources:
            self.lazy[step.results[0]] = index
            return
        last = max(sources)
        fits = (
            len(tails) >= 1
            and last in tails
            and self._shape_of(last) == self._shape(step.results[0])
            and step.op not in ("slice", "embedding", "sum_slots")
        )
        if fits and all(self._before(s, last) for s in [*late, *tails] if s != last):
            self._claim(last, [index])
        else:
            self._open("point", [index])

    def _before(self, first: int, second: int) -> bool:
        """Whether stage `first` does not depend on `second`, so that it can be done before."""
        return second not in self.stages[first].after and first < second

    def _shape(self, value: int) -> tuple[int, int]:
        held = self.program.values[value]
        return held.rows, held.width

    def _shape_of(self, stage: int) -> tuple[int, int]:
        """Rows and columns of what the stage holds; of a linear stage, of its last map."""
        steps = [self.program.steps[i] for i in self.stages[stage].steps]
        made = [s.results[0] for s in steps if s.op not in PUSHES]
        return self._shape(made[-1])

    def _row(self, index: int, step: Step) -> None:
        subject = step.operands[0 if step.op == "rms_norm" else 4]
        home = self.home.get(subject)
        if home is not None and self.stages[home].kind == "row":
            self._claim(home, [index])
        else:
            self._open("row", [index])

    def _anchor(self, index: int, step: Step) -> None:
        if step.op not in ("mla_append", *READS_MAILBOX):
            for operand in step.operands:
                if operand in self.lazy and not self._polled(step, operand):
                    self._open("point", [self.lazy[operand]])
        if step.op in ("linear", "attn_res_blocks", "l2_prefetch"):
            for number, stage in enumerate(self.stages):
                first = self.program.steps[stage.steps[0]] if stage.steps else step
                same = step.op == "attn_res_blocks" or first.operands[:1] == step.operands[:1]
                if stage.kind == ANCHORS[step.op][0] and first.op == step.op and same:
                    self._claim(number, [index])
                    return
        for kind in ANCHORS[step.op]:
            if kind == "argmax_merge" and self._shape(step.operands[0])[1] <= ARGMAX_COLUMNS:
                continue
            if kind == "kda_fetch" and not self._sources(step):
                continue  # the rule itself stands at the start
            self._open(kind, [index])
            if kind == "kda_fetch":
                self.stages[-1].after.clear()  # of the states and slots alone
            if kind in ("attend_merge", "experts_down", "argmax_merge"):
                self.stages[-1].after.add(len(self.stages) - 2)
            if kind in ("kda_window", "kda_journal"):
                rule = len(self.stages) - 2
                self.stages[-1].after.add(rule)
                self.home[step.results[0]] = rule  # o is complete before

    def _polled(self, step: Step, operand: int) -> bool:
        """Whether the experts take an operand from the mailbox, where every CTA needs it."""
        few = self._shape(operand)[0] <= FEW_ROWS
        received = self.program.steps[self.lazy[operand]].op == "receive"
        return self.private and step.op == "moe_experts" and received and few


def cut(program: Program, *, private_limit: int, private_reads: int) -> tuple[Stage, ...]:
    """Stages of a normalized program in order of execution.

    private_limit: bytes of shared memory for results of private stages; 0: none, and nothing is
    left in a mailbox that its reader must poll. private_reads: bytes that every CTA may read to do
    a stage for itself.
    """
    opened = _Cutter(program, private_limit > 0).cut()
    private = [
        _is_private(program, opened, i, private_limit, private_reads) for i in range(len(opened))
    ]
    levels: list[int] = []
    for stage in opened:
        needs = [levels[s] + (not private[s]) for s in stage.after if s < len(levels)]
        levels.append(max(needs, default=0))
    order = sorted(range(len(opened)), key=lambda i: (levels[i], i))
    kept = {i: _result(program, stage).bytes for i, stage in enumerate(opened) if private[i]}
    return tuple(
        Stage(
            opened[i].kind,
            tuple(opened[i].steps),
            levels[i],
            private[i],
            sum(kept.get(s, 0) for s in opened[i].after),
        )
        for i in order
    )


def _result(program: Program, stage: _Open) -> Held:
    """What a stage makes last."""
    steps = [program.steps[i] for i in stage.steps]
    made = [s.results[0] for s in steps if s.op not in PUSHES]
    return program.values[made[-1] if made else steps[-1].operands[0]]


_HEAD_STAGES: set[Kind] = {"kda_fetch", "linear", "kda", "head_norm", "kda_window"}


def whole_heads(program: Program, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """A decode step of KDA as one stage, where nothing else needs what passes between its parts:
    projection of the decay, delta rule, gated norm. Otherwise the stages as they are."""
    by_kind = {stage.kind: stage for stage in stages}
    if len(stages) != 5 or set(by_kind) != _HEAD_STAGES:
        return stages
    steps = [i for kind in ("linear", "kda", "head_norm") for i in by_kind[kind].steps]
    if len(steps) != 3:
        return stages
    projected, rule_step, norm_step = (program.steps[i] for i in steps)
    inner = (projected.results[0], rule_step.results[0])
    readers = (rule_step.operands[3], norm_step.operands[0])
    alone = all(len(program.consumers(value)) == 1 for value in inner)
    if inner != readers or not alone or any(value in program.written for value in inner):
        return stages
    return (Stage("kda_heads", tuple(steps)),)


def _is_private(program: Program, stages: list[_Open], index: int, limit: int, reads: int) -> bool:
    """A row stage that only linear maps read, or a routing of few rows that only experts read,
    small enough to be done by every CTA."""
    stage = stages[index]
    readers = [s for s in stages if index in s.after]
    if stage.kind == "route":
        logits, bias = (program.values[v] for v in program.steps[stage.steps[0]].operands)
        kinds = {reader.kind for reader in readers}
        few = logits.rows <= FEW_ROWS and logits.bytes + bias.bytes <= reads
        return limit > 0 and few and kinds == {"experts_up", "experts_down"}
    if stage.kind != "row":
        return False
    steps = [program.steps[i] for i in stage.steps]
    last = [s for s in steps if s.op not in PUSHES][-1].results[0]
    if not readers or any(s.op in PUSHES for s in steps):
        return False
    made = {r for s in steps for r in s.results}
    for reader in readers:
        inside = [program.steps[i] for i in reader.steps]
        taken = {o for s in inside for o in s.operands if o in made}
        if reader.kind != "linear" or taken != {last}:
            return False
    held = program.values[last]
    sources = {o for i in stage.steps for o in program.steps[i].operands} - made
    size = sum(program.values[o].bytes for o in sources)
    return held.bytes <= limit and size <= reads


def outline(stages: tuple[Stage, ...]) -> str:
    """Kinds of the stages in order: "|" is a barrier of the grid, brackets mark a private one."""
    text, level = "", 0
    for stage in stages:
        text += "|" if stage.level > level else "." if text else ""
        text += f"[{stage.kind}]" if stage.private else stage.kind
        level = max(level, stage.level)
    return text
