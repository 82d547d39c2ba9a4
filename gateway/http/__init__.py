"""HTTP: sockets, connections, authentication, request bodies, responses and errors."""
