"""The report: one HTML file about one or more runs; it works offline."""

from embodyrl.report.write import build_report

__all__ = ["build_report"]
