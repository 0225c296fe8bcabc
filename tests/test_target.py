from __future__ import annotations

import dataclasses

import pytest

from k3fuse.errors import InputError
from k3fuse.target import DEFAULT_GPU, TARGETS, Target, get_target


@pytest.mark.parametrize("name", TARGETS)
def test_every_field_names_its_source(name: str) -> None:
    target = TARGETS[name]
    fields = {f.name for f in dataclasses.fields(Target)} - {"provenance"}
    assert target.name == name
    assert set(target.provenance) == fields
    for source in target.provenance.values():
        assert source.split(":")[0] in {"measured", "datasheet", "assumption"}


@pytest.mark.parametrize("name", TARGETS)
def test_rows_are_plausible(name: str) -> None:
    target = TARGETS[name]
    assert target.smem_per_block < target.smem_per_sm
    assert 0 < target.read_bandwidth < target.hbm_bandwidth
    assert target.l2_bandwidth > target.read_bandwidth
    assert target.link_bandwidth < target.hbm_bandwidth
    assert target.launch_edge_us > 0
    assert target.cold_start_us > 0
    assert target.arch in DEFAULT_GPU
    assert target.threads_per_sm in (1536, 2048)


@pytest.mark.parametrize(("arch", "gpu"), DEFAULT_GPU.items())
def test_arch_resolves_to_a_gpu_of_that_arch(arch: str, gpu: str) -> None:
    assert get_target(arch) is get_target(gpu)
    assert get_target(arch).arch.removesuffix("a") == arch.removesuffix("a")


def test_published_figures() -> None:
    assert get_target("h200").hbm_bandwidth == 4.8e12
    assert get_target("h200").read_bandwidth == 4.6e12
    assert get_target("h200").launch_edge_us == 0.7
    assert get_target("gb300").hbm_bandwidth == 8.0e12
    assert get_target("gb300").provenance["read_bandwidth"].startswith("assumption")
    assert not get_target("h200").fp4
    assert get_target("b200").fp4


def test_a_later_architecture_is_not_a_larger_one() -> None:
    """Compute capability 12.0 has less shared memory and fewer threads an SM than 9.0."""
    small, large = get_target("sm_120"), get_target("sm_90a")
    assert small is get_target("sm_120a") is get_target("rtx-pro-6000")
    assert (small.sm_count, small.smem_per_block, small.smem_per_sm) == (188, 99 << 10, 100 << 10)
    assert small.threads_per_sm == 1536 < large.threads_per_sm
    assert small.smem_per_block < large.smem_per_block
    assert not small.multicast


def test_same_rows_are_equal_and_hashable() -> None:
    copy = dataclasses.replace(get_target("h200"))
    assert copy == get_target("h200")
    assert len({copy, get_target("h200"), get_target("b200")}) == 2


@pytest.mark.parametrize("name", ["sm_130", "H200", "sm_90", ""])
def test_unknown_target_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(InputError, match="never guesses the nearest") as caught:
        get_target(name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(known in message for known in [*TARGETS, *DEFAULT_GPU])


def test_a_part_of_a_gpu_has_its_share() -> None:
    whole, half = get_target("h200"), get_target("sm_90a:66")
    assert (half.name, half.arch, half.sm_count) == ("h200:66", "sm_90a", 66)
    assert half.read_bandwidth == whole.read_bandwidth / 2
    assert half.smem_per_block == whole.smem_per_block


@pytest.mark.parametrize("name", ["h200:", "h200:8", "h200:133", "h200:x", "h300:64"])
def test_a_part_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"target '{name}'"):
        get_target(name)
