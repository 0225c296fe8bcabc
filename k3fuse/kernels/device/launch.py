"""A whole launch as one kernel: the stages of its configuration, one after the other."""

import importlib

import cutlass.cute as cute
from cutlass import Uint8, const_expr

from k3fuse.kernels.device.aot import compile_entry
from k3fuse.kernels.device.context import Context
from k3fuse.kernels.launch import LaunchConfig
from k3fuse.kernels.spec import CompiledKernel

MODULES = {
    "point": "pointwise",
    "row": "rowwise",
    "linear": "linear",
    "value": "linear",
    "kda_fetch": "kda_windows",
    "kda": "kda",
    "kda_heads": "kda",
    "kda_window": "kda_windows",
    "kda_journal": "kda_windows",
    "commit": "kda",
    "head_norm": "kda",
    "append": "mla",
    "absorb": "mla",
    "attend": "mla",
    "attend_merge": "mla",
    "blocks": "attn_res",
    "route": "route",
    "experts_up": "experts",
    "experts_down": "experts",
    "argmax": "argmax",
    "argmax_merge": "argmax",
    "argmax_pick": "argmax",
    "prefetch": "prefetch",
}
"""Kind of stage -> module of this package whose `make(ctx, number)` does it."""


def make_body(config: LaunchConfig):
    """What the kernel traces: weights asked for, the wait, the stages with barriers between."""
    ctx = Context(config)
    made = [
        importlib.import_module(f"k3fuse.kernels.device.{MODULES[stage.kind]}").make(ctx, number)
        for number, stage in enumerate(config.stages)
    ]

    by_linear = config.stages[-1].kind in ("linear", "value")  # at its last tile

    def stages():
        level = 0
        for stage, (_, run) in zip(config.stages, made, strict=True):
            # One that waits by itself for what it reads needs no barrier, others behind it do.
            alone = sum(other.level == stage.level for other in config.stages) == 1
            while level < stage.level:
                if not (alone and hasattr(run, "waits")):
                    ctx.grid_barrier()
                level += 1
            run()

    def early():
        for before, _ in made:
            if before is not None:
                before()

    def body(pointers, numbers=()):
        ctx.start(pointers, numbers)
        whole()

    @cute.jit
    def whole():
        if const_expr(config.program.trigger == "entry"):
            cute.arch.griddepcontrol_launch_dependents()
        early()
        cute.arch.griddepcontrol_wait()
        for _, run in made:  # loads that need no mailbox go out before the step counter is here
            if const_expr(hasattr(run, "fetch")):
                run.fetch()
        ctx.open_rings()
        if const_expr(config.program.trigger != "entry" and not by_linear):
            cute.arch.griddepcontrol_launch_dependents()
        stages()

    return body


def build(config: LaunchConfig, arch: str) -> CompiledKernel:
    """Compile one configuration."""
    return compile_entry(
        make_body(config),
        config.parameters,
        Uint8,
        name=config.label,
        arch=arch,
        grid=(config.ctas, 1, 1),
        block=config.threads,
        smem=config.smem,
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
    )
