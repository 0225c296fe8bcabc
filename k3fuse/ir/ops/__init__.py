"""The op set, one family a file. Importing this package registers every op."""

from k3fuse.ir.ops import (
    attn_res,
    collective,
    elementwise,
    kda,
    linear,
    mla,
    moe,
    norm,
    prefetch,
    shape,
)

__all__ = [
    "attn_res",
    "collective",
    "elementwise",
    "kda",
    "linear",
    "mla",
    "moe",
    "norm",
    "prefetch",
    "shape",
]
