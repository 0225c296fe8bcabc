"""Streams for the ranks of one process, on SMs of their own where several share a GPU.

Ranks that wait for one another must be able to run at the same time. A kernel whose CTAs have no
room waits for others to leave, and those may be waiting for it. So each virtual rank gets a part of
the SMs (a CUDA green context) that holds as many as its kernels were compiled and proved for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3fuse.errors import InputError
from k3fuse.runtime.launcher import DriverError, check, cuda_driver

STREAMS = ("main", "aux", "prefetch")

Streams = Mapping[str, torch.cuda.Stream]
"""The streams of one rank by the plan's names."""


def rank_streams(ranks: int, sms: int, device: torch.device) -> list[Streams]:
    """Streams for each of `ranks` ranks that need `sms` SMs each.

    Raises InputError when the GPU has too few.
    """
    if ranks == 1:
        return [{name: torch.cuda.Stream(device) for name in STREAMS}]
    driver = cuda_driver()
    index = check(driver.cuDeviceGet(device.index or 0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = check(driver.cuDeviceGetDevResource(index, kind))
    most = whole.sm.smCount // ranks // 8 * 8  # by so many SMs CUDA gives out parts
    refused = (
        f"{ranks} virtual ranks need {sms} SMs each and this GPU has {whole.sm.smCount}: compile "
        f"for {most} SMs (as in --target h200:{most}), or run fewer ranks"
    )
    try:
        status, parts, found, _ = driver.cuDevSmResourceSplitByCount(ranks, whole, 0, sms)
        check((status,))
    except DriverError as error:
        raise InputError(f"{refused} ({error})") from None
    if found < ranks:
        raise InputError(refused)
    return [_streams(driver, part, index) for part in parts]


def sm_count(device: torch.device) -> int:
    """SMs of a GPU."""
    driver = cuda_driver()
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    index = check(driver.cuDeviceGet(device.index or 0))
    return int(check(driver.cuDeviceGetAttribute(kind, index)))


def _streams(driver: Any, part: Any, device: Any) -> Streams:
    description = check(driver.cuDevResourceGenerateDesc([part], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = check(driver.cuGreenCtxCreate(description, device, flag))
    kind = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return {
        name: torch.cuda.ExternalStream(int(check(driver.cuGreenCtxStreamCreate(context, kind, 0))))
        for name in STREAMS
    }
