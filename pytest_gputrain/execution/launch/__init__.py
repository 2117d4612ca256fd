"""The processes of a case on this machine, and torchrun's agents where it takes several nodes. The training is in worker."""
