"""What each program of this folder prints at its end, where tools/public_figures.py reads it."""

import torch


def print_peaks(model):
    """Print the parameters of the model, and the most bytes that torch had allocated and reserved since the last reset.

    The parameters are compared with those that a source prints, as a proof that it is the same model.
    """
    torch.cuda.synchronize()
    print("parameters", sum(weight.numel() for weight in model.parameters()))
    print("peak allocated", torch.cuda.max_memory_allocated())
    print("peak reserved", torch.cuda.max_memory_reserved(), flush=True)
