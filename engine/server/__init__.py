"""The engine as a process: its socket, its thread, its heartbeat."""
