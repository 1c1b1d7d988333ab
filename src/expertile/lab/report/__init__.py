"""Reports from records: verdict, terminal table, Markdown, README headline and a self-contained HTML page."""

from expertile.lab.report.markdown import headline, markdown, update_readme
from expertile.lab.report.page import html
from expertile.lab.report.table import ResultTable, table
from expertile.lab.report.verdict import verdict

__all__ = ["ResultTable", "headline", "html", "markdown", "table", "update_readme", "verdict"]
