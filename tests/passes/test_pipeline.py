"""The whole pipeline on whole models: text, meaning, coverage, after every single pass.

Meaning is compared after every pass for one request and TP 1 and 4 of two models, and at the end
for all other cases.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from k3fuse.errors import PassError
from k3fuse.ir import Graph, Rewriter, parse_graph, print_graph, run, verify
from k3fuse.passes.form_launches import check_coverage
from k3fuse.passes.numeric_check import TOLERANCE, example_inputs, worst_error
from k3fuse.passes.pipeline import PIPELINE
from k3fuse.testing import random_weight
from tests.passes.whole_models import TINY, Case, compiled, sites, traced, traced_commit

DECODE = [Case(model, tp, batch) for model in TINY for tp in (1, 2, 4, 8) for batch in (1, 8)]
VERIFY = [Case(model, tp, 2, rows=4) for model in TINY for tp in (1, 2, 4, 8)]
EACH_PASS = {Case(model, tp) for model in ("kimi-k3-tiny", "kimi-linear-tiny") for tp in (1, 4)}


def outputs(graph: Graph, inputs: dict[str, Tensor], tp: int | None = None) -> list[Tensor]:
    bound = {value.name: inputs[value.binding] for value in graph.inputs}
    return run(graph, bound) if tp is None else run(graph, bound, tp=tp)


@pytest.mark.parametrize("case", [*DECODE, *VERIFY], ids=str)
def test_every_pass_on_the_step(case: Case) -> None:
    check_every_pass(traced(case), case)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", TINY)
def test_every_pass_on_the_commit(name: str, tp: int) -> None:
    case = Case(name, tp, 1, rows=4)
    check_every_pass(traced_commit(case), case)


def check_every_pass(graph: Graph, case: Case) -> None:
    text, ledger = print_graph(graph), sites(graph)
    inputs = example_inputs(graph, random_weight, seed=1, requests=2)
    wanted = outputs(graph, inputs, tp=1)
    for item in PIPELINE:
        copy = parse_graph(text)
        assert print_graph(copy) == text
        result, before = item.run(graph), text
        verify(graph)
        text = print_graph(graph)
        assert (result.changes == 0) == (text == before), item.name
        item.run(copy)
        assert print_graph(copy) == text, f"{item.name} depends on more than the text"
        if result.changes and case in EACH_PASS:
            assert worst_error(outputs(graph, inputs), wanted) <= TOLERANCE, item.name
    assert print_graph(parse_graph(text)) == text
    assert worst_error(outputs(graph, inputs), wanted) <= TOLERANCE
    check_coverage(graph, ledger)


@pytest.mark.parametrize("name", TINY)
def test_a_second_pipeline_run_changes_nothing_pass_by_pass(name: str) -> None:
    graph = traced(Case(name, 4))
    for item in PIPELINE:
        item.run(graph)
        text = print_graph(graph)
        assert item.run(graph).changes == 0, item.name
        assert print_graph(graph) == text, item.name


def test_outputs_cover_logits_tokens_hidden_and_states() -> None:
    graph = compiled(Case("kimi-k3-tiny", 4))
    assert graph.attrs["outputs"] == ("logits", "tokens", "hidden")
    kda, mla = 6, 2  # layers
    assert len(graph.outputs) == 3 + 2 * kda + mla


def test_the_comparison_can_fail() -> None:
    graph = compiled(Case("kimi-k3-tiny", 4))
    inputs = example_inputs(graph, random_weight, seed=1, requests=2)
    wanted = outputs(graph, inputs)
    norm = next(n for n in graph.leaves() if n.op == "rms_norm")
    norm.attrs["eps"] = 1.1e-5
    assert worst_error(outputs(graph, inputs), wanted) > TOLERANCE


def test_router_logits_stay_f32() -> None:
    for name in TINY:
        graph = compiled(Case(name, 4))
        routes = [n for n in graph.leaves() if n.op == "route_topk"]
        assert routes
        assert {str(n.operands[0].type.dtype) for n in routes} == {"f32"}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("op", ["kda_step", "mla_attend_latent", "moe_experts", "add"])
def test_a_lost_node_is_missed(name: str, op: str) -> None:
    case = Case(name, 2)
    ledger = sites(traced(case))
    graph = compiled(case)
    node = next(n for n in graph.leaves() if n.op == op)
    edit = Rewriter(graph, "lossy")
    for index, result in enumerate(node.results):
        same = (v for v in node.operands if v.type == result.type)
        edit.replace_uses(result, next(same, node.operands[min(index, 1)]))
    edit.erase(node)
    with pytest.raises(PassError, match=r"coverage: \w+ (missing|covered \d+ times)") as error:
        check_coverage(graph, ledger)
    if op == "kda_step":
        assert "coverage: kda_step missing: model.layers.0" in str(error.value)


def test_a_node_that_is_there_twice_is_found() -> None:
    case = Case("kimi-linear-tiny")
    ledger = sites(traced(case))
    graph = compiled(case)
    node = next(n for n in graph.leaves() if n.op == "kda_step")
    edit = Rewriter(graph, "double")
    twin = edit.make(node.op, node.operands, node.attrs, name="twin", origins=node.origins)
    edit.insert_after(node, twin)
    with pytest.raises(PassError, match="coverage: kda_step covered 2 times"):
        check_coverage(graph, ledger)


def test_an_op_from_nowhere_is_found() -> None:
    graph = compiled(Case("kimi-linear-tiny"))
    ledger = sites(traced(Case("kimi-linear-tiny")))
    with pytest.raises(PassError, match=r"coverage: ops that nobody traced: .*kda_step"):
        check_coverage(graph, [site for site in ledger if not site.endswith("/kda_step")])
