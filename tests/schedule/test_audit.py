"""The audit on real PTX of both targets, on edited copies of it, and on small bodies by hand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from k3fuse.schedule.audit import PdlUse, audit_kernel, pdl_use
from k3fuse.schedule.finding import Finding
from k3fuse.schedule.model import Access
from k3fuse.schedule.ptx_origins import KernelOperand

HERE = Path(__file__).parent
ARCHES = ("sm_90a", "sm_103a")


@dataclass(frozen=True)
class Case:
    operands: tuple[KernelOperand, ...]
    static: int = 0
    dynamic: int = 0


def operands(*items: tuple[str, Access]) -> tuple[KernelOperand, ...]:
    return tuple(
        KernelOperand(name, access, index, multicast=name == "multicast")
        for index, (name, access) in enumerate(items)
    )


WXY = operands(("w", "weight"), ("x", "activation"), ("y", "activation"))
CASES = {
    "projection": Case(WXY),
    "exchange": Case(
        operands(
            ("x", "activation"),
            ("multicast", "mailbox"),
            ("box", "mailbox"),
            ("epoch", "state"),
            ("y", "activation"),
        )
    ),
    "flag_exchange": Case(
        operands(("boxes", "mailbox"), ("flag", "mailbox"), ("epoch", "state"), ("y", "activation"))
    ),
    "bulk": Case(WXY, dynamic=8200),
    "warps": Case(WXY, static=512),
    "preload": Case(WXY),
    "held_pointer": Case(
        operands(("w", "weight"), ("state", "state"), ("y", "activation")), static=8
    ),
}


def ptx_of(name: str, arch: str) -> str:
    return (HERE / "ptx" / f"{name}.{arch}.ptx").read_text()


def audit(name: str, text: str, table: tuple[KernelOperand, ...] | None = None) -> list[Finding]:
    case = CASES[name]
    return audit_kernel(
        text,
        f"{name}_0",
        case.operands if table is None else table,
        pdl=True,
        declared_smem=case.static + case.dynamic,
        dynamic_smem=case.dynamic,
    )


def edit(text: str, old: str, new: str) -> str:
    """Replace the one match of a pattern in which a blank stands for any white space."""
    pattern = re.escape(old).replace(r"\ ", r"\s+")
    text, count = re.subn(pattern, lambda _: new, text)
    assert count == 1, (old, count)
    return text


def line_of(text: str, part: str) -> int:
    pattern = re.escape(part).replace(r"\ ", r"\s+")
    match = re.search(pattern, text)
    assert match is not None
    return text.count("\n", 0, match.start()) + 1


def assert_found(found: list[Finding], kind: str, *words: str) -> None:
    """Some finding has the kind and all the words in its message."""
    assert any(f.kind == kind and all(w in f.message for w in words) for f in found), found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_pass(name: str, arch: str) -> None:
    assert audit(name, ptx_of(name, arch)) == []


@pytest.mark.parametrize("name", sorted({"projection", "bulk", "warps", "preload", "held_pointer"}))
def test_weights_of_another_class_fail(name: str) -> None:
    """What stands above the wait is refused as soon as it is not static."""
    table = CASES[name].operands
    table = (replace(table[0], access="activation"), *table[1:])
    assert_found(
        audit(name, ptx_of(name, "sm_90a"), table),
        "read before wait",
        f"{name}_0 line",
        "parameter 0 (activation w)",
    )


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl to compile"
)
def test_texts_are_what_the_dsl_prints(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(HERE / "kernels.py"), str(tmp_path)], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in (HERE / "ptx").iterdir()}


def test_pdl_use() -> None:
    text = ptx_of("exchange", "sm_90a")
    wait = line_of(text, "griddepcontrol.wait;")
    trigger = line_of(text, "griddepcontrol.launch_dependents;")
    assert pdl_use(text, "exchange_0") == PdlUse((wait,), (trigger,))


@pytest.mark.parametrize("arch", ARCHES)
class TestEdited:
    def test_wait_removed(self, arch: str) -> None:
        text = edit(ptx_of("projection", arch), "griddepcontrol.wait;", "")
        found = audit("projection", text)
        entry = line_of(text, ".visible .entry")
        load = line_of(text, "ld.global.b32 %r8, [%rd12];")
        words = (f"projection_0 line {entry}", f"line {load}", "parameter 1 (activation x)")
        assert_found(found, "missing wait", *words)

    @pytest.mark.parametrize(
        "wait",
        [
            "setp.ne.b32 %p90, 0, 0; @%p90 griddepcontrol.wait;",
            "setp.gt.u32 %p90, %r3, 127; @%p90 griddepcontrol.wait;",
            "setp.eq.s32 %p90, 0, 0; @%p90 bra $PAST; griddepcontrol.wait; $PAST:",
            "bra $PAST; griddepcontrol.wait; $PAST:",
            "mov.b32 %r90, 4; and.b32 %r91, %r90, 3; setp.ne.b32 %p90, %r91, 0;"
            "@%p90 griddepcontrol.wait;",
        ],
    )
    def test_wait_never_taken(self, wait: str, arch: str) -> None:
        text = edit(ptx_of("projection", arch), "griddepcontrol.wait;", wait)
        line = line_of(text, "griddepcontrol.wait;")
        load = line_of(text, "ld.global.b32 %r8, [%rd12];")
        words = (f"projection_0 line {line}", f"line {load}", "parameter 1 (activation x)")
        assert_found(audit("projection", text), "dead wait", *words)

    def test_wait_sometimes_taken(self, arch: str) -> None:
        wait = "setp.ne.b32 %p90, %r4, 0; @%p90 griddepcontrol.wait;"
        text = edit(ptx_of("projection", arch), "griddepcontrol.wait;", wait)
        found = audit("projection", text)
        load = line_of(text, "ld.global.b32 %r8, [%rd12];")
        around = f"path around the wait of line {line_of(text, wait)}"
        words = (f"line {load}", around, "parameter 1 (activation x)")
        assert_found(found, "read before wait", *words)
        assert {f.kind for f in found} == {"read before wait", "atomic before wait"}

    def test_activation_load_moved_up(self, arch: str) -> None:
        text = ptx_of("projection", arch)
        moved = ("add.s64 %rd12, %rd3, %rd5;", "ld.global.b32 %r8, [%rd12];")
        for part in moved:
            text = edit(text, part, "")
        text = edit(text, "griddepcontrol.wait;", f"{moved[0]}\n{moved[1]}\ngriddepcontrol.wait;")
        (found,) = audit("projection", text)
        assert found.kind == "read before wait"
        assert f"projection_0 line {line_of(text, moved[1])}: " in found.message
        assert "parameter 1 (activation x)" in found.message

    def test_bulk_copy_of_an_activation_above_the_wait(self, arch: str) -> None:
        text = edit(ptx_of("bulk", arch), "[%r6], [%rd1],", "[%r6], [%rd2],")
        (found,) = audit("bulk", text)
        line = line_of(text, "[%r6], [%rd2],")
        assert found.kind == "read before wait"
        assert f"bulk_0 line {line}: cp.async.bulk" in found.message
        assert "parameter 1 (activation x)" in found.message

    def test_loop_over_an_activation_above_the_wait(self, arch: str) -> None:
        text = edit(ptx_of("preload", arch), "add.s64 %rd5, %rd1, %rd4;", "add.s64 %rd5,%rd2,%rd4;")
        (found,) = audit("preload", text)
        line = line_of(text, "ld.global.b32 %r3")
        assert found.kind == "read before wait"
        assert f"preload_0 line {line}: " in found.message
        assert "parameter 1 (activation x)" in found.message

    def test_a_warp_that_does_not_wait_reads(self, arch: str) -> None:
        text = edit(ptx_of("warps", arch), "@%p1 bra $L__BB0_4;", "")
        found = audit("warps", text)
        assert len(found) == 4
        skipped = line_of(text, "@%p1 bra $L__BB0_2;")
        words = (f"warps_0 line {line_of(text, 'ld.global.b32 %r6')}", f"line {skipped} taken")
        assert_found(found, "read before wait", *words, "parameter 1 (activation x)")

    def test_one_thread_of_the_waiting_warp_may_read(self, arch: str) -> None:
        """Thread 0 is among the threads that waited, though by another comparison."""
        guard = "setp.ne.b32 %p91, %r1, 0; @%p91 bra $L__BB0_4;"
        assert audit("warps", edit(ptx_of("warps", arch), "@%p1 bra $L__BB0_4;", guard)) == []
        other = guard.replace(", 0;", ", 32;")
        found = audit("warps", edit(ptx_of("warps", arch), "@%p1 bra $L__BB0_4;", other))
        assert_found(found, "read before wait", "parameter 1 (activation x)")

    def test_activation_behind_a_pointer_select(self, arch: str) -> None:
        text = edit(ptx_of("held_pointer", arch), "%rd8, %rd1, %p2", "%rd8, %rd2, %p2")
        (found,) = audit("held_pointer", text)
        line = line_of(text, "ld.global.b32 %r4")
        assert found.kind == "read before wait"
        assert f"held_pointer_0 line {line}: " in found.message
        assert "parameter 1 (state state)" in found.message

    def test_state_pointer_through_shared_memory(self, arch: str) -> None:
        text = edit(
            ptx_of("held_pointer", arch),
            "[__static_shmem__0_$_0], %rd1;",
            "[__static_shmem__0_$_0], %rd2;",
        )
        (found,) = audit("held_pointer", text)
        line = line_of(text, "ld.global.b32 %r3")
        assert found.kind == "read before wait"
        assert f"held_pointer_0 line {line}: " in found.message
        assert "parameter 1 (state state)" in found.message

    def test_plain_store_to_multicast(self, arch: str) -> None:
        text = ptx_of("exchange", arch)
        text = edit(text, "multimem.st.relaxed.sys.global.v4.f32", "st.relaxed.sys.global.v4.f32")
        (found,) = audit("exchange", text)
        line = line_of(text, "st.relaxed.sys.global.v4.f32")
        assert found.kind == "store class"
        assert f"exchange_0 line {line}: " in found.message
        assert "parameter 1 (mailbox multicast)" in found.message

    def test_multimem_elsewhere(self, arch: str) -> None:
        text = edit(ptx_of("exchange", arch), "add.s64 %rd5, %rd7,", "add.s64 %rd5, %rd1,")
        (found,) = audit("exchange", text)
        line = line_of(text, "multimem.st")
        assert found.kind == "store class"
        assert f"exchange_0 line {line}: " in found.message
        assert "parameter 2 (mailbox box), which is not multicast" in found.message

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            ("mov.u64 %rd90, %gridid; cvt.u32.u64 %r2, %rd90;", "%gridid"),
            ("add.s32 %r2, %r4, 1;", "a parameter"),
            ("mov.b32 %r2, 5;", "5, which is no sentinel"),
        ],
    )
    def test_flag_against_what_repeats(self, value: str, why: str, arch: str) -> None:
        text = edit(ptx_of("flag_exchange", arch), "add.s32 %r2, %r5, 1;", value)
        (found,) = audit("flag_exchange", text)
        line = line_of(text, "setp.lt.u32 %p3, %r7, %r2;")
        assert found.kind == "stale flag"
        assert f"flag_exchange_0 line {line}: " in found.message
        assert "parameter 1 (mailbox flag)" in found.message
        assert why in found.message

    def test_poll_for_another_word(self, arch: str) -> None:
        old = "setp.eq.b32 %p12, %r36, -2147483648;"
        text = edit(ptx_of("exchange", arch), old, "setp.eq.b32 %p12, %r36, 7;")
        (found,) = audit("exchange", text)
        line = line_of(text, "%r36, 7;")
        assert found.kind == "stale flag"
        assert f"exchange_0 line {line}: " in found.message
        assert "parameter 2 (mailbox box)" in found.message


def test_shared_memory_and_trigger() -> None:
    text = ptx_of("bulk", "sm_90a")

    def kinds(declared: int, dynamic: int, trigger: bool | None = None) -> list[str]:
        found = audit_kernel(
            text,
            "bulk_0",
            WXY,
            pdl=True,
            declared_smem=declared,
            dynamic_smem=dynamic,
            trigger=trigger,
        )
        return [f.kind for f in found]

    assert kinds(8200, 8200) == []
    assert kinds(8192, 8200) == ["shared memory"]
    assert kinds(0, 0) == ["shared memory"]
    assert kinds(8200, 8200, trigger=False) == []
    unused = ptx_of("projection", "sm_90a")
    for declared, found in ((1024, []), (0, ["shared memory"])):
        given = audit_kernel(
            unused, "projection_0", WXY, pdl=True, declared_smem=declared, dynamic_smem=1024
        )
        assert [f.kind for f in given] == found
    assert kinds(8200, 8200, trigger=True) == ["trigger"]


def test_weights_are_not_written() -> None:
    (found,) = early("", late="st.global.b32 [%rd1], %r99;")
    assert found.kind == "write to weight"
    assert "parameter 0 (weight w)" in found.message


POLL = """
.visible .entry k(
.param .u64 .ptr .global .align 16 k_param_0
)
{
griddepcontrol.wait;
ld.param.b64 %rd1, [k_param_0];
ld.volatile.global.b32 %r1, [%rd1];
$L:
cvt.u16.u32 %rs1, %r1;
setp.ne.b16 %p1, %rs1, LOW;
setp.gt.s32 %p2, %r1, HIGH;
and.pred %p3, %p1, %p2;
@%p3 bra $E;
ld.volatile.global.b32 %r1, [%rd1];
bra.uni $L;
$E:
ret;
}
"""


@pytest.mark.parametrize(
    ("low", "high", "stale"),
    [
        ("-32768", "-2147418113", []),  # neither half of the word is -0.0
        ("7", "-2147418113", ["7"]),
        ("-32768", "-2147418112", ["-2147418112"]),
        ("-32768", "7", ["7"]),
        ("32768", "0x8000FFFF", []),
    ],
)
def test_polls_of_half_words(low: str, high: str, stale: list[str]) -> None:
    """As the compiler folds them; the first load stands above the loop."""
    text = POLL.replace("LOW", low).replace("HIGH", high)
    found = audit_kernel(text, "k", operands(("box", "mailbox")), pdl=True, declared_smem=0)
    assert [f.kind for f in found] == ["stale flag"] * len(stale)
    for finding, value in zip(found, stale, strict=True):
        assert f"with {value}, which is no sentinel" in finding.message


def test_operand_table_must_cover_the_pointers() -> None:
    text = ptx_of("projection", "sm_90a")
    found = audit("projection", text, WXY[:2])
    assert_found(found, "operand table", "projection_0 line", "parameter 2")
    found = audit("projection", text, (*WXY, KernelOperand("z", "state", 9)))
    assert_found(found, "operand table", "parameter 9 (state z) lies outside")


def test_without_pdl_the_wait_does_not_matter() -> None:
    text = edit(ptx_of("projection", "sm_90a"), "griddepcontrol.wait;", "")
    assert audit_kernel(text, "projection_0", WXY, pdl=False, declared_smem=0) == []


STRUCT = (".param .align 8 .b8 k_param_0[24]", ".param .align 64 .b8 k_param_1[128]")
STRUCT_OPERANDS = (
    KernelOperand("w", "weight", 0),
    KernelOperand("x", "activation", 0, offset=8),
    KernelOperand("count", "host", 0, offset=16),
    KernelOperand("map", "activation", 1),
)
LOAD = "ld.param.v2.b64 {%rd1, %rd2}, [k_param_0]; ld.param.b64 %rd3, [k_param_0+16];"


def early(code: str, late: str = "") -> list[Finding]:
    """Findings on code that stands above the wait of a kernel with structs and a descriptor, or
    below it."""
    text = (
        f".shared .align 8 .b8 s[64];\n.visible .entry k(\n{STRUCT[0]},\n{STRUCT[1]}\n)\n"
        f".reqntid 64, 1, 1\n{{\n.local .align 8 .b8 __local_depot0[8];\n{LOAD}\n{code}\n"
        f"griddepcontrol.wait;\nld.global.b32 %r99, [%rd2];\nst.shared.b32 [s], %r99;\n{late}\n"
        "ret;\n}\n"
    )
    return audit_kernel(text, "k", STRUCT_OPERANDS, pdl=True, declared_smem=64)


@pytest.mark.parametrize(
    "code",
    [
        "add.s64 %rd4, %rd1, %rd3; ld.global.b32 %r1, [%rd4+16];",
        "prefetch.global.L2 [%rd1];",
        "prefetch.tensormap [k_param_1];",
        "ld.global.b64 %rd4, [%rd1]; ld.global.b32 %r1, [%rd4];",  # a table of weight pointers
        "ld.shared.b32 %r1, [s]; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd1, %rd4; "
        "ld.global.b32 %r2, [%rd5];",  # an index that held dynamic data elsewhere
        "mov.u32 %r1, s; cvt.u64.u32 %rd4, %r1; cvta.shared.u64 %rd5, %rd4; ld.b32 %r2, [%rd5];",
        "mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 63; @%p1 ld.global.b32 %r2, [%rd2];",
    ],
)
def test_may_stand_above_the_wait(code: str) -> None:
    assert early(code) == []


TABLE = "ld.global.b64 %rd4, [%rd2]; ld.global.b32 %r1, [%rd4];"


@pytest.mark.parametrize(
    ("code", "kind", "who"),
    [
        ("ld.global.b32 %r1, [%rd2];", "read before wait", "parameter 0+8 (activation x)"),
        ("@%p9 ld.volatile.b32 %r1, [%rd2];", "read before wait", "parameter 0+8 (activation x)"),
        ("red.global.add.u32 [%rd2], 1;", "atomic before wait", "parameter 0+8 (activation x)"),
        ("st.global.b32 [%rd2], 1;", "write before wait", "parameter 0+8 (activation x)"),
        ("prefetch.global.L2 [%rd2];", "prefetch before wait", "parameter 0+8 (activation x)"),
        (TABLE, "read before wait", "parameter 0+8 (activation x)"),
        (
            "cvta.param.u64 %rd4, k_param_1; cp.async.bulk.tensor.2d.shared::cta.global.tile."
            "mbarrier::complete_tx::bytes [s], [%rd4, {%r1, %r2}], [s+32];",
            *("read before wait", "parameter 1 (activation map)"),
        ),
        (
            "mov.u64 %rd4, __local_depot0; st.local.b64 [%rd4], %rd2; ld.local.b64 %rd5, [%rd4]; "
            "ld.global.b32 %r1, [%rd5];",
            *("read before wait", "parameter 0+8 (activation x)"),
        ),
        (
            "mov.b64 {%r1, %r2}, %rd2; mov.b64 %rd4, {%r1, %r2}; ld.global.b32 %r3, [%rd4];",
            *("read before wait", "parameter 0+8 (activation x)"),
        ),
        (
            "cvta.param.u64 %rd4, k_param_0; add.s64 %rd4, %rd4, %rd3; ld.b64 %rd5, [%rd4]; "
            "ld.global.b32 %r3, [%rd5];",
            *("read before wait", "parameter 0+8 (activation x)"),
        ),
        ("ld.global.b32 %r1, [%rd77];", "not proven", "no known parameter"),
        ("ld.global.b32 %r1, [%rd3];", "not proven", "no known parameter"),
        ("tex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [t, {%r5, %r6}];", "not proven", "not known"),
        ("call.uni helper, (%rd1);", "not proven", "not known"),
        ("ld.shared.b64 %rd4, [s]; ld.global.b32 %r1, [%rd4];", "read before wait", "x)"),
    ],
)
def test_may_not_stand_above_the_wait(code: str, kind: str, who: str) -> None:
    assert_found(early(code), kind, "k line ", who)


def test_too_many_paths_are_not_proven() -> None:
    branches = "".join(
        f"setp.eq.b32 %p{i}, %r{i}, 0; @%p{i} bra $A{i}; bar.sync 0; $A{i}: "
        f"@%p{i} bra $B{i}; bar.sync 0; $B{i}:\n"
        for i in range(16)
    )
    assert_found(early(branches), "not proven", "too many paths")
