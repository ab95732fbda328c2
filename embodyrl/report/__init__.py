"""The report: one HTML file about one or more runs that works offline."""

from embodyrl.report.write import build_report

__all__ = ["build_report"]
