"""Reads and writes baselines, appends the history, and reads published tables and reports. Judging is left
to gate.
"""
