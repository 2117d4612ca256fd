"""Writes everything that people and other tools read of a run: terminal, JSON, HTML, exports and trends. Nothing is judged
here.
"""
