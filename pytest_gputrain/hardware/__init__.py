"""The parent's side of the hardware: which GPUs are here and who uses them, without torch."""
