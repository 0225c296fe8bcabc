"""`k3fuse prove`: whether schedules are safe, by themselves, with no GPU and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3fuse.cli.output import console, emit_json
from k3fuse.errors import InputError
from k3fuse.runtime.bundle import read_bundle
from k3fuse.runtime.plan import read_plan
from k3fuse.schedule.finding import Proof
from k3fuse.schedule.from_plan import schedule_of
from k3fuse.schedule.model import Schedule
from k3fuse.schedule.proof import MAX_MOMENTS, prove
from k3fuse.schedule.text import parse_schedules

_SHOWN = 20  # findings of a schedule printed for people; --json has all


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("prove")(prove_)


def prove_(
    file: Annotated[
        Path, typer.Argument(help="A schedule as text, a plan (JSON), or a bundle directory.")
    ],
    strict: Annotated[
        bool, typer.Option("--strict/--no-strict", help="Exit 1 on what is not proven, too.")
    ] = True,
    limit: Annotated[
        int, typer.Option(min=1, help="Unrolled moments to take on; beyond it: not proven.")
    ] = MAX_MOMENTS,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Prove reads, mailboxes, joins and co-residency, or say what is wrong or not proven."""
    proofs = [prove(schedule, limit=limit) for schedule in _schedules(file)]
    verdict = _verdict(proofs)
    if json_output:
        emit_json(
            {
                "file": str(file),
                "verdict": verdict,
                "schedules": [_data(proof) for proof in proofs],
            }
        )
    else:
        for proof in proofs:
            _show(proof)
    if verdict == "REJECT" or (strict and verdict != "ACCEPT"):
        raise typer.Exit(1)


def _schedules(path: Path) -> list[Schedule]:
    """What is to be proved; InputError names the file and the line."""
    if path.is_dir():
        bundle = read_bundle(path)
        if not bundle.buckets:
            raise InputError(f"{path}: a bundle without plans: compile again")
        return [
            schedule_of(bundle.plan(bucket), bundle.resources(bucket)) for bucket in bundle.buckets
        ]
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a schedule, a plan or a bundle") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: neither a schedule nor a plan: not text") from None
    if text.lstrip().startswith("{"):
        return [schedule_of(read_plan(text, str(path)))]
    return parse_schedules(text, str(path))


def _verdict(proofs: list[Proof]) -> str:
    verdicts = {proof.verdict for proof in proofs}
    return next(v for v in ("REJECT", "NOT PROVEN", "ACCEPT") if v in verdicts)


def _data(proof: Proof) -> dict[str, object]:
    return {
        "name": proof.schedule,
        "verdict": proof.verdict,
        "findings": [{"kind": f.kind, "message": f.message} for f in proof.findings],
        "not_proven": proof.not_proven,
        "no_kernel_resources": proof.no_resources,
        "proved": proof.proved_facts,
        "moments": proof.moments,
        "checks": proof.checks,
        "seconds": round(proof.seconds, 3),
        "assumptions": proof.assumptions,
    }


def _show(proof: Proof) -> None:
    lines = [
        f"{proof.schedule}: {proof.verdict} ({proof.moments} moments, {proof.checks} checks, "
        f"{proof.seconds:.2f} s)"
    ]
    lines += [f"  {finding}" for finding in proof.findings[:_SHOWN]]
    if len(proof.findings) > _SHOWN:
        lines.append(f"  and {len(proof.findings) - _SHOWN} more findings (--json has all)")
    lines += [f"  not proven: {reason}" for reason in proof.not_proven]
    if proof.no_resources:
        lines.append(
            f"  not proven: no kernel resources yet: co-residency of {len(proof.no_resources)} "
            "launches"
        )
    lines += [f"  proved: {fact}" for fact in proof.proved_facts]
    lines += [f"  assumed: {assumption}" for assumption in proof.assumptions]
    for line in lines:
        console.print(line, markup=False, highlight=False)
