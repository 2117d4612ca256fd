"""Reads and writes baselines and predictions, appends the history, and reads published tables and reports. Judging is left
to gate.
"""
