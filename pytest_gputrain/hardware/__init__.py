"""Tells which GPUs are here and who uses them, without torch."""
