"""Small programs of one family each, to look at a kernel or time it without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from k3fuse.errors import InputError
from k3fuse.kernels.program import Attribute, Held, Place, Program, Ring, Step

PAGE = 64  # positions of a page of the latent cache
CONV = 4  # taps of a KDA convolution
GROUP = 32  # MXFP4 elements of one scale


class _Builder:
    """Values and steps of one rank of one."""

    def __init__(self) -> None:
        self.values: list[Held] = []
        self.steps: list[Step] = []

    def value(self, dtype: str, *shape: int, place: Place = "activation") -> int:
        self.values.append(Held(dtype, shape, place, len(self.values)))
        return len(self.values) - 1

    def mailbox(self, dtype: str, *shape: int) -> int:
        held = Held(dtype, shape, "mailbox", len(self.values))
        ring = Ring(len(self.values), -(-held.bytes // 256) * 256, 3, 1, 2, first_reader=True)
        self.values.append(Held(dtype, shape, "mailbox", held.root, ring))
        return held.root

    def version(self, root: int) -> int:
        """The next version of a state."""
        held = self.values[root]
        self.values.append(Held(held.dtype, held.shape, "state", root))
        return len(self.values) - 1

    def step(
        self, op: str, operands: list[int], results: list[int], **attributes: Attribute
    ) -> None:
        given = tuple(sorted(attributes.items()))
        self.steps.append(Step(op, given, tuple(operands), tuple(results)))

    def program(self, *written: int, tp: int = 1) -> Program:
        return Program(tp, tuple(self.values), tuple(self.steps), written, "entry")


def _linear(M: int, N: int, K: int) -> Program:
    b = _Builder()
    x, w, y = b.value("bf16", M, K), b.value("bf16", N, K, place="weight"), b.value("bf16", M, N)
    b.step("linear", [x, w], [y])
    return b.program(y)


def _rms_norm(M: int, H: int) -> Program:
    b = _Builder()
    x, w, y = b.value("bf16", M, H), b.value("bf16", H, place="weight"), b.value("bf16", M, H)
    b.step("rms_norm", [x, w], [y], eps=1e-5)
    return b.program(y)


def _slots_norm(T: int, M: int, H: int) -> Program:
    b = _Builder()
    slots, x = b.mailbox("f32", T, M, H), b.value("bf16", M, H)
    total = b.value("bf16", M, H, place="internal")
    h, w, y = b.value("bf16", M, H), b.value("bf16", H, place="weight"), b.value("bf16", M, H)
    b.step("sum_slots", [slots], [total], out="bf16")
    b.step("add", [total, x], [h])
    b.step("rms_norm", [h, w], [y], eps=1e-5)
    return b.program(h, y, tp=T)


def _kda(R: int, heads: int, head_dim: int, q: int) -> Program:
    """One row a request is a step that commits, more are a verify that journals."""
    b, M, P = _Builder(), R * q, heads * head_dim
    operands = [b.value("bf16", M, P) for _ in range(4)] + [b.value("bf16", M, heads)]
    operands += [b.value("f32", P, 1, CONV, place="weight") for _ in range(3)]
    operands += [b.value("f32", heads, place="weight"), b.value("f32", P, place="weight")]
    operands.append(b.value("bf16", R, 3, P, CONV - 1, place="state"))
    operands.append(b.value("f32", R, heads, head_dim, head_dim, place="state"))
    operands.append(b.value("i32", R, place="host"))
    changed = operands[10:12]
    if q > 1:
        changed = [
            b.value("bf16", R, q, 3, P, place="state"),
            b.value("bf16", R, q, P, place="state"),
            b.value("bf16", R, q, heads, place="state"),
        ]
        operands += changed
    o = b.value("f32", M, P)
    results = [o, *(b.version(root) for root in changed)]
    b.step(
        "kda_verify" if q > 1 else "kda_step",
        operands,
        results,
        head_dim=head_dim,
        gate_lower_bound=-5.0,
        rows_per_request=q,
    )
    return b.program(o)


def _mla_attend(R: int, heads: int, latent: int, rope: int, context: int, q: int) -> Program:
    b, M, pages = _Builder(), R * q, -(-context // PAGE)
    query = b.value("bf16", M, heads * (latent + rope))
    cache = b.value("bf16", R * pages, PAGE, latent + rope, place="state")
    table, lengths = b.value("i32", R, pages, place="host"), b.value("i32", R, place="host")
    slots, o = b.value("i32", R, place="host"), b.value("bf16", M, heads * latent)
    b.step(
        "mla_attend_latent",
        [query, cache, table, lengths, slots],
        [o],
        kv_lora=latent,
        rope_dim=rope,
        softmax_scale=(128 + rope) ** -0.5,
        rows_per_request=q,
    )
    return b.program(o)


def _experts(M: int, E: int, k: int, Z: int, inner: int) -> Program:
    b = _Builder()
    operands = [b.value("bf16", M, Z), b.value("i32", M, k), b.value("f32", M, k)]
    shapes = [(E, inner, Z), (E, inner, Z), (E, Z, inner)]
    operands += [b.value("u8", e, n, w // 2, place="weight") for e, n, w in shapes]
    operands += [b.value("u8", e, n, w // GROUP, place="weight") for e, n, w in shapes]
    y = b.value("f32", M, Z)
    b.step("moe_experts", operands, [y], activation="situ", beta=4.0, linear_beta=25.0, out="f32")
    return b.program(y)


def _route(M: int, E: int, k: int) -> Program:
    b = _Builder()
    logits, bias = b.value("f32", M, E), b.value("f32", E, place="weight")
    ids, weights = b.value("i32", M, k), b.value("f32", M, k)
    b.step("route_topk", [logits, bias], [ids, weights], top_k=k, renormalize=True, scale=1.0)
    return b.program(ids, weights)


def _argmax(M: int, V: int) -> Program:
    b = _Builder()
    logits, ids = b.value("f32", M, V), b.value("i64", M)
    b.step("argmax", [logits], [ids])
    return b.program(ids)


def _attn_res(M: int, H: int, snapshots: int) -> Program:
    b = _Builder()
    operands = [b.value("f32", H, place="weight")]
    operands += [b.value("bf16", M, H) for _ in range(snapshots)]
    results = [b.value("f32", M), b.value("f32", M), b.value("f32", M, H)]
    b.step("attn_res_blocks", operands, results, eps=1e-5)
    return b.program(*results)


@dataclass(frozen=True)
class Example:
    """dims: names of the sizes, in the order of the command line; one: sizes to try."""

    dims: tuple[str, ...]
    make: Callable[..., Program]
    one: tuple[int, ...]


EXAMPLES: Mapping[str, Example] = {
    "linear": Example(("M", "N", "K"), _linear, (1, 3216, 7168)),
    "rms_norm": Example(("M", "H"), _rms_norm, (1, 7168)),
    "slots_norm": Example(("T", "M", "H"), _slots_norm, (16, 1, 7168)),
    "kda": Example(("R", "heads", "head_dim", "q"), _kda, (1, 6, 128, 1)),
    "mla_attend": Example(
        ("R", "heads", "latent", "rope", "context", "q"), _mla_attend, (1, 6, 512, 64, 4096, 1)
    ),
    "experts": Example(("M", "E", "k", "Z", "I"), _experts, (1, 896, 16, 3584, 192)),
    "route": Example(("M", "E", "k"), _route, (1, 896, 16)),
    "argmax": Example(("M", "V"), _argmax, (1, 10240)),
    "attn_res": Example(("M", "H", "snapshots"), _attn_res, (1, 7168, 4)),
}


def example(name: str, shape: str) -> Program:
    """The program of that name for sizes such as "1,3216,7168"; InputError says what is wrong."""
    if name not in EXAMPLES:
        raise InputError(f"unknown example {name!r}; known: {', '.join(sorted(EXAMPLES))}")
    known, parts = EXAMPLES[name], shape.split(",")
    good = len(parts) == len(known.dims) and all(p.strip().isdigit() for p in parts)
    if not good or not all(int(p) for p in parts):
        raise InputError(
            f"--shape {shape}: {name} takes {','.join(known.dims)}, "
            f"for example {','.join(map(str, known.one))}"
        )
    return known.make(*map(int, parts))
