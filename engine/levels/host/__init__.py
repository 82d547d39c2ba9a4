"""The slots of host memory."""
