"""Replies and a baseline in, a verdict out. Pure: no file, clock or hardware."""
