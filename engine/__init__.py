"""The paged-attention engine. Its door is `api`, `config`, `errors`, `client`, `supervisor`, `model_store`."""
