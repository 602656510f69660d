"""Products on a CPU by operators of PyTorch that read packed weights; no Triton kernels, and nothing that a GPU runs."""
