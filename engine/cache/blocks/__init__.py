"""The pool of KV blocks, and the tables that hold them."""
