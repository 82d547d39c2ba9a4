"""Kernels for GPUs, in Triton and Gluon."""
