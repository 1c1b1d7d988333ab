"""An audit as text, Markdown, JSON, SARIF or HTML."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict

from expertile.audit.engine import Audit
from expertile.audit.finding import ACCUSATIONS, IMPOSSIBLE, INCONSISTENT, QUESTION, Finding

FORMATS = ("text", "md", "json", "sarif", "html")
_MARK = {IMPOSSIBLE: "✗", INCONSISTENT: "✗", QUESTION: "?"}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c}
table{border-collapse:collapse;width:100%}td{vertical-align:top;padding:0 .6rem}td.n{color:#667;text-align:right}
td.l{font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}tr.bad{background:#fde2e0}
tr.ask{background:#fff3cd}p.f{margin:.2rem 0 .4rem;font-size:14px}a{color:inherit}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}tr.bad{background:#5a1f1b}tr.ask{background:#4d4010}}"""


def render(audits: Sequence[Audit], form: str) -> str:
    """The audits in one of FORMATS: accusations and questions.

    Raises ValueError for another format.
    """
    if form not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {form!r}")
    return {"text": _text, "md": _markdown, "json": _json, "sarif": _sarif, "html": _html}[form](audits)


def verdict(audit: Audit) -> str:
    """One sentence: how many claims fail."""
    bad, asked = len(audit.accusations), sum(f.verdict == QUESTION for f in audit.findings)
    if not audit.figures:
        return "no figure with a unit was found"
    claims = f"{bad} claim{'s' * (bad != 1)} contradict{'s' * (bad == 1)} arithmetic or the hardware"
    more = f"; {asked} question{'s' * (asked != 1)}" if asked else ""
    return f"{claims if bad else 'nothing contradicts'}{more} ({audit.figures} figure{'s' * (audit.figures != 1)} read)"


def _lines_of(f: Finding) -> str:
    return ", ".join(map(str, f.all_lines[:6])) + (" …" if len(f.all_lines) > 6 else "")


def _text(audits: Sequence[Audit]) -> str:
    out = []
    for audit in audits:
        out.append(f"{audit.name}: {verdict(audit)}")
        for f in audit.findings:
            out.append(f"  {_MARK[f.verdict]} line {_lines_of(f)}: {f.verdict} ({f.rule}): {f.quote}")
            out.append(f"      {f.message}")
    return "\n".join(out)


def _markdown(audits: Sequence[Audit]) -> str:
    out = []
    for audit in audits:
        out += [f"## {audit.name}", "", verdict(audit) + ".", ""]
        cells = [("line", "verdict", "figure", "arithmetic"), ("---",) * 4]
        cells += [(_lines_of(f), f"{f.verdict}: {f.rule}", f.quote, f.message) for f in audit.findings]
        for row in cells if audit.findings else ():
            out.append("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in row) + " |")
        out.append("")
    return "\n".join(out).rstrip("\n")


def _json(audits: Sequence[Audit]) -> str:
    files = [
        {
            "file": audit.name,
            "figures": audit.figures,
            "accusations": len(audit.accusations),
            "findings": [asdict(f) | {"lines": f.all_lines} for f in audit.findings],
        }
        for audit in audits
    ]
    return json.dumps(files, indent=1, ensure_ascii=False)


def _sarif(audits: Sequence[Audit]) -> str:
    """SARIF 2.1.0 (OASIS), as code scanning reads it."""
    results = [
        {
            "ruleId": f.rule,
            "level": "error" if f.verdict in ACCUSATIONS else "note",
            "message": {"text": f"{f.quote}: {f.message}"},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": audit.name}, "region": {"startLine": max(1, line)}}}
                for line in (f.line, *(line for line in f.all_lines if line != f.line))
            ],
        }
        for audit in audits
        for f in audit.findings
    ]
    rules = [{"id": rule} for rule in sorted({str(r["ruleId"]) for r in results})]
    driver = {"name": "expertile audit", "informationUri": "https://pypi.org/project/expertile/", "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": results}]
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": runs}, indent=1)


def _html(audits: Sequence[Audit]) -> str:
    """The report's own lines, marked, with the arithmetic below each."""
    body = []
    for i, audit in enumerate(audits):
        body.append(f"<h2>{html.escape(audit.name)}</h2><p><strong>{html.escape(verdict(audit))}</strong></p><ul>")
        body += [f'<li><a href="#f{i}-{f.line}">line {f.line}</a>: {html.escape(f.quote)}</li>' for f in audit.findings]
        body.append("</ul><table>")
        for number, line in enumerate(audit.lines, 1):
            touched = [f for f in audit.findings if number in f.all_lines]
            kind = "bad" if any(f.verdict in ACCUSATIONS for f in touched) else "ask" if touched else ""
            body.append(f'<tr id="f{i}-{number}" class="{kind}"><td class="n">{number}</td><td class="l">')
            body.append(html.escape(line[:2000]))
            for f in touched:
                if f.line == number:
                    body.append(f'<p class="f"><b>{f.verdict}</b> ({f.rule}): {html.escape(f.message)}</p>')
            body.append("</td></tr>")
        body.append("</table>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>expertile audit</title><style>{_STYLE}</style><body>{''.join(body)}</body></html>"
    )
