"""Prompts: chat templates, tokenization and detokenization. Start at `Renderer`."""

from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.renderer import Renderer

__all__ = ["Detokenizer", "Renderer"]
