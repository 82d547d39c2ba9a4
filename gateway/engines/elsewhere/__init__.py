"""Engines on other hosts, or of another keeper on this one."""
