"""The gateway's side of the engine: requests, events and statistics over a socket."""
