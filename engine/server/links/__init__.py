"""Connections of the engine process: to its parent, and to gateways elsewhere."""
