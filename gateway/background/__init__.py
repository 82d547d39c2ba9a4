"""Tasks that a gateway runs beside its requests."""
