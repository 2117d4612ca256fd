"""Lets torchvision be imported beside a CPU build of torch where its own build is one for CUDA, as PyPI's on Linux is.

The library of its operators cannot be loaded then. This declares the two whose absence ends the import; none is ever called.
"""

import importlib.metadata
import sys


class _BeforeTorchvision:
    """Finds no module; declares the operators when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # Builds for CPUs say so in their version, and can be loaded.
            if not torch.backends.cuda.is_built() and "+" not in importlib.metadata.version("torchvision"):
                for operator in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float limit) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
