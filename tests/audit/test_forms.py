"""Short reports in `forms.txt`, each with one figure that is wrong and what it would be in an honest twin.

A report begins with `%%% .END | WRONG | RIGHT`, END being its file's; `<<>>` marks the figure. The rules were mended
after about half of them were missed, so they say that nothing was lost, not how good the audit is.
"""

import re
from pathlib import Path

import pytest

from expertile.audit import audit_text

FORMS = re.findall(r"%%% (\S+) \| (.*) \| (.*)\n((?:(?!%%% ).*\n)+)", (Path(__file__).parent / "forms.txt").read_text())


def test_there_are_many():
    assert len(FORMS) > 140


@pytest.mark.parametrize("end, wrong, right, text", FORMS, ids=[form[3][:40] for form in FORMS])
def test_the_wrong_figure_is_found_and_its_twin_is_not(end, wrong, right, text):
    line = text[: text.index("<<>>")].count("\n") + 1
    found = audit_text(text.replace("<<>>", wrong), f"x{end}").findings
    assert any(line in f.all_lines for f in found)
    assert audit_text(text.replace("<<>>", right), f"x{end}").findings == ()
