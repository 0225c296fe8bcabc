"""Plan -> kernels: which kernel does each launch, on which memory, or why none does.

Launches with equal programs share a kernel, over all layers and buckets. Nothing is compiled here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3fuse.ir import Graph, Node, Value, state_roots
from k3fuse.ir.ops.collective import PUSHES
from k3fuse.kernels.family import NotSupported
from k3fuse.kernels.launch import LaunchConfig, configure
from k3fuse.kernels.program import Program
from k3fuse.lowering.launch_program import launch_programs, program_operands
from k3fuse.runtime.plan import Launch, Plan
from k3fuse.runtime.selection import (
    NO_WORD,
    Argument,
    KernelMemory,
    LaunchKernel,
    Resources,
    Role,
    Selection,
)
from k3fuse.schedule.edges import launches_of
from k3fuse.target import Target, get_target


@dataclass
class Kernels:
    """The distinct kernels of a compilation by name; asks each program once.

    debug: waits for peers and for other CTAs are bounded, and reported.
    """

    target: Target
    debug: bool = False
    configs: dict[str, LaunchConfig] = field(default_factory=dict[str, LaunchConfig])
    _known: dict[Program, LaunchConfig | str] = field(
        default_factory=dict[Program, "LaunchConfig | str"], repr=False
    )

    def of(self, program: Program) -> LaunchConfig | str:
        """The configuration of a program's kernel, or the reason why there is none."""
        if program not in self._known:
            try:
                config = configure(program, self.target, debug=self.debug)
            except NotSupported as reason:
                self._known[program] = str(reason)
            else:
                if polls_late(config):
                    self._known[program] = "it would poll a mailbox after it has published"
                else:
                    self._known[program] = self.configs.setdefault(config.label, config)
        return self._known[program]

    def resources(self, selection: Selection) -> dict[str, Resources]:
        """What the proofs need to know, by launch name."""
        chosen = {item.launch: item.kernel for item in selection.launches if item.kernel}
        return {name: resources_of(self.configs[kernel]) for name, kernel in chosen.items()}


def resources_of(config: LaunchConfig) -> Resources:
    """What the proofs need to know of a kernel."""
    return Resources(config.ctas, config.cluster, config.threads, config.smem, config.spins)


def polls_late(config: LaunchConfig) -> bool:
    """Whether a stage polls a mailbox behind one that publishes: the proof has it the other way.

    A mailbox is polled by the stage that evaluates what is received from it.
    """
    program = config.program
    staged = {index for stage in config.stages for index in stage.steps}
    makers = {r: i for i, step in enumerate(program.steps) for r in step.results}

    def polls(index: int) -> bool:
        return any(
            program.values[value].place == "mailbox"
            or (value in makers and makers[value] not in staged and polls(makers[value]))
            for value in program.steps[index].operands
        )

    published = False
    for stage in config.stages:
        if published and any(polls(index) for index in stage.steps):
            return True
        published |= any(program.steps[index].op in PUSHES for index in stage.steps)
    return False


def select(graph: Graph, plan: Plan, kernels: Kernels | None = None) -> Selection:
    """The kernel of every launch of a plan that was lowered from `graph`.

    New kernels are added to `kernels`, which must be for the plan's target.
    """
    kernels = Kernels(get_target(plan.target)) if kernels is None else kernels
    programs = launch_programs(graph, plan)
    places = _Places(graph)
    items: list[LaunchKernel] = []
    scratch: dict[str, int] = {}
    tables: list[str] = []
    words = 0
    for position, (node, launch) in enumerate(zip(launches_of(graph), plan.launches, strict=True)):
        found = kernels.of(programs[launch.name])
        if isinstance(found, str):
            items.append(LaunchKernel(launch.name, reason=found))
            continue
        arguments = tuple(places.arguments(node, launch, found, position))
        word = words if found.barriers else NO_WORD
        words += bool(found.barriers)
        items.append(LaunchKernel(launch.name, found.label, "", word, arguments))
        scratch[launch.stream] = max(scratch.get(launch.stream, 0), found.scratch_bytes)
        tables += [a.storage for a in arguments if a.role == "peers"]
    return Selection(
        target=plan.target,
        plan_hash=plan.hash(),
        launches=tuple(items),
        memory=KernelMemory(
            scratch=tuple(sorted((stream, size) for stream, size in scratch.items() if size)),
            control_words=words,
            step=any(a.role == "step" for item in items for a in item.arguments),
            peer_tables=tuple(sorted(set(tables))),
        ),
    )


_BY_NAME: dict[str, Role] = {
    "scratch": "scratch",
    "control": "control",
    "step": "step",
    "errors": "errors",
    "rank": "rank",
    "launch": "launch",
}
"""Parameters that stand for no value of the program; the others are v<i> and use<i>."""


class _Places:
    """Knows for each value of a graph what the plan calls it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._roots = state_roots(graph)

    def arguments(
        self, node: Node, launch: Launch, config: LaunchConfig, position: int
    ) -> Iterator[Argument]:
        """What each parameter of the launch's kernel gets, in order."""
        values = program_operands(self._graph, node, self._roots)
        for parameter in config.parameters:
            role = _BY_NAME.get(parameter.name)
            if role is not None:
                yield Argument(parameter.name, role, use=position if role == "launch" else 0)
                continue
            is_use = parameter.name.startswith("use")
            index = int(parameter.name.removeprefix("use" if is_use else "v"))
            place = config.program.values[index].place
            if is_use:
                yield self._argument(parameter.name, "use", values[index], launch)
            elif place in ("mailbox", "pushed"):
                ring: Role = "mailbox" if place == "mailbox" else "peers"
                yield self._argument(parameter.name, ring, values[index], launch)
            else:
                yield self._argument(parameter.name, "memory", values[index], launch)

    def _argument(self, parameter: str, role: Role, value: Value, launch: Launch) -> Argument:
        root = self._roots.get(id(value))
        if root is not None:
            return Argument(parameter, role, value.name, root.name)
        operand = next(o for o in launch.operands if o.value == value.name)
        return Argument(
            parameter, role, operand.value, operand.storage, operand.offset, operand.use
        )
