"""Finds in a history how the figures of each case moved, and at which commits. Printing it is left to cli and html."""
