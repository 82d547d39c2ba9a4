"""Kernels: C for CPUs, Triton and Gluon for GPUs, and their specification in `reference`."""
