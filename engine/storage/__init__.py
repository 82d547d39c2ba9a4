"""Copies of KV below the device: host memory shared with a process that keeps records on disk."""
