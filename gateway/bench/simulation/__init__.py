"""`trunkline simulate`: a fleet in simulated time, over the real prefix cache and router."""
