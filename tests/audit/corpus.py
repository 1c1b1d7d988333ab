"""Short reports of our own, honest and planted, in all formats; `corpus/expected.json` has their errors' lines.

The rules were fitted to these reports: their precision and recall say that nothing was lost, not how good the audit is.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from expertile.audit import Audit, audit_text
from expertile.audit.finding import QUESTION

FOLDER = Path(__file__).parent / "corpus"
EXPECTED: dict[str, dict[str, list[int]]] = json.loads((FOLDER / "expected.json").read_text())


@lru_cache
def of(name: str) -> Audit:
    return audit_text((FOLDER / name).read_text(), name)


@dataclass(frozen=True)
class Score:
    true: int
    false: int
    missed: int
    asked: int  # of the planted errors that are not accused

    @property
    def precision(self) -> float:
        return self.true / max(1, self.true + self.false)

    @property
    def recall(self) -> float:
        return (self.true + self.asked) / max(1, self.true + self.asked + self.missed)

    def __str__(self) -> str:
        return (
            f"audit: precision {self.precision:.2f} ({self.false} of {self.true + self.false} accusations false), "
            f"recall {self.recall:.2f} (of the planted errors {self.true} accused, {self.asked} asked about, "
            f"{self.missed} missed), "
            f"{len(EXPECTED)} reports that the rules were fitted to"
        )


def score() -> Score:
    """An accusation is true if it names a planted line that no other accusation has named."""
    true = false = missed = asked = 0
    for name, expected in EXPECTED.items():
        planted = list(expected["accuse"])
        for finding in of(name).accusations:
            hit = next((line for line in planted if line in finding.all_lines), None)
            if hit is None:
                false += 1
            else:
                planted.remove(hit)
                true += 1
        questions = {line for f in of(name).findings if f.verdict == QUESTION for line in f.all_lines}
        missed += len(planted) + len({*expected.get("ask", ())} - questions)
        asked += len({*expected.get("ask", ())} & questions)
    return Score(true, false, missed, asked)
