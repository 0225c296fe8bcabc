"""GPUs as data: one frozen row a GPU, every figure with the place it comes from.

Code that depends on the GPU reads a field of a `Target`; nothing branches on a GPU's name. A new
GPU is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from k3fuse.errors import InputError


@dataclass(frozen=True)
class Target:
    """What planning, cost models and proofs need to know about one GPU.

    Sizes are in bytes, bandwidths in bytes per second and per GPU, times in microseconds.
    `provenance` maps each field to its source, which starts with one of three words:
    "measured", "datasheet" (or what the device reports) or "assumption".
    """

    name: str
    arch: str  # compiler target: sm_90a, sm_100a, sm_103a or sm_120a
    sm_count: int
    threads_per_sm: int
    smem_per_sm: int
    smem_per_block: int  # most that one CTA may ask for
    l2_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float  # nominal: the figure that published floors divide by
    read_bandwidth: float  # what a kernel that only reads reaches
    l2_bandwidth: float
    launch_edge_us: float  # one launch to the next with a PDL edge, trigger at entry
    cold_start_us: float  # on top of the edge for a dependent launch that fetches cold data
    link_bandwidth: float  # NVLink, each way
    hop_us: float  # one-way exchange of a small message between two GPUs
    pdl: bool  # programmatic dependent launch
    multicast: bool  # NVLink multicast (multimem) in hardware; using it is a separate option
    fp4: bool  # block-scaled FP4 tensor-core instructions
    provenance: Mapping[str, str] = field(compare=False, repr=False)


_KIB = 1024
_MIB = 1024 * _KIB

_READ_SHARE = 0.92  # assumed of a nominal bandwidth; an H200 reaches 4.6 of 4.8 TB/s
_L2_BANDWIDTH_PER_SM = 7.4e12 / 132  # measured on an H200

_H200_SOURCES = {
    "name": "datasheet: H200 SXM",
    "arch": "datasheet: compute capability 9.0",
    "sm_count": "datasheet: device attributes",
    "threads_per_sm": "datasheet: CUDA programming guide, compute capability 9.0",
    "smem_per_sm": "datasheet: CUDA programming guide, compute capability 9.0",
    "smem_per_block": "datasheet: CUDA programming guide, compute capability 9.0",
    "l2_bytes": "datasheet: device attributes",
    "hbm_bytes": "datasheet: 141 GB",
    "hbm_bandwidth": "datasheet: 4.8 TB/s",
    "read_bandwidth": "measured: bulk copies of 4 GiB, 4.61 TB/s",
    "l2_bandwidth": "measured: slope of dependent bursts on L2-resident data",
    "launch_edge_us": "measured: chain of minimal kernels, 132 CTAs, PDL with trigger at entry",
    "cold_start_us": "measured: dependent cold burst 1.7 us + bytes / 4.76 TB/s, less the edge",
    "link_bandwidth": "datasheet: NVLink 4, 900 GB/s both ways together",
    "hop_us": "assumption: no exchange between two GPUs was timed",
    "pdl": "datasheet: compute capability 9.0",
    "multicast": "datasheet: NVSwitch with NVLink SHARP",
    "fp4": "datasheet: FP4 tensor cores start at compute capability 10.0",
}


def _blackwell(
    name: str, arch: str, *, sm_count: int, hbm_bytes: int, capacity_source: str
) -> Target:
    """A Blackwell row: what was measured on an H200 is carried over and says so."""
    hbm_bandwidth = 8.0e12
    capability = {"sm_100a": "10.0", "sm_103a": "10.3"}[arch]
    return Target(
        name=name,
        arch=arch,
        sm_count=sm_count,
        threads_per_sm=2048,
        smem_per_sm=228 * _KIB,
        smem_per_block=227 * _KIB,
        l2_bytes=126 * _MIB,
        hbm_bytes=hbm_bytes,
        hbm_bandwidth=hbm_bandwidth,
        read_bandwidth=hbm_bandwidth * _READ_SHARE,
        l2_bandwidth=_L2_BANDWIDTH_PER_SM * sm_count,
        launch_edge_us=0.7,
        cold_start_us=1.0,
        link_bandwidth=900e9,
        hop_us=2.0,
        pdl=True,
        multicast=True,
        fp4=True,
        provenance={
            "name": f"datasheet: {name.upper()}",
            "arch": f"datasheet: compute capability {capability}",
            "sm_count": "datasheet: device attributes as published, not read on a device here",
            "threads_per_sm": f"datasheet: CUDA programming guide, compute capability {capability}",
            "smem_per_sm": f"datasheet: CUDA programming guide, compute capability {capability}",
            "smem_per_block": f"datasheet: CUDA programming guide, compute capability {capability}",
            "l2_bytes": "datasheet: device attributes as published, not read on a device here",
            "hbm_bytes": f"datasheet: {capacity_source}",
            "hbm_bandwidth": "datasheet: 8 TB/s",
            "read_bandwidth": f"assumption: {_READ_SHARE} of the nominal bandwidth",
            "l2_bandwidth": "assumption: the H200's measured bandwidth an SM times the SM count",
            "launch_edge_us": "assumption: as measured on an H200",
            "cold_start_us": "assumption: as measured on an H200",
            "link_bandwidth": "datasheet: NVLink 5, 1,800 GB/s both ways together",
            "hop_us": "assumption: as assumed for an H200",
            "pdl": f"datasheet: compute capability {capability}",
            "multicast": "datasheet: NVSwitch with NVLink SHARP",
            "fp4": f"datasheet: compute capability {capability}",
        },
    )


_RTX_PRO_6000 = Target(
    name="rtx-pro-6000",
    arch="sm_120a",
    sm_count=188,
    threads_per_sm=1536,
    smem_per_sm=100 * _KIB,
    smem_per_block=99 * _KIB,
    l2_bytes=128 * _MIB,
    hbm_bytes=96 * 10**9,
    hbm_bandwidth=1.792e12,
    read_bandwidth=1.792e12 * _READ_SHARE,
    l2_bandwidth=_L2_BANDWIDTH_PER_SM * 188,
    launch_edge_us=0.7,
    cold_start_us=1.0,
    link_bandwidth=64e9,
    hop_us=2.0,
    pdl=True,
    multicast=False,
    fp4=True,
    provenance={
        "name": "datasheet: RTX PRO 6000 Blackwell",
        "arch": "datasheet: compute capability 12.0",
        "sm_count": "datasheet: 188 SMs, not read on a device here",
        "threads_per_sm": "datasheet: CUDA programming guide, compute capability 12.0",
        "smem_per_sm": "datasheet: CUDA programming guide, compute capability 12.0",
        "smem_per_block": "datasheet: CUDA programming guide, compute capability 12.0",
        "l2_bytes": "datasheet: 128 MB, not read on a device here",
        "hbm_bytes": "datasheet: 96 GB GDDR7",
        "hbm_bandwidth": "datasheet: 1,792 GB/s",
        "read_bandwidth": f"assumption: {_READ_SHARE} of the nominal bandwidth",
        "l2_bandwidth": "assumption: the H200's measured bandwidth an SM times the SM count",
        "launch_edge_us": "assumption: as measured on an H200",
        "cold_start_us": "assumption: as measured on an H200",
        "link_bandwidth": "datasheet: PCIe 5.0 x16, 64 GB/s each way",
        "hop_us": "assumption: as assumed for an H200, though there is no NVLink",
        "pdl": "datasheet: compute capability 12.0",
        "multicast": "datasheet: no NVLink",
        "fp4": "datasheet: compute capability 12.0",
    },
)

_ROWS = (
    Target(
        name="h200",
        arch="sm_90a",
        sm_count=132,
        threads_per_sm=2048,
        smem_per_sm=228 * _KIB,
        smem_per_block=227 * _KIB,
        l2_bytes=60 * _MIB,
        hbm_bytes=141 * 10**9,
        hbm_bandwidth=4.8e12,
        read_bandwidth=4.6e12,
        l2_bandwidth=7.4e12,
        launch_edge_us=0.7,
        cold_start_us=1.0,
        link_bandwidth=450e9,
        hop_us=2.0,
        pdl=True,
        multicast=True,
        fp4=False,
        provenance=_H200_SOURCES,
    ),
    _blackwell(
        "b200", "sm_100a", sm_count=148, hbm_bytes=180 * 10**9, capacity_source="HGX B200, 180 GB"
    ),
    _blackwell(
        "b300", "sm_103a", sm_count=148, hbm_bytes=288 * 10**9, capacity_source="288 GB HBM3e"
    ),
    _blackwell(
        "gb200", "sm_100a", sm_count=152, hbm_bytes=186 * 10**9, capacity_source="186 GB a GPU"
    ),
    _blackwell(
        "gb300", "sm_103a", sm_count=152, hbm_bytes=288 * 10**9, capacity_source="288 GB HBM3e"
    ),
    _RTX_PRO_6000,
)

TARGETS: Mapping[str, Target] = {row.name: row for row in _ROWS}
"""GPU name -> its row."""

LEAST_SMS = 16
"""SMs that the kernels of a rank need: side streams take some of them."""

DEFAULT_GPU: Mapping[str, str] = {
    "sm_90a": "h200",
    "sm_100a": "b200",
    "sm_103a": "gb300",
    "sm_120a": "rtx-pro-6000",
    "sm_120": "rtx-pro-6000",
}
"""Architecture -> the GPU that it stands for when only the architecture is given."""


def get_target(name: str) -> Target:
    """The row of a GPU ("gb300") or of an architecture's default GPU ("sm_103a").

    "h200:64" is 64 SMs of one, with their share of its bandwidths: what a rank may use that shares
    the GPU with others. Raises `InputError`, listing the known names, for anything else: a near
    miss would compile for the wrong machine.
    """
    whole, colon, count = name.partition(":")
    target = TARGETS.get(DEFAULT_GPU.get(whole, whole))
    if target is None:
        known = ", ".join([*DEFAULT_GPU, *TARGETS])
        raise InputError(
            f"unknown target {name!r}: k3fuse never guesses the nearest; known: {known}"
        )
    return _part(target, name, count) if colon else target


def _part(target: Target, name: str, count: str) -> Target:
    if not count.isdecimal() or not LEAST_SMS <= int(count) <= target.sm_count:
        raise InputError(
            f"target {name!r}: {target.name} has {target.sm_count} SMs, and a rank needs at least "
            f"{LEAST_SMS}; write for example {target.name}:{target.sm_count // 2}"
        )
    share = int(count) / target.sm_count
    return replace(
        target,
        name=f"{target.name}:{count}",
        sm_count=int(count),
        hbm_bandwidth=target.hbm_bandwidth * share,
        read_bandwidth=target.read_bandwidth * share,
        l2_bandwidth=target.l2_bandwidth * share,
    )
