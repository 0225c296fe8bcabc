"""The plan of one layer: every launch with its stream, bytes of one rank, and predicted time."""

from __future__ import annotations

from k3fuse.compiler import compile_bucket
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.options import CompileOptions
from k3fuse.runtime.bundle import Bucket

LAYER = 1


def main() -> None:
    model = family_of("kimi-k3-tiny").build(builtin_config("kimi-k3-tiny"), "meta")
    bucket = Bucket(batch=1, rows_per_request=1, kind="step")
    options = CompileOptions(target="gb300", tp=4)
    plan = compile_bucket(model, "kimi-k3-tiny", bucket, options).plan
    for launch in plan.launches:
        if launch.layer == LAYER:
            print(f"{launch.stream:9s}{launch.name}")
            print(f"{'':9s}{' '.join(launch.ops)}")
            print(
                f"{'':9s}weights {launch.weight_bytes} B, state {launch.state_bytes} B, "
                f"activations {launch.activation_bytes} B, {launch.predicted_us:.1f} us, "
                f"after {', '.join(launch.after)}"
            )
    print(f"\nthe step: {len(plan.launches)} launches, {plan.predicted_us:.0f} us predicted,")
    print(f"{plan.planned_bytes} B read by a rank (stock {plan.stock_bytes} B), plan {plan.hash()}")


if __name__ == "__main__":
    main()
