"""Predicts what a case of any size would allocate and compute on a device that is not there, by running it on fake tensors.

The recipe, the engine and the optimizer are those of a real run. Every tensor is torch's FakeTensor, which has a shape and a
storage without contents. `tracker` follows the storages, `values` keeps what shapes depend on, `shapes` remembers calls,
`patches` has what a fake needs to pass for a tensor and what CUDA does otherwise than a CPU. The outcome is a `trace`;
`repetition` makes that of a deep model from those of shallow ones, and `allocator` replays it.
"""
