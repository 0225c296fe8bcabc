"""What kernels say they support, how they are configured and chosen; needs no compiler."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import pytest

from k3fuse.errors import InputError
from k3fuse.kernels.projection import ProjectionConfig
from k3fuse.kernels.row import RowConfig
from k3fuse.kernels.spec import PREFERENCE, choose, get_kernel, registry
from k3fuse.target import TARGETS, get_target

H200 = get_target("h200")


@pytest.mark.parametrize(
    ("kernel", "shape", "reason"),
    [
        ("projection", {"M": 9, "N": 40, "K": 192}, "M=9: holds 1 to 8 tokens"),
        ("projection", {"M": 0, "N": 40, "K": 192}, "M=0: holds 1 to 8 tokens"),
        ("projection", {"M": 1, "N": 12, "K": 192}, "N=12: must be a multiple of 8"),
        ("projection", {"M": 1, "N": 40, "K": 96}, "K=96: must be a multiple of 64"),
        ("projection", {"M": 1, "N": 1 << 20, "K": 1 << 12}, "in 32 bits"),
        ("rms_norm", {"M": 1, "H": 12}, "H=12: must be a multiple of 8"),
        ("rms_norm", {"M": 1, "H": 1 << 18}, "registers of a cluster"),
        ("rms_norm", {"M": 0, "H": 64}, "M=0"),
        ("slots_rms_norm", {"M": 1, "H": 64, "T": 65}, "T=65: adds up 1 to 64 slots"),
        ("slots_rms_norm", {"M": 1 << 15, "H": 7168, "T": 64}, "in 32 bits"),
    ],
)
def test_a_refusal_names_the_size(kernel: str, shape: dict[str, int], reason: str) -> None:
    spec = get_kernel(kernel)
    assert reason in (spec.supports(shape, H200) or "")
    with pytest.raises(InputError, match=kernel):
        spec.configure(shape, H200)


def test_a_gpu_without_dependent_launch_is_refused() -> None:
    target = dataclasses.replace(H200, name="old", pdl=False)
    for name, shape in (("projection", {"M": 1, "N": 8, "K": 64}), ("rms_norm", {"M": 1, "H": 64})):
        assert "which old has not" in (get_kernel(name).supports(shape, target) or "")


@pytest.mark.parametrize("gpu", TARGETS)
@pytest.mark.parametrize(("n", "k"), [(8, 64), (3216, 7168), (448, 3584), (7168, 768), (40, 7232)])
def test_projection_covers_every_tile_and_step_and_fits(gpu: str, n: int, k: int) -> None:
    target = get_target(gpu)
    for m in (1, 8):
        c: ProjectionConfig = get_kernel("projection").configure({"M": m, "N": n, "K": k}, target)
        assert c.ctas <= target.sm_count
        assert c.warps <= 16
        assert c.depth >= 2
        assert c.smem <= target.smem_per_block
        assert c.split * c.steps >= k // 32
        assert c.steps % c.chunk == 0


@pytest.mark.parametrize("h", [8, 264, 7168, 16384])
def test_a_row_is_covered_once(h: int) -> None:
    c: RowConfig = get_kernel("slots_rms_norm").configure({"M": 2, "H": h, "T": 16}, H200)
    assert (c.cluster - 1) * c.share < h // 8 <= c.cluster * c.share
    assert c.threads * c.vectors >= c.share
    assert c.vectors <= 4
    assert c.smem <= H200.smem_per_block


def test_configs_are_picklable_and_options_reach_them() -> None:
    shape = {"M": 1, "N": 40, "K": 192}
    c = get_kernel("projection").configure(shape, H200, out="f32", trigger="last_tile")
    assert (c.out, c.trigger) == ("f32", "last_tile")
    assert pickle.loads(pickle.dumps(c)) == c


def test_choice_leaves_a_record() -> None:
    assert choose("linear", {"M": 1, "N": 40, "K": 192}, H200).spec is get_kernel("projection")
    refused = choose("linear", {"M": 64, "N": 40, "K": 192}, H200)
    assert refused.spec is None
    assert refused.refusals == (("projection", "M=64: holds 1 to 8 tokens"),)


def test_the_table_and_the_registry_agree() -> None:
    assert {row.kernel for row in PREFERENCE} == set(registry())
    assert all(row.op == get_kernel(row.kernel).op and row.measured for row in PREFERENCE)


def test_unknown_kernel_lists_the_known() -> None:
    with pytest.raises(InputError, match="projection, rms_norm"):
        get_kernel("projektion")


def test_specs_import_without_the_compiler_and_without_torch() -> None:
    code = (
        "import sys; sys.modules['cutlass'] = None; sys.modules['torch'] = None; "
        "from k3fuse.kernels.spec import registry; print(len(registry()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
