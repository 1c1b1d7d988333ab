"""Reports from records: verdict, terminal table, Markdown and a self-contained HTML page."""
