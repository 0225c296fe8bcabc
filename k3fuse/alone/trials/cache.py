"""The latent cache: drafts over it, pages that are used again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3fuse.alone.launching import Case, Sketch, Tensors, same_bits
from k3fuse.alone.trials.trial import Kernels, Trial, different, pick

LATENT, ROPE, QUERIES, PAGE, TABLE = 512, 64, 6, 64, 4


def _cache(s: Sketch, requests: int) -> tuple[str, list[str]]:
    cache = s.value("cache", "bf16", requests * TABLE, PAGE, LATENT + ROPE, place="state")
    hosts = [s.value("table", "i32", requests, TABLE, place="host")]
    hosts += [s.value(n, "i32", requests, place="host") for n in ("lengths", "slots")]
    return cache, hosts


def _append(requests: int, rows: int) -> Case:
    s = Sketch()
    cache, hosts = _cache(s, requests)
    latent = s.value("latent", "bf16", requests * rows, LATENT)
    rope = s.value("rope", "bf16", requests * rows, ROPE)
    operands = [cache, latent, rope, *hosts]
    s.step("mla_append", operands, [s.version(cache)], rows_per_request=rows)
    return s.case()


def _attend(requests: int, rows: int) -> Case:
    s = Sketch()
    query = s.value("query", "bf16", requests * rows, QUERIES * (LATENT + ROPE))
    cache, hosts = _cache(s, requests)
    o = s.value("o", "bf16", requests * rows, QUERIES * LATENT)
    s.step(
        "mla_attend_latent",
        [query, cache, *hosts],
        [o],
        kv_lora=LATENT,
        rope_dim=ROPE,
        softmax_scale=(128 + ROPE) ** -0.5,
        rows_per_request=rows,
    )
    return s.case()


def _cached_speculation(kernels: Kernels) -> Iterator[str]:
    rows, lengths = 4, [126, 40]  # the first request goes on to a new page
    hosts = {"lengths": kernels["attend 1"].tensor("lengths", lengths)}
    hosts["slots"] = kernels["attend 1"].tensor("slots", [0, 1])
    x = kernels["attend 4"].draw(5, hosts)
    x |= {n: t for n, t in kernels["append 4"].draw(6).items() if n in ("latent", "rope")}
    after = kernels["attend 1"].draw(7, hosts)
    after |= {n: t for n, t in kernels["append 1"].draw(8).items() if n in ("latent", "rope")}

    def run(cache: Tensor, rows: Tensors, ahead: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Append and attend: the cache and o."""
        given = {**pick(x, ["table", "slots"]), "cache": cache}
        given["lengths"] = x["lengths"] + torch.tensor(ahead, device=x["lengths"].device)
        parts = pick(rows, ["latent", "rope"])
        appended = kernels[f"append {size}"]({**given, **parts})["cache"]
        given["cache"] = appended
        return appended, kernels[f"attend {size}"]({**given, "query": rows["query"]})["o"]

    def drafted(row: int) -> dict[str, Tensor]:
        names = ("query", "latent", "rope")
        return {n: x[n].view(2, rows, -1)[:, row].contiguous() for n in names}

    verified, o = run(x["cache"], x, [0, 0], rows)
    cache, caches, outputs = x["cache"], list[Tensor](), list[Tensor]()
    for row in range(rows):
        cache, one = run(cache, drafted(row), [row, row], 1)
        outputs.append(one)
        caches.append(cache)
    if not same_bits(cache, verified):
        yield "verify against serial steps: other bits of the cache"
    wanted = torch.stack(outputs, 1).flatten(0, 1)
    if not same_bits(o, wanted):
        apart = float((o.double() - wanted.double()).abs().max())
        yield f"verify against serial steps: o differs by up to {apart:.1e}"
    _, one = run(verified, after, [1, 1], 1)
    _, two = run(caches[0], after, [1, 1], 1)
    if not same_bits(one, two):
        yield "rejected at 2: the plain step after gives other bits of o"
    _, one = run(verified, after, [rows, rows], 1)
    _, two = run(cache, after, [rows, rows], 1)
    if not same_bits(one, two):
        yield "all accepted: the plain step after gives other bits of o"


def _reused_page(kernels: Kernels) -> Iterator[str]:
    attend = kernels["attend 1"]
    x = attend.draw(9)  # NaN wherever no row may look
    fresh = attend({**x, "cache": x["cache"].nan_to_num(nan=0.0)})
    yield from different(attend(x), fresh, ["o"], "NaN in positions that are not seen")


def trials() -> tuple[Trial, ...]:
    """Trials whose programs are made by hand."""
    cached = {f"append {n}": _append(2, n) for n in (1, 4)}
    cached |= {f"attend {n}": _attend(2, n) for n in (1, 4)}
    return (
        Trial(
            "B47",
            "verify and plain step over the cache",
            "the bits of serial steps",
            cached,
            _cached_speculation,
        ),
        Trial(
            "B53",
            "NaN in the rest of a page",
            "no effect",
            {"attend 1": _attend(2, 1)},
            _reused_page,
        ),
    )
