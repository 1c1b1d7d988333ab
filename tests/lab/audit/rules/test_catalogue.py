from expertile.lab.audit import NOT_CHECKABLE
from expertile.lab.audit.context import Context
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report
from expertile.lab.audit.rules.catalogue import RULES, remaining


def test_every_rule_stands_once_and_says_what_it_checks():
    assert len(set(RULES)) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)


def test_claims_that_no_rule_judged_get_a_reason():
    context = Context(Report(parse("a: 3 ms\n\nb: 2x and 40%\n"), Options()))
    judged = context.finding(context.claims[0], NOT_CHECKABLE, "some_rule", "why")
    rest = remaining(context, [judged])
    assert [(f.line, f.verdict, f.rule) for f in rest] == [(3, NOT_CHECKABLE, "unjudged")] * 2
    assert rest[0].explanation == "2x: no two figures in the report give this ratio"
