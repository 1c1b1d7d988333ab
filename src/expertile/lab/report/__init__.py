"""Reports from records: verdict, terminal table, Markdown and a self-contained HTML page."""

from expertile.lab.report.history import history, history_page, show_history
from expertile.lab.report.leaderboard import leaderboard, tables
from expertile.lab.report.markdown import markdown
from expertile.lab.report.page import html, site, summary
from expertile.lab.report.table import ResultTable, elsewhere_lines, table
from expertile.lab.report.verdict import of_candidate, verdict

__all__ = [
    "ResultTable",
    "elsewhere_lines",
    "history",
    "history_page",
    "html",
    "leaderboard",
    "markdown",
    "of_candidate",
    "show_history",
    "site",
    "summary",
    "table",
    "tables",
    "verdict",
]
