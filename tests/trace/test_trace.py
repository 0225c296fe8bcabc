"""What a forward may do, what the trace says when it does something else, and where."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3fuse import functional
from k3fuse.errors import TraceError
from k3fuse.ir import Graph, print_graph, run, verify
from k3fuse.tensor_type import parse_type
from k3fuse.trace import Arg, trace
from k3fuse.trace.tracer import ArgTree

X = Arg(parse_type("bf16[M,8]"))


def traced(module: nn.Module, arguments: dict[str, ArgTree] | None = None, **options: Any) -> Graph:
    graph = trace(
        module,
        arguments or {"x": X},
        outputs=lambda y: {"y": y},
        **options,
    )
    verify(graph)
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.leaves()]


def line_of(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


class Plain(nn.Module):
    """Only torch: nothing of k3fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-5)
        self.gate = nn.Linear(8, 12, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = self.up(h).view(x.shape[0], 3, 4).flatten(1)
        y = self.down(F.silu(self.gate(h)) * heads.reshape(-1, 12))
        return x + y[:, :8]


def test_a_plain_module_traces() -> None:
    module = Plain().double()
    graph = traced(module, {"x": Arg(parse_type("f64[M,8]"))})
    assert ops(graph) == [
        "rms_norm", "linear", "view", "view", "linear", "silu", "view", "mul", "linear", "add",
    ]  # fmt: skip
    assert [v.binding for v in graph.inputs] == [
        "x", "norm.weight", "up.weight", "gate.weight", "down.weight",
    ]  # fmt: skip
    assert [str(n.result.type) for n in graph.leaves()][2] == "f64[M,3,4]"
    x = torch.randn(5, 8, dtype=torch.float64)
    parameters = dict(module.named_parameters())
    inputs = {v.name: x if v.kind == "input" else parameters[v.binding] for v in graph.inputs}
    (y,) = run(graph, {name: tensor.detach() for name, tensor in inputs.items()})
    torch.testing.assert_close(y, module(x).detach(), rtol=1e-12, atol=1e-12)


def test_names_and_origins_follow_the_modules() -> None:
    graph = traced(Plain().bfloat16())
    text = print_graph(graph)
    assert "%up: bf16[M,12] = linear(%norm, %up.weight) from up/linear" in text
    assert 'weight %up.weight: bf16[12,8] = "up.weight"' in text
    sites = [o.site for n in graph.leaves() for o in n.origins]
    assert len(set(sites)) == len(sites)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        if s:  # the data decides
            return x
        return s


class SumBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return F.silu(x)


def test_a_data_dependent_branch_names_module_and_line() -> None:
    line = line_of(Inner, "if s:")
    with pytest.raises(TraceError, match=rf"inner, .*test_trace\.py:{line}, branches on the data"):
        traced(Branch())


def test_a_branch_on_a_reduction_names_the_line() -> None:
    line = line_of(SumBranch, "if x.sum()")
    with pytest.raises(TraceError, match=rf"the root module, .*test_trace\.py:{line}, calls sum"):
        traced(SumBranch())


class StaticBranches(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training:
            x = F.silu(x)
        if mask is None:
            x = torch.sigmoid(x)
        if x.shape[1] == 8 and x.dim() == 2 and x.size(1) == 8 and x.dtype == torch.bfloat16:
            x = x + x
        return x


def test_static_branches_are_traced() -> None:
    assert ops(traced(StaticBranches())) == ["silu", "sigmoid", "add"]
    assert ops(traced(StaticBranches().eval())) == ["sigmoid", "add"]


class RowBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            return F.silu(x)
        return torch.sigmoid(x)


class RowOperand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y, z = F.silu(x), torch.sigmoid(x)
        return (y + y) if x.shape[0] == 1 else (y + z)


class RowCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.shape[0] > 1 else x


class RowSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 3 + x.shape[0]]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (RowBranch(), "one request calls silu where two call sigmoid"),
        (RowOperand(), "add reads other values for one request than for two"),
        (RowCount(), "depends on the number of requests"),
        (RowSize(), "computes 4 for one request and 5 for two"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_graph_that_differs_between_batches_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(module)


class Calls(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


UNSUPPORTED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda m, x: torch.tanh(x), r"calls tanh: no IR op for it\. Supported calls"),
    (lambda m, x: x.softmax(-1), "calls softmax: no IR op"),
    (lambda m, x: F.linear(x, m.weight, m.bias), "calls linear: a bias is not supported"),
    (lambda m, x: F.silu(x, inplace=True), "calls silu: silu in place is not supported"),
    (lambda m, x: F.rms_norm(x, (8,)), "calls rms_norm: rms_norm needs a weight"),
    (lambda m, x: x * 2, "calls mul: mul of a tensor and a number"),
    (lambda m, x: torch.add(x, x, alpha=2), "calls add: add of a tensor and a number"),
    (lambda m, x: x + m.bias, "add: shapes differ"),
    (lambda m, x: x[0], "index 0 is not a slice"),
    (lambda m, x: x[:, ::2], "a strided slice"),
    (lambda m, x: x[:, 1:, None], "is not a slice|more than one dimension"),
    (lambda m, x: x.to("cuda"), "only casts to a dtype"),
    (lambda m, x: x.squeeze(1), "squeeze of a dimension that is not 1"),
    (lambda m, x: x.view(torch.uint8), "bad size torch.uint8"),
    (lambda m, x: x.item(), r"reads a tensor's data with \.item\(\)"),
    (lambda m, x: x.tolist(), r"reads a tensor's data with \.tolist\(\)"),
    (lambda m, x: list(x), "loops over a tensor"),
    (lambda m, x: operator.index(x), "reads a tensor's data as a number"),
    (lambda m, x: functional.linear(x, torch.ones(8, 8)), "passes Tensor to linear"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"), UNSUPPORTED, ids=lambda v: None if callable(v) else str(v)[:30]
)
def test_an_unsupported_call_names_its_line(call: Any, message: str) -> None:
    line = line_of(call, "lambda")
    with pytest.raises(TraceError, match=message) as error:
        traced(Calls(call))
    assert "the root module, " in str(error.value)
    assert f"test_trace.py:{line}," in str(error.value)


SUPPORTED: list[tuple[Callable[[Any, Any], Any], list[str]]] = [
    (lambda m, x: x.unsqueeze(1).squeeze(1), ["view", "view"]),
    (lambda m, x: torch.reshape(x, (-1, 2, 4)), ["view"]),
    (lambda m, x: x.float().to(torch.bfloat16).type(torch.float32), ["cast"] * 3),
    (lambda m, x: x.contiguous().detach().clone()[...], []),
    (lambda m, x: x[..., 2:4], ["slice"]),
    (lambda m, x: x.narrow(-1, 0, 4), ["slice"]),
    (lambda m, x: torch.mul(x, x.sigmoid()), ["sigmoid", "mul"]),
    (lambda m, x: F.linear(x, m.weight), ["linear"]),
    (lambda m, x: functional.linear(x, m.weight, out_dtype=torch.float32), ["linear"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "expected"), SUPPORTED, ids=lambda v: None if callable(v) else str(v)[:30]
)
def test_supported_calls(call: Any, expected: list[str]) -> None:
    assert ops(traced(Calls(call))) == expected


def test_a_bad_type_names_the_line() -> None:
    def call(m: Calls, x: Tensor) -> Tensor:
        return functional.linear(x[:, :4], m.weight)

    with pytest.raises(
        TraceError, match=rf"test_trace\.py:{line_of(call, 'return')}, linear: .* do"
    ):
        traced(Calls(call))


def test_arguments_may_be_trees() -> None:
    class Tree(nn.Module):
        def forward(self, xs: list[Tensor], named: dict[str, Tensor]) -> Tensor:
            return xs[0] + xs[1] + named["a"]

    graph = traced(Tree(), {"xs": [X, X], "named": {"a": X}})
    assert [v.binding for v in graph.inputs] == ["xs.0", "xs.1", "named.a"]
    with pytest.raises(TraceError, match="argument xs: expected Arg, NamedTuple, list or dict"):
        traced(Tree(), {"xs": 3, "named": {}})


def test_rows_per_request_keeps_rows_and_requests_apart() -> None:
    class Lengths(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            return x.view(x.shape[0], 2, 4), lengths.view(lengths.shape[0], 1)

    for rows in (1, 4):
        graph = trace(
            Lengths(),
            {"x": X, "lengths": Arg(parse_type("i32[R]"))},
            outputs=lambda out: {"x": out[0], "lengths": out[1]},
            rows_per_request=rows,
        )
        assert [str(v.type) for v in graph.outputs] == ["bf16[M,2,4]", "i32[R,1]"]


def test_states_come_back_as_their_last_versions() -> None:
    class Append(nn.Module):
        def forward(self, x: Tensor, cache: Tensor, table: Tensor, n: Tensor, s: Tensor) -> Any:
            c, k = x[:, :6], x[:, 6:]
            cache = functional.mla_append(cache, c, k, table, n, s, rows_per_request=1)
            return functional.mla_append(cache, c, k, table, n, s, rows_per_request=1), x

    graph = trace(
        Append(),
        {
            "x": X,
            "cache": Arg(parse_type("bf16[pages,4,8]"), "state"),
            "table": Arg(parse_type("i32[R,table]")),
            "n": Arg(parse_type("i32[R]")),
            "s": Arg(parse_type("i32[R]")),
        },
        outputs=lambda out: {"x": out[1]},
    )
    assert graph.attrs["outputs"] == ("x",)
    assert graph.outputs[1] is list(graph.leaves())[-1].result


def test_plain_tensors_of_a_module_are_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.ones(8, 8, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    with pytest.raises(TraceError, match="only arguments and parameters of the module"):
        traced(Hidden())
