"""The core: one thread's view of the engine, a step at a time."""
