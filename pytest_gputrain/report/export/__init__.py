"""Writes reports in the formats of other tools; `pytest_gputrain.report.export.formats` names them."""
