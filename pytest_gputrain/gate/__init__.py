"""Judges figures against baselines, limits and published figures, and computes what that needs. Pure: no file, clock or
hardware.
"""
