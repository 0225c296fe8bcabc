"""What a check of a schedule answers: findings, what stays open, and the numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One reason why a schedule is rejected (or not proven); names the launches and the object."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Proof:
    """The outcome. `proved` only when every check ran and none failed.

    not_proven: checks that could not be completed. no_resources: launches without a kernel yet,
    whose co-residency is open; this alone does not stop an ACCEPT of the order.
    """

    schedule: str
    findings: list[Finding] = field(default_factory=list[Finding])
    not_proven: list[str] = field(default_factory=list[str])
    no_resources: list[str] = field(default_factory=list[str])
    proved_facts: list[str] = field(default_factory=list[str])
    assumptions: list[str] = field(default_factory=list[str])
    moments: int = 0
    checks: int = 0
    seconds: float = 0.0

    @property
    def rejected(self) -> bool:
        return bool(self.findings)

    @property
    def proved(self) -> bool:
        return not self.findings and not self.not_proven

    @property
    def verdict(self) -> str:
        return "REJECT" if self.rejected else "ACCEPT" if self.proved else "NOT PROVEN"
