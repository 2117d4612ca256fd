"""Emulates NVIDIA GPUs: builds C stand-ins of CUDA's libraries for the installed torch, and describes a GPU to them."""
