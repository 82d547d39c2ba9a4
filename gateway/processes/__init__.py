"""Several processes of a gateway on one host: each is a gateway of its own on one port."""
