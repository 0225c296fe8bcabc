"""The PTX reader on what the CuTe DSL prints and on small bodies written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3fuse.errors import ParseError
from k3fuse.schedule.ptx import read_kernel
from k3fuse.schedule.ptx_access import access_of, destinations
from k3fuse.schedule.ptx_paths import loops

PTX = Path(__file__).parent / "ptx"
ARCHES = ("sm_90a", "sm_103a")


def body(text: str, parameters: str = ".param .u64 .ptr .global .align 16 k_param_0") -> str:
    return f".version 8.8\n.target sm_90a\n.visible .entry k(\n{parameters}\n)\n{{\n{text}\n}}\n"


@pytest.mark.parametrize("arch", ARCHES)
def test_entry_parameters_block_and_shared_memory(arch: str) -> None:
    kernel = read_kernel((PTX / f"bulk.{arch}.ptx").read_text(), "bulk_0")
    assert [(p.index, p.type, p.bytes, p.pointer) for p in kernel.parameters] == [
        (0, "u64", 8, True),
        (1, "u64", 8, True),
        (2, "u64", 8, True),
        (3, "u32", 4, False),
    ]
    assert kernel.block == (128, 1, 1)
    (shared,) = kernel.shared
    assert (shared.name, shared.align, shared.external) == ("__dynamic_shmem__0", 1024, True)
    assert kernel.static_shared == 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "size"), [("warps", 512), ("held_pointer", 8)])
def test_static_shared_memory(name: str, size: int, arch: str) -> None:
    kernel = read_kernel((PTX / f"{name}.{arch}.ptx").read_text(), f"{name}_0")
    assert kernel.static_shared == size


@pytest.mark.parametrize("path", sorted(PTX.glob("*.ptx")), ids=lambda p: p.stem)
def test_every_instruction_keeps_its_line(path: Path) -> None:
    text = path.read_text()
    kernel = read_kernel(text, path.name.split(".")[0] + "_0")
    lines = text.splitlines()
    found = list(kernel.instructions())
    assert all(item.opcode in lines[item.line - 1] for item in found)
    code = [x.split("//")[0].strip() for x in lines[kernel.line - 1 :]]
    count = sum(x.endswith(";") and not x.startswith((".", ")")) for x in code)
    assert len(found) == count


def test_scopes_keep_registers_and_labels_apart() -> None:
    block = """{ .reg .pred P; AGAIN:
      mbarrier.try_wait.parity.shared.b64 P, [%r1], 0;
      @P bra.uni DONE; bra.uni AGAIN; DONE: }"""
    kernel = read_kernel(body(block + block + "ret;"), "k")
    guards = [i.guard for i in kernel.instructions() if i.guard]
    assert len(set(guards)) == 2
    assert len(loops(kernel)) == 2
    assert all(len(loop.exits) == 1 for loop in loops(kernel))


def test_branch_table() -> None:
    text = """mov.u32 %r1, %ctaid.x;
    T: .branchtargets A, B;
    brx.idx %r1, T;
    A: bar.sync 0;
    B: @!%p1 exit;
    ret;"""
    kernel = read_kernel(body(text), "k")
    assert kernel.blocks[0].successors == [1, 2]
    assert kernel.blocks[2].successors == [3]
    assert kernel.blocks[3].successors == []


def test_parameter_structs_and_module_variables() -> None:
    parameters = ".param .align 64 .b8 k_param_0[128],\n.param .f32 k_param_1"
    text = ".global .align 1 .b8 words[4] = {1, 2, 3, 4};\n" + body("ret;", parameters)
    kernel = read_kernel(text, "k")
    assert [(p.type, p.bytes) for p in kernel.parameters] == [("b8", 128), ("f32", 4)]
    assert kernel.globals == {"words"}
    assert kernel.block is None


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        (body("ret;"), "other", r"no entry other \(entries: k\)"),
        (body("bra L;"), "k", "line 7: no label L"),
        (body("ret"), "k", "line 7: a statement does not end"),
        (body("= 3;"), "k", "line 7: not understood"),
        (body("ret;").rstrip("}\n"), "k", "no closing brace"),
        (body("ret;", "int x"), "k", "parameter 0 is not understood"),
    ],
)
def test_errors(text: str, entry: str, words: str) -> None:
    with pytest.raises(ParseError, match=words):
        read_kernel(text, entry)


@pytest.mark.parametrize(
    ("text", "kind", "space", "results"),
    [
        ("ld.global.nc.L1::no_allocate.v2.b32 {%r1, %r2}, [%rd1];", "read", "global", 2),
        ("ld.acquire.sys.b32 %r1, [%rd1];", "read", "generic", 1),
        ("st.shared::cta.b32 [%r1], %r2;", "write", "shared", 0),
        ("atom.global.add.u32 %r1, [%rd1], 1;", "update", "global", 1),
        ("red.relaxed.sys.global.add.u32 [%rd1], 1;", "update", "global", 0),
        ("multimem.ld_reduce.relaxed.sys.global.add.f32 %r1, [%rd1];", "read", "global", 1),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "read", "global", 0),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;", "write", "global", 0),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%r1], [%rd1, {%r2, %r3}], [%r4];",
            *("read", "global", 0),
        ),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16;",
            *("update", "global", 0),
        ),
        ("cp.async.bulk.prefetch.L2.global [%rd1], 64;", "prefetch", "global", 0),
        ("prefetch.global.L2 [%rd1];", "prefetch", "global", 0),
        ("unheard.of.b32 %r1, [%rd1];", "unknown", "generic", 1),
    ],
)
def test_accesses(text: str, kind: str, space: str, results: int) -> None:
    (item,) = read_kernel(body(text), "k").instructions()
    access = access_of(item)
    assert access is not None
    assert (access.kind, access.space, len(destinations(item))) == (kind, space, results)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.wait_group 0;",
        "cp.async.mbarrier.arrive.shared.b64 [%r1];",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, "
        "[%r3];",
        "prefetch.tensormap [%rd1];",
        "mbarrier.init.shared.b64 [%r1], 1;",
        "griddepcontrol.wait;",
    ],
)
def test_instructions_without_global_access(text: str) -> None:
    (item,) = read_kernel(body(text), "k").instructions()
    assert access_of(item) is None
