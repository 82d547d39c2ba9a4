"""The OpenAPI documents of both listeners, from tables of operations and the structs of bodies."""
