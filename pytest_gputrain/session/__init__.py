"""Decides what one pytest process measures, in which order and against what. Running is left to execution, judging to
gate.
"""
