"""Values of small tensors on an emulated GPU, whose kernels compute nothing.

What decides the way that a program takes is small, and mostly integers and booleans: masks, positions, token ids, indices of
experts. The operators whose inputs are all small and known run a second time, on the host, and what they compute is written
to where the GPU's operator would have written it. All else stays unknown. What the host reads of it is zero, and is told.

It runs inside programs that lack this package's dependencies, too: it imports the standard library and torch.
"""
