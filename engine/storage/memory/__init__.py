"""Host memory in slots, shared with the storage process; it may outlive the engine."""
