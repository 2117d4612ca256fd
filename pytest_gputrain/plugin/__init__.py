"""Implements pytest's side: hooks, options, fixtures, markers and the reading of settings. What a test asks for is done in
session.
"""
