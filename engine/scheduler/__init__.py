"""The scheduler: live requests, waiting and running sequences, and the slices of each step."""
