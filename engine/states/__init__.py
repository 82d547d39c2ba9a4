"""Recurrent states of running sequences: what layers keep instead of KV."""
