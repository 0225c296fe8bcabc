"""From a forward in plain torch to a graph: your own module first, then a whole decode step."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from k3fuse import functional
from k3fuse.ir import print_graph
from k3fuse.models.registry import builtin_config, family_of
from k3fuse.tensor_type import DType, TensorType
from k3fuse.trace import Arg, trace, trace_step


class GatedMlp(nn.Module):
    """Norm, two projections, a gated product, a projection back, a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, self.norm, eps=1e-5)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))


def main() -> None:
    x = Arg(TensorType(DType.BF16, ("M", 64)))
    mlp = GatedMlp(64, 128).bfloat16()
    graph = trace(mlp, {"x": x}, outputs=lambda y: {"y": y}, name="gated_mlp")
    print(print_graph(graph))

    model = family_of("kimi-k3-tiny").build(builtin_config("kimi-k3-tiny"), "meta")
    step = trace_step(model, rows_per_request=1, mode="commit", page_size=64)
    kinds = Counter(value.kind for value in step.inputs)
    print(f"kimi-k3-tiny: {len(step.nodes)} ops on", dict(kinds))
    for op, count in Counter(node.op for node in step.nodes).most_common():
        print(f"  {count:4d} {op}")


if __name__ == "__main__":
    main()
