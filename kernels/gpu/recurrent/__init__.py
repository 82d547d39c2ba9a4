"""Kernels of recurrent layers: short convolutions, the gated delta rule, Mamba-2, kept states."""
