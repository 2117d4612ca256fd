"""Writes reports and published tables; `pytest_gputrain.report.export.formats` lists the formats."""
