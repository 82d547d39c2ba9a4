"""`trunkline bench` and `trunkline replay`: seeded load for any server of chat completions.

It is an HTTP client. Of Trunkline it only knows how to start a server.
"""
