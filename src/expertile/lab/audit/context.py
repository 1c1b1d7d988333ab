"""What every rule is given: the report, its claims, and the workloads of places worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from expertile.lab.audit.claims import Claim, claims
from expertile.lab.audit.finding import Finding
from expertile.lab.audit.quantities import Quantity
from expertile.lab.audit.report import Place, Report
from expertile.lab.audit.workload import Workload, nearby


@dataclass
class Context:
    """`report` and the derived facts rules share. Rules are functions (Context) -> list[Finding]."""

    report: Report
    claims: list[Claim] = field(default_factory=list)
    _work: dict[Place, Workload | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.claims = claims(self.report)

    @cached_property
    def _by_cell(self) -> dict[tuple[int, int, int], Claim]:
        found: dict[tuple[int, int, int], Claim] = {}
        for c in self.claims:
            p = c.place
            if p.table is not None and p.row is not None and p.column is not None and c.anchor[1] % 1000 == 0:
                found.setdefault((p.table, p.row, p.column), c)
        return found

    @cached_property
    def _by_quantity(self) -> dict[int, Claim]:
        return {id(c.quantity): c for c in self.claims}

    @cached_property
    def by_line(self) -> dict[int, list[Claim]]:
        """Claims of running text (not of tables), by line, in order."""
        found: dict[int, list[Claim]] = {}
        for c in self.claims:
            if c.place.table is None:
                found.setdefault(c.place.line, []).append(c)
        return found

    @cached_property
    def by_sentence(self) -> list[list[Claim]]:
        """Claims of running text, sentence by sentence."""
        found: dict[tuple[int, int], list[Claim]] = {}
        for line, claims_here in self.by_line.items():
            for c in claims_here:
                found.setdefault((line, c.sentence_start), []).append(c)
        return list(found.values())

    @cached_property
    def by_block(self) -> dict[int, list[Claim]]:
        """Claims of running text by block, in order."""
        found: dict[int, list[Claim]] = {}
        for c in self.claims:
            if c.place.table is None:
                found.setdefault(c.place.block, []).append(c)
        return found

    @cached_property
    def limits(self) -> list[Claim]:
        """Claims of what the hardware could do."""
        return [c for c in self.claims if c.is_limit]

    @cached_property
    def ratio_cells(self) -> list[Claim]:
        """Leading figures of ratio columns."""
        return [
            c for c in self._by_cell.values() if c.kind == "ratio" and c.column is not None and c.column.kind == "ratio"
        ]

    def in_cell(self, table: int, row: int, column: int) -> Claim | None:
        """The claim of a table cell's leading figure."""
        return self._by_cell.get((table, row, column))

    def of(self, quantity: Quantity) -> Claim | None:
        """The claim that holds this very quantity."""
        return self._by_quantity.get(id(quantity))

    def work(self, place: Place) -> Workload | str:
        """The workload at `place` from nearby sizes, or the reason there is none."""
        if place not in self._work:
            self._work[place] = nearby(self.report, place)
        return self._work[place]

    def finding(
        self,
        claim: Claim,
        verdict: str,
        rule: str,
        explanation: str,
        value: float | None = None,
        limit: float | None = None,
        unit: str = "",
    ) -> Finding:
        """A finding about `claim`, quoting it."""
        return Finding(claim.place.line, claim.quote, verdict, rule, explanation, value, limit, unit, claim.anchor)
